"""The log of what the rollout manager decided."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.speculation import pass_record as decisions
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PLAIN, DecisionLog, PassRecord

SRT, EAGLE = SimpleNamespace(name="srt"), SimpleNamespace(name="eagle")


def choose(proposal, rows=16, reason="why", expected=20.0, plain=10.0, seconds=0.0, events=()):
    return Choice(proposal, None, rows, reason, expected, plain, draft_seconds=seconds, events=events)


def carried_out(choice, batch, responses, tokens, seconds, verified=(), accepted=()):
    by_depth = {"verified_by_depth": verified, "accepted_by_depth": accepted}
    return PassRecord(choice, batch, responses, tokens, seconds, **by_depth)


PLAINLY = choose(None, 0, "nothing better", expected=10.0)


@pytest.fixture
def clock(monkeypatch):
    """Stands still until a test moves it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(decisions, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.fixture
def log(clock):
    return DecisionLog()


def test_equal_neighbours_are_one_decision_with_their_sums(log, clock):
    log.begin()
    clock.now += 3.0
    log.add(carried_out(choose(SRT, reason="first", seconds=0.5, events=["a"]), 4, 3, 12, 1.5, [3, 1], [2]))
    clock.now += 1.0
    second = choose(SRT, reason="second", expected=30.0, plain=11.0, events=("b", "c"))
    log.add(carried_out(second, 4, 2, 5, 1.0, [2, 2, 2], [2, 1]))
    (decision,) = log.take()
    assert decision == {
        "at": 1.0,  # drafting began 3 - 0.5 - 1.5 seconds after the rollout
        "batch": 4,
        "responses": 3,
        "drafter": "srt",
        "rows": 16,
        "reason": "first",
        "visits": 2,
        "turns": 5,
        "tokens": 17,
        "seconds": 3.0,
        "expected": 20.0 * 2.0 + 30.0 * 1.0,
        "plain": 10.0 * 2.0 + 11.0 * 1.0,
        "verified": [5, 3, 2],
        "accepted": [4, 1],
        "events": ["a", "b", "c"],
    }


@pytest.mark.parametrize(
    ("choice", "batch"),
    [
        (choose(EAGLE), 4),
        (choose(SRT, rows=32), 4),
        (choose(SRT), 2),
        (PLAINLY, 4),
        (choose(SRT, expected=0.0), 4),  # its tokens are nothing that was expected
        (choose(SRT, plain=0.0), 4),
    ],
    ids=["drafter", "rows", "batch", "plain", "nothing expected", "nothing expected of plain"],
)
def test_what_differs_is_another_decision(log, choice, batch):
    log.add(carried_out(choose(SRT), 4, 2, 4, 1.0))
    log.add(carried_out(choice, batch, 2, 4, 1.0))
    log.add(carried_out(choose(SRT), 4, 2, 4, 1.0))
    assert [decision["visits"] for decision in log.take()] == [1, 1, 1]


def test_a_rollout_that_begins_is_not_the_one_before(log, clock):
    for _ in range(2):
        log.begin()
        clock.now += 5.0
        log.add(carried_out(PLAINLY, 4, 4, 4, 2.0))
    found = [(decision["at"], decision["drafter"], decision["visits"]) for decision in log.take()]
    assert found == [(3.0, PLAIN, 1)] * 2


def test_decisions_of_a_rollout_are_in_order_whatever_passes_are_estimated_to_take(log, clock):
    log.begin()
    clock.now += 3.0
    log.add(carried_out(PLAINLY, 4, 4, 4, 1.0))
    clock.now += 1.0
    log.add(carried_out(choose(SRT), 4, 4, 4, 10.0))
    assert [decision["at"] for decision in log.take()] == [2.0, 2.0]


def test_what_is_taken_is_gone(log):
    assert log.take() == []
    log.add(carried_out(PLAINLY, 4, 4, 4, 2.0))
    assert len(log.take()) == 1
    assert log.take() == []
    log.add(carried_out(PLAINLY, 4, 4, 4, 2.0))  # equal to the last one, which is in another step
    assert [decision["tokens"] for decision in log.take()] == [4]


def test_very_deep_nodes_are_counted_together_and_json_holds_it(log):
    """Promises are NumPy's where they come from sums over arrays."""
    expected = choose(SRT, expected=np.float64(20.0), plain=np.float64(10.0))
    log.add(carried_out(expected, 4, 1, 1, 1.0, [1] * 40, [1] * 35))
    taken = log.take()
    assert taken[0]["verified"] == [1] * 31 + [9] and taken[0]["accepted"] == [1] * 31 + [4]
    assert json.loads(json.dumps(taken, allow_nan=False)) == taken
