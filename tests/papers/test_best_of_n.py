"""SpecActor's best-of-N in rollouts: the drafter to begin with, and races of stragglers."""

import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.errors import ConfigError
from rljax.rollout.collector import Scheduler
from rljax.speculation.speculative_pass import HostProposer
from rljax.speculation.speculator import Speculator
from tests.speculation.speculators import BUCKETS, CHEAP, Knowing, Silent, learn, make_engine, roll_out
from tests.tiny_policy import SLOTS, FixedTimes, assert_same, make_requests, strategy_choice

LADDER = strategy_choice("ladder")


def test_the_ladder_begins_with_the_best_drafter_and_gives_stragglers_another(params):
    """One knows all responses but two long ones, which another knows alone."""
    requests = make_requests((3, 20, 30, 8, 9, 11), (98, 20, 20, 16, 16, 16))
    expected = Scheduler(make_engine(), SLOTS).run(params, requests)[0]
    lengths = np.asarray([len(completion.response_ids) for completion in expected])
    longest = set(np.argsort(-lengths)[:2].tolist())
    others = set(range(len(requests))) - longest

    def rollouts(drafters):
        speculator = Speculator(make_engine(), drafters, SLOTS, times=CHEAP, strategies=LADDER)
        learn(speculator, requests, expected)
        for _ in range(3):
            speculator.decisions.take()
            completions, statistics = roll_out(speculator, params, requests)
            assert_same(completions, expected)
        return speculator.decisions.take(), statistics.steps

    # Of the two that stragglers race with, one has nothing to say.
    named = {"knows the others": Knowing(others), "silent": Silent(), "knows the long": Knowing(longest)}
    both, steps = rollouts(named)
    assert both[0]["drafter"] == "knows the others" and "is first on the ladder" in both[0]["reason"]
    events = [event for each in both for event in each["events"]]
    for request in longest:
        begun, ended = (event for event in events if event.startswith(f"request {request}"))
        assert begun.endswith("; it races silent, knows the long")
        assert f"request {request} stays with knows the long, accepted: knows the others 1" in ended
        assert ", silent 0%, knows the long 9" in ended
    assert len(events) == 2 * len(longest)
    assert both[-1]["drafter"] == "knows the long"
    assert steps < rollouts({"knows the others": Knowing(others)})[1]


@pytest.mark.parametrize(("special", "overlap"), [("knows one", True), ("quantized", False)])
def test_a_straggler_gets_another_drafter_while_others_of_the_pass_keep_theirs(params, special, overlap):
    """A drafter knows two responses of three, and one slot is idle. Drafts on the device are only made
    for the third.
    """
    requests = make_requests((3,), (98,))
    expected = Scheduler(make_engine(), SLOTS).run(params, requests)[0]
    _, known, straggler = np.argsort([len(completion.response_ids) for completion in expected]).tolist()
    general = Knowing({0, 1, 2} - {straggler}, most=2)
    other = make_drafter("quantized") if special == "quantized" else Knowing({straggler}, most=2)
    drafters = {"general": general, special: other}
    times = FixedTimes(CHEAP.by_rows, draft=0.01)
    speculator = Speculator(make_engine(), drafters, SLOTS, times=times, strategies=LADDER)
    learn(speculator, requests, expected)
    asked, passes, record = [], [], speculator.manager.record
    proposer = speculator.proposers[1]
    propose = proposer.propose
    proposer.propose = lambda *arguments: (asked.append(len(passes)), propose(*arguments))[1]

    def recording(one):
        """Notes which drafters had nodes verified for each request."""
        if one.nodes is not None:
            drafters = {request: set() for request in one.requests.tolist()}
            for part, verified, _ in one.choice.proposal.by_drafter(one.nodes.verified, one.nodes.correct):
                for request in one.requests[verified.any(axis=1)].tolist():
                    drafters[request].add(part.name)
            passes.append(drafters)
        record(one)

    speculator.manager.record = recording
    completions, statistics = roll_out(speculator, params, requests, overlap)
    assert_same(completions, expected)
    assert statistics.steps < len(expected[straggler].response_ids)
    # Nobody but the straggler has the other drafter.
    assert all(
        {special} & names == set() for drafters in passes for r, names in drafters.items() if r != straggler
    )
    of_straggler = [drafters[straggler] for drafters in passes if straggler in drafters]
    racing = of_straggler.index({"general", special})
    assert all(names <= {"general"} for names in of_straggler[:racing])
    assert of_straggler[-1] == {special} and of_straggler.count({"general", special}) <= 8
    if not overlap:  # by which halves the two may be in different passes
        assert of_straggler.count({"general", special}) == 8
        assert {known: {"general"}, straggler: {"general", special}} in passes
        assert {known: {"general"}, straggler: {special}} in passes
        # It is asked only where the straggler has it.
        assert asked == [i for i, drafters in enumerate(passes) if special in drafters.get(straggler, ())]
    events = [event for each in speculator.decisions.take() for event in each["events"]]
    begun, ended = events
    assert begun.startswith(f"request {straggler}: general") and begun.endswith(f"it races {special}")
    assert ended.startswith(f"request {straggler} stays with {special}, accepted: general ")


def test_more_drafters_than_a_tree_can_have_are_one_line():
    with pytest.raises(ConfigError) as raised:
        LADDER.manager([HostProposer(f"srt{i}", None, None) for i in range(9)], BUCKETS, CHEAP, SLOTS)
    message = "speculation.others: 9 drafters, and a tree holds drafts of at most 8; leave some out, or use"
    assert str(raised.value) == f"{message} speculation.choice: expected alone"


def test_the_ladder_decodes_plainly_where_nothing_is_worth_it_and_says_so(params, requests, expected):
    speculator = Speculator(make_engine(), {"wrong": Knowing(set())}, SLOTS, times=CHEAP, strategies=LADDER)
    learn(speculator, requests, expected)
    for _ in range(4):
        speculator.decisions.take()
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
    assert statistics.verified == 0
    assert all("wrong is first on the ladder; at" in each["reason"] for each in speculator.decisions.take())
