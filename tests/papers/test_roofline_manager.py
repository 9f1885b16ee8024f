"""EfficientRollout's manager in rollouts: off until drafts are predicted to pay, and how long they are."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from drafters.base import Drafter
from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.papers.efficient_rollout import ToggleConfig
from rljax.papers.efficient_rollout import manager as roofline_manager
from rljax.papers.efficient_rollout.manager import RooflineManager, Verdict
from rljax.papers.efficient_rollout.roofline import Roofline, policy_costs
from rljax.speculation.device_proposers import SelfProposer
from rljax.speculation.pass_choice import Candidates, Choice
from rljax.speculation.pass_record import PassRecord, VerifiedNodes
from rljax.speculation.proposals import Proposal
from rljax.speculation.speculative_pass import HostProposer
from rljax.speculation.strategies import Strategy
from tests.speculation.speculators import (
    BUCKETS,
    CHEAP,
    FEW,
    active_slots,
    device_proposer,
    learn,
    make_speculator,
    roll_out,
)
from tests.tiny_policy import CONFIG, SLOTS, FixedTimes, assert_same, strategy_choice


def toggled(**keys):
    """Such that the policy's own drafts always pay; keys are those of `speculation.toggle`."""
    costs = policy_costs(CONFIG, Numerics(), make_drafter("quantized").policy_weights.format)
    constants = dict.fromkeys((field.name for field in dataclasses.fields(Roofline)), 0.0)
    constants |= {"costs": costs, "byte": 1.0, "draft_byte": 1e-3, "overlap": 1.0}
    make = functools.partial(RooflineManager, roofline=Roofline(**constants))
    return strategy_choice("roofline", make=make, toggle=ToggleConfig(**keys))


def test_the_policys_own_drafts_grow_longer_from_one_training_step_to_another(params, requests, expected):
    """By the roofline and the patience ladder; neither evaluation nor a step's second round is a step."""

    def make():
        return make_speculator(("quantized",), toggled(lengths=(2, 7), alpha_up=0.5, alpha_down=0.1))

    speculator, first, depths = make(), requests[:9], []
    for training, step in ((True, 0), (False, 0), (True, 1), (True, 1), (False, 0), (True, 2)):
        own = [dataclasses.replace(each, training=training, step=step) for each in first]
        completions, statistics = roll_out(speculator, params, own)
        assert_same(completions, expected[:9])
        assert statistics.verified == statistics.steps
        depths.append(max(len(each["verified"]) for each in speculator.decisions.take()))
        state, speculator = speculator.state(), make()  # the run goes on in another process
        speculator.load_state(state)
    assert depths == [2, 2, 2, 2, 2, 7]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A smaller policy's directory."""
    path = tmp_path_factory.mktemp("small_model")
    small = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1)
    save_model(path, small, init_params(small, 1), "float32")
    return str(path)


@pytest.mark.default_cases("srt-True", "quantized-True")
@pytest.mark.parametrize(("drafter", "overlap"), [("srt", True), ("small_model", False), ("quantized", True)])
def test_the_roofline_gates_any_drafter(params, requests, expected, small_model, drafter, overlap):
    """Where it always pays, every drafter is switched on; where it never does, none. The tokens stay."""
    arguments = {"small_model": {"path": small_model}}
    never = toggled(margin=100.0)
    for choice, switched_on in ((toggled(), True), (never, False)):
        speculator = make_speculator((drafter,), choice, FEW, **arguments)
        for step in range(2):
            own = [dataclasses.replace(each, step=step) for each in requests]
            completions, statistics = roll_out(speculator, params, own, overlap)
            assert_same(completions, expected)
            learn(speculator, own, completions)
        assert (statistics.verified > 0) == switched_on


@pytest.mark.parametrize(
    ("proposer", "seconds", "on"),
    [
        (HostProposer("srt", Drafter(), None), 1e9, True),  # drafting on the host costs nothing
        (SelfProposer("quantized", Drafter(), None, None), 1e9, True),  # the roofline knows its time
        (device_proposer("small_model", (3, 7)), 0.1, True),
        (device_proposer("small_model", (3, 7)), 1e9, False),  # measured
    ],
    ids=["host", "self", "fast", "slow"],
)
def test_the_roofline_gates_by_the_time_of_drafting(proposer, seconds, on):
    manager = toggled().manager([proposer], BUCKETS, FixedTimes({}, seconds), SLOTS)
    manager.begin(True, 0)
    assert manager._toggle(2, 128, 0.9).on == on
    # The draft length is 5: a tree of that depth, or the one with the nearest.
    shape = {"srt": (5, 5, 5), "quantized": (5, 1, 5), "small_model": (3, 2, 3)}[proposer.name]
    assert manager._strategy(5) == Strategy(*shape, proposer.name)


def test_the_roofline_waits_for_a_head_that_is_not_trained():
    proposer = device_proposer("eagle", (3,), trained=False)
    manager = toggled().manager([proposer], BUCKETS, CHEAP, SLOTS)
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=128))
    manager.begin(True, 0)
    _, choice = manager.choose(state, active_slots(4), None)
    assert (choice.rows, choice.reason) == (0, "eagle is not trained yet")


def chains(lengths, depth):
    """Marks the first nodes of each chain."""
    return np.arange(depth) < np.asarray(lengths)[:, None]


def record(manager, proposer, usable, fate):
    """Lets a manager know of a pass over chains of drafts."""
    nodes, slots = np.zeros(usable.shape, np.int32), active_slots(len(usable))
    parents = nodes + np.arange(-1, usable.shape[1] - 1)
    proposal = Proposal(proposer, nodes, parents, usable, nodes + 1.0, nodes, 0.0)
    proposal.record_outcome(fate.verified, fate.correct)
    candidates = Candidates.from_nodes(usable, proposal.probability, slots.current)
    choice = Choice.verify(proposal, candidates, 32, "", expected_rate=0.0, plain_rate=0.0)
    manager.record(PassRecord(choice, 4, len(usable), 14, 1.0, requests=slots.requests, nodes=fate))


def test_a_drafter_on_the_host_that_knows_nothing_further_has_missed(monkeypatch):
    """A pass brings no more tokens than with a wrong draft, and that is what the roofline is asked with."""
    proposer = HostProposer("srt", Drafter(), None)
    manager = toggled().manager([proposer], BUCKETS, CHEAP, SLOTS)
    manager.begin(True, 0)
    # Drafts: five, two, none and five, of which a pass had room for three. All are right.
    record(manager, proposer, chains([5, 2, 0, 5], 5), VerifiedNodes(*[chains([5, 2, 0, 3], 5)] * 3))
    assert manager.state()["toggle_chains"].tolist() == [12, 10]
    # Nothing at all for two slots.
    nothing = SimpleNamespace(rows=0, seconds=1.0)
    monkeypatch.setattr(roofline_manager, "draft", lambda proposer, strategy, state, *_: (state, nothing))
    state = SimpleNamespace(batch=2, cache=SimpleNamespace(length=128))
    _, choice = manager.choose(state, active_slots(2), None)
    assert choice.rows == 0 and choice.reason.startswith("srt had nothing to verify (on since")
    assert manager.state()["toggle_chains"].tolist() == [14, 10]


def test_the_toggle_is_asked_of_the_shapes_that_the_engine_computes():
    """However short the most of its responses are."""
    asked = []

    class Asked:
        begin = predicted = None

        def __call__(self, *shape):
            asked.append(shape)
            return Verdict(False, "off")

    proposer = SelfProposer("quantized", Drafter(), None, None)
    proposer._acceptance = SimpleNamespace(rate=0.9)
    one = toggled().manager([proposer], BUCKETS, CHEAP, SLOTS)
    one._toggle = Asked()
    state = SimpleNamespace(batch=4, cache=SimpleNamespace(length=256))
    _, choice = one.choose(state, active_slots(2, inactive=1), None)
    assert asked == [(2, 256, 0.9, 1)]
    assert choice.plain_rate == choice.expected_rate == 3.0  # a plain step takes a second


def length_after_a_step(right, verified, accepted):
    """The draft length, 5 at first and 7 or 9 at most, after a training step with these chains.

    Args:
      right, verified: number of right drafts and of verified drafts of each chain.
      accepted: how many of them a kept token came from.
    """
    proposer = SelfProposer("quantized", Drafter(), None, None)
    wide = Buckets((2, 4), (128,), (16, 32), 9)
    manager = toggled(lengths=(5, 7, 9), first=7, patience=1).manager([proposer], wide, CHEAP, SLOTS)
    manager.begin(True, 0)
    fate = VerifiedNodes(*(chains(lengths, 7) for lengths in (verified, accepted, right)))
    record(manager, proposer, chains([7] * len(right), 7), fate)
    manager.begin(True, 1)
    return manager._schedule.length


def test_chains_that_were_cut_short_count_as_far_as_they_went():
    # Whole chains, by the share that was accepted: 5 or 6 of 7, 6 or 7 of 7, all.
    assert length_after_a_step([5, 6], [7, 7], [5, 6]) == 5
    assert length_after_a_step([6, 7], [7, 7], [6, 7]) == 7
    assert length_after_a_step([7, 7], [7, 7], [7, 7]) == 9
    # The second response ended with its second draft, which was right: the five behind it were not rejected.
    assert length_after_a_step([7, 2], [7, 7], [7, 1]) == 9
    # The second draft was wrong in the token that ended the response.
    assert length_after_a_step([7, 1], [7, 7], [7, 1]) == 5
    # Passes with room for two drafts: 92.5 % of them are right, but only 82 % would be in chains of seven.
    right = [2] * 90 + [1] * 5 + [0] * 5
    assert length_after_a_step(right, [2] * 100, right) == 5
