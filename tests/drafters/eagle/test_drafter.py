"""When the head learns in the loop, from what, and what becomes of its saves; nothing is computed here."""

import types

import numpy as np
import pytest
import yaml

from drafters.arguments import checked
from drafters.base import DraftRequest, Sampled
from drafters.eagle import drafter as module
from drafters.eagle import saving, time_budget
from drafters.eagle.arguments import BlockArguments, EagleArguments
from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.model import HeadConfig
from drafters.eagle.slots import HeadSlots
from rljax.errors import ConfigError, DrafterError
from rljax.numerics.rows import Numerics
from tests.configs import table
from tests.drafters.eagle.tiny import POLICY

TOKEN = 3 * 2 * 4  # bytes of its states here: float32 [3, 2]


class Trainer:
    """Stands in for `HeadTrainer`; a slice takes a second."""

    def __init__(self, clock):
        self.params = {"fc": np.ones((2, 2), np.float32)}
        self.clock, self.steps, self.lengths, self.reserved, self.slices = clock, [], [], 0, 0

    def begin_step(self, step):
        self.steps.append(step)

    def add(self, tokens, states, mask):
        assert len(tokens) == len(states) == len(mask)
        self.lengths.append(len(tokens))

    def reserve(self, size):
        self.reserved = size

    def slice(self, shared):
        self.clock.now += 1.0
        self.slices += 1
        return {}

    def metrics(self):
        return {"slices": self.slices}

    def state(self):
        return {}

    def load_state(self, state):
        assert not state


class Slots(HeadSlots):
    """Computes nothing."""

    numerics = types.SimpleNamespace(dtype=np.float32)

    def __init__(self, collector):
        self._collector, self._state = collector, types.SimpleNamespace(lengths=np.zeros(3))

    def use(self, *of):
        pass

    _skip = _forget = use


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(now=100.0)
    fake = types.SimpleNamespace(perf_counter=lambda: now.now)
    for one in (time_budget, module):
        monkeypatch.setattr(one, "time", fake)
    return now


def make(clock, **args):
    drafter = EagleDrafter(EagleArguments(**args))
    drafter.engine = types.SimpleNamespace(config=types.SimpleNamespace(tie_embeddings=True))
    drafter.trainer = drafter.collector.trainer = Trainer(clock)
    drafter.slots = Slots(drafter.collector)
    drafter.config = HeadConfig("eagle", POLICY)
    drafter.refresh(policy())
    return drafter


def policy():
    return {"embed": np.zeros(3)}


@pytest.mark.parametrize(("inside", "left"), [(0, 3), (2, 1), (9, 0)])
def test_training_stops_with_its_budget(clock, inside, left):
    """A tenth of 35 seconds is for three slices, between passes and behind the rollout together."""
    drafter = make(clock, train_share=0.1, slices=50)
    drafter._budget.expect(1.0)
    drafter.begin([])
    clock.now += 35.0
    done = sum(drafter.train() for _ in range(inside))
    assert done == 3 - left
    drafter.learn([])
    assert drafter.trainer.slices == 3
    clock.now += 1000.0  # an update of the policy: no time of the rollouts
    drafter.begin([])
    assert not drafter.train()


def test_a_step_is_a_policy_and_every_nth_trains(clock):
    """Rounds of one step, as dynamic sampling makes them, are no steps of their own; nor is an evaluation."""
    drafter = make(clock, train_below=0, slices=2)
    weights = policy()
    for _ in range(3):
        drafter.refresh(weights)
        drafter.begin([])
        drafter.learn([])
    assert drafter.trainer.steps == [] and drafter.trainer.slices == 6
    resumed = make(clock, train_below=0)
    resumed.load_state(drafter.state())
    for each in (drafter, resumed):
        each.refresh(policy())  # an evaluation's copy, and then the next step's
        each.refresh(policy())
        assert each.trainer.steps == [1] and int(each.state()["step"]) == 1
    drafter, slices = make(clock, train_below=0, slices=2, train_every=3), []
    for step in range(7):
        drafter._step, drafter._slices = step, 0
        before = drafter.trainer.slices
        drafter.learn([])
        slices.append(drafter.trainer.slices - before)
    assert slices == [2, 0, 0, 2, 0, 0, 2]


def test_the_share_of_the_step_before_reaches_the_buffer(monkeypatch):
    settings = []
    monkeypatch.setattr(module, "HeadTrainer", lambda *args, **_: settings.append(args[5]))
    monkeypatch.setattr(module, "rope_table", lambda *args: None)
    drafter = EagleDrafter(EagleArguments(previous_share=0.25))
    nothing = types.SimpleNamespace(config=None, numerics=Numerics(), mesh=None, sampling=None)
    drafter.engine = drafter.slots = nothing
    drafter.config = HeadConfig("eagle", POLICY)
    drafter.make_trainer({})
    assert settings[0].previous_share == 0.25


def test_responses_that_run_count_against_the_buffer(clock):
    """Of room for 24 tokens, half may be theirs; the shortest is given up for it."""
    drafter = make(clock, buffer_bytes=24 * TOKEN)
    drafter.begin([DraftRequest((1, 2, 3), None)] * 3)
    collector, states = drafter.collector, np.zeros((3, 4, 3, 2), np.float32)
    collector.insert(states, range(3), range(3), range(3))
    assert drafter.trainer.reserved == 6 * TOKEN
    for counts, dropped in ([4, 1, 1], 0), ([1, 1, 2], 1):  # then 7 of the first, 5 of the third
        collector.advance(states, np.asarray(counts))
        assert drafter.trainer.reserved == 12 * TOKEN
        assert drafter.metrics()["head/dropped_running"] == dropped
    counts, ended = np.asarray([5, 2, 3], np.int32), np.ones(3, bool)
    tokens = np.zeros((3, 5), np.int32)
    drafter.observe(Sampled(np.arange(3), tokens, counts, counts, counts, ended))
    assert drafter.trainer.lengths == [7, 5] and drafter.trainer.reserved == 0


def test_contexts_are_counted_over_the_run(clock):
    drafter, resumed = make(clock), make(clock)
    drafter.slots.append([0, 1], [4, 4], np.zeros((2, 1), np.int32), np.ones(2, np.int32))
    drafter.collector.totals["absorbed_early"] += 4
    resumed.load_state(drafter.state())
    resumed.slots.append([0], [4], np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    assert resumed.metrics()["head/absorbed_early"] == 4
    assert resumed.metrics()["head/lost_contexts"] == 3


@pytest.mark.parametrize("last", [False, True])
def test_a_failed_save_is_told_and_stops_the_run_if_that_is_asked(clock, tmp_path, monkeypatch, last):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_durably", full)
    told = r"head of step 0 could not be written \(No space left"
    drafter = make(clock, slices=0, save_dir=str(tmp_path), on_save_failure="go_on")
    with pytest.warns(UserWarning, match=told + r".*; the run goes on"):
        drafter.learn([])
        drafter.state()  # the last checkpoint waits for it
    drafter = make(clock, slices=0, save_dir=str(tmp_path), on_save_failure="stop")
    drafter.learn([])
    with pytest.raises(DrafterError, match=told):
        drafter.state() if last else drafter.learn([])


WRONG = """
{hidden_weight: 1.0} -> hidden_weight: eagle3's outputs are no hidden states
{variant: eagle, cross_entropy_weight: -1.0} -> cross_entropy_weight: should be a fin
{unrolled_steps: 15, pack_length: 16} -> pack_length: 16 is too short for 15 unrolled
{block: {depths: [9]}} -> depths: 9 is more than block_size 8
{block: {unrolled_steps: 9}} -> unrolled_steps: 9 is more than block_size 8
{block: {hidden_weight: 1.0}} -> hidden_weight: block's outputs are no hidden states
{block: {variant: eagle3}} -> variant
"""


@pytest.mark.parametrize(("given", "message"), table(WRONG))
def test_arguments_that_cannot_be_are_one_line(given, message):
    """Of an EAGLE head, or of a block."""
    given = yaml.safe_load(given)
    kind, arguments = ("block", BlockArguments) if "block" in given else ("eagle", EagleArguments)
    with pytest.raises(ConfigError, match=f"^speculation.args.{message}"):
        checked("speculation.args", kind, arguments, given.get("block", given))
