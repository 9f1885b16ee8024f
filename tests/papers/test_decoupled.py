"""A small model, or a head, on a device of its own drafts while the policy verifies: the tokens of plain
decoding.

The devices are forced on the host platform, in a process of their own.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from drafters.registry import make_drafters
from rljax.config.speculation import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftStrategy
from rljax.errors import ConfigError
from rljax.papers.specactor import DecoupledConfig, SpecActorKeys
from rljax.papers.specactor.best_of_n import PlannedPass
from rljax.papers.specactor.decoupled import DecoupledManager
from rljax.papers.specactor.pass_plan import Entry
from rljax.speculation.managers.manager import Setup
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord, VerifiedNodes
from rljax.speculation.proposals import ActiveSlots
from tests.devices import run_on_devices
from tests.tiny_policy import FixedTimes

WINDOW = 3

SETUP = """
import json, sys
import jax, numpy as np
from drafters.registry import make_drafters, states_read
from rljax.config.speculation import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.models.huggingface import save_model
from rljax.rollout.collector import Scheduler
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import CONFIG, CheapTimes, make_engine, make_params, make_requests

directory, window = sys.argv[1], int(sys.argv[2])
params = make_params()
requests = make_requests((3, 14, 8, 1), (60, 40, 50, 98))  # more than slots, prompts of one size
head = {"variant": "eagle", "train_below": 0, "slices": 64, "pack_length": 64, "rows": 8}
head |= {"learning_rate": 3e-3}
heads = make_drafters(SpeculationConfig(drafter="eagle", args=head, max_drafts=7))
hidden = states_read(heads, CONFIG)  # the engine hands out what a head reads
engine = make_engine(buckets=Buckets((4,), (128,), (16,), 7), steps=4, hidden_layers=hidden)
expected, plain = Scheduler(engine, 4).run(params, requests)
save_model(f"{directory}/the policy", CONFIG, params, "float32")
keys = iter(jax.random.split(jax.random.key(1), 99))
stirred = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(next(keys), x.shape), params)
save_model(f"{directory}/another", CONFIG, stirred, "float32")

found = {}


def decode(config, drafters, name, devices, rollouts=1):
    choice = StrategyChoice(config)
    speculator = Speculator(engine, drafters, 4, times=CheapTimes(), strategies=choice)
    for rollout in range(rollouts):
        completions, statistics = Scheduler(engine, 4, None, speculator).run(params, requests)
        speculator.learn([])
        found[name.format(rollout)] = {
            "same": all(
                np.array_equal(a.response_ids, b.response_ids) and np.array_equal(a.logprobs, b.logprobs)
                for a, b in zip(completions, expected, strict=True)
            ),
            "devices": [device.id for device in devices()],
            "steps": statistics.steps,
            "plain steps": plain.steps,
            **speculator.metrics(statistics),
        }
"""

SMALL_MODELS = """
for name, mode in (("the policy", "decoupled"), ("another", "decoupled"), ("another", "coupled")):
    config = SpeculationConfig(
        drafter="small_model",
        args={"path": f"{directory}/{name}"},
        decoupled={"window": window, "modes": [mode]},
        max_drafts=7,
    )
    drafters = make_drafters(config)
    where = lambda: drafters["small_model"]._companion.params["embed"].devices()
    decode(config, drafters, f"{name}, {mode}", where)
print("FOUND" + json.dumps(found))
"""

HEAD = """
# A head that begins with the run, trained behind each rollout.
decoupled = {"window": window, "modes": ["decoupled"]}
config = SpeculationConfig(drafter="eagle", args=head, decoupled=decoupled, max_drafts=7)
drafters = make_drafters(config)
assert states_read(drafters, CONFIG) == engine.hidden_layers
decode(config, drafters, "head {}", lambda: drafters["eagle"].slots._params["fc"].devices(), rollouts=2)
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_devices(SETUP + SMALL_MODELS, 2, tmp_path_factory.mktemp("models"), WINDOW)


def check_found(found):
    for one in found.values():
        assert one["same"] and one["devices"] == [1]
        assert one["steps"] < one["plain steps"] and one["speculation/accepted"] > 50


def test_drafts_ahead_change_no_token(found):
    check_found(found)


def test_a_drafter_that_is_always_right_wastes_nothing(found):
    """Its tokens, positions, noise and cache are those of the policy, however far it goes on alone."""
    one = found["the policy, decoupled"]
    assert one["speculation/decoupled_windows"] > 50
    assert one["speculation/decoupled_wasted"] == one["speculation/decoupled_most_wasted"] == 0
    assert one["speculation/acceptance"] > 0.98  # the token that ends a response counts as the pass's own
    assert one["speculation/accept_length"] > 2.5


def test_a_rejection_wastes_two_windows_less_one_at_most(found):
    ahead, between = found["another, decoupled"], found["another, coupled"]
    assert ahead["speculation/decoupled_most_wasted"] == 2 * WINDOW - 1
    assert 0 <= ahead["speculation/decoupled_ready_share"] <= 1
    assert between["speculation/decoupled_windows"] == 0
    assert 0 < between["speculation/decoupled_most_wasted"] <= WINDOW
    assert between["speculation/decoupled_wasted"] < ahead["speculation/decoupled_wasted"]


@pytest.mark.long  # above, small models
def test_a_head_drafts_ahead_and_learns_beside_the_policy(tmp_path):
    found = run_on_devices(SETUP + HEAD, 2, tmp_path, WINDOW)
    check_found(found)
    first, last = found["head 0"], found["head 1"]
    assert last["speculation/decoupled_windows"] > 50
    assert last["speculation/head/loss"] < first["speculation/head/loss"]
    assert last["speculation/accept_length"] > first["speculation/accept_length"]
    assert first["speculation/decoupled_most_wasted"] == 2 * WINDOW - 1


def test_arguments_of_trees_are_refused():
    for name in ("depths", "top_k", "nodes"):
        args = {name: [2] if name == "depths" else 2}
        with pytest.raises(ConfigError, match=f"speculation.args.{name}: is of draft trees"):
            make_drafters(SpeculationConfig(drafter="eagle", args=args, decoupled={"window": 3}))


# -- the choice ----------------------------------------------------------------------------------------------


TIMES = FixedTimes({0: 1.0, 16: 1.1, 32: 1.2})
"""Of passes that take a second, a little more the more rows there are."""


def manager_of(acceptance, draft_seconds, modes=("plain", "coupled", "decoupled"), times=TIMES, batches=(4,)):
    """A manager of four slots."""
    used = []
    tree = DraftStrategy(4, 1, 4)
    ahead = SimpleNamespace(window=4, configure=lambda *args, **named: used.append((args, named)))
    slots = SimpleNamespace(ahead=ahead)
    proposer = SimpleNamespace(name="small_model", slots=slots, trees=(tree,), acceptance=acceptance)
    times.draft_seconds = draft_seconds * tree.depth
    config = SpecActorKeys(decoupled=DecoupledConfig.model_construct(modes=modes))
    return DecoupledManager(Setup([proposer], Buckets(batches, (64,), (16, 32), 7), times, 4), config)


SLOTS = ActiveSlots(*[np.arange(4, dtype=np.int32)] * 3, np.ones(4, bool))


def test_algorithm_1_chooses_by_times_and_acceptance():
    for acceptance, draft_seconds, mode, window in (
        (0.98, 0.3, "decoupled", 4),  # drafting takes as long as a pass, and is hidden
        (0.8, 0.05, "coupled", 4),  # there is little to hide, and a rejection wastes two windows
        (0.3, 0.3, "plain", 0),
    ):
        chosen = manager_of(acceptance, draft_seconds)._chosen((4, 64), SLOTS).all
        assert (chosen.mode, chosen.window) == (mode, window)
    # It is asked again after a thousand tokens.
    manager = manager_of(0.98, 0.3)
    assert manager._chosen((4, 64), SLOTS).all.mode == "decoupled"
    manager._proposer.acceptance = 0.3
    for expected in ("decoupled", "plain"):
        manager.record(PassRecord(None, 4, 4, tokens=999, seconds=1.0))
        assert manager._chosen((4, 64), SLOTS).all.mode == expected


class DearTogether(FixedTimes):
    """Verifying takes three seconds for four slots, and a second for one."""

    def verify(self, batch, length, rows):
        return 3.0 if batch == 4 else 1.0


def test_algorithm_2_has_the_times_of_one_request():
    """In the whole batch a request that is accepted half of the time would get no drafts; alone it does."""
    manager = manager_of(0.98, 0.3, ("plain", "coupled"), DearTogether({0: 1.0}), (1, 4))
    manager._counts = {2: np.array([400.0, 200.0])}
    chosen = manager._chosen((4, 64), SLOTS)
    assert (chosen.all.mode, chosen.all.window) == ("coupled", 4)
    assert {request: way.mode for request, way in chosen.others.items()} == {2: "coupled"}
    assert chosen.others[2].window < 4


def test_stragglers_of_a_drafter_ahead_race():
    """As long as all have the drafter ahead, Algorithm 1 decides; else the ladder's plan is carried out, and
    what drafts ahead drafts between passes.
    """
    manager, events = manager_of(0.98, 0.3), []
    manager._ahead.configure = lambda *args, drafts_ahead: events.append(drafts_ahead)
    manager._by_algorithm_1 = lambda state, *_: (state, Choice.plain("Algorithm 1", 1.0))
    ahead, other = Entry("small_model", 0.9, 4), Entry("srt", 0.9, 4)
    plans = iter([[(ahead,)] * 4, [(ahead,), (), (), ()], [(ahead, other), (ahead,), (), ()]])
    manager._ladder = SimpleNamespace(
        planned=lambda *_: PlannedPass(None, next(plans), ["something began"]),
        carry_out=lambda planned, state, *_: (state, Choice.plain("the ladder", 1.0)),
    )
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=64))
    choices = [manager.choose(state, SLOTS, None)[1] for _ in range(3)]
    assert [choice.reason for choice in choices] == ["Algorithm 1", "Algorithm 1", "the ladder"]
    assert list(choices[0].events) == ["something began"] and events == [False]


def test_algorithm_2_drafts_otherwise_for_requests_that_are_accepted_badly():
    manager = manager_of(0.98, 0.3)
    verified = np.ones((4, 4), bool)
    correct = verified.copy()
    correct[1], correct[2, 2:] = False, False
    proposal = SimpleNamespace(judged=lambda *_: (np.array([4, 1, 3, 4]), np.array([4, 0, 2, 4])))
    proposal.name, proposal.by_drafter = "small_model", lambda *fate: [(proposal, *fate)]
    nodes = VerifiedNodes(verified, correct, correct)
    choice, requests = SimpleNamespace(proposal=proposal), np.arange(4)
    for _ in range(40):
        manager.record(PassRecord(choice, 4, 4, 13, 1.0, requests=requests, nodes=nodes))
    others = manager._chosen((4, 64), SLOTS).others
    assert sorted(others) == [1, 2] and others[1].mode == "plain"
    assert (others[2].mode == "decoupled" and others[2].window < 4) or others[2].mode == "coupled"
