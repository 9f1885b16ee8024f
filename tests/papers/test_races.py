"""Races of drafters for a request, by hand: what a pass brings, who gets idle rows, who enters and wins."""

import dataclasses

import numpy as np
import pytest

from rljax.papers.specactor.ladder import Costs, profile
from rljax.papers.specactor.pass_plan import Entry, PassEstimate, give_rows, plan_pass
from rljax.papers.specactor.races import Races, RaceState, RequestAcceptance
from rljax.speculation.window_costs import Affine

PASSES = ((8, 7, 1.0), (16, 7, 1.25), (32, 7, 4.0))
DRAFTING = {"a": 0.0, "b": 0.0, "slow": 0.5}


def estimate(slots, **changes):
    return dataclasses.replace(PassEstimate(1.0, PASSES, DRAFTING, np.ones(slots, bool)), **changes)


def windows(plan):
    return [{entry.drafter: entry.window for entry in entries} for entries in plan]


def test_what_a_pass_brings():
    assert Entry("a", 0.5, 3).tokens == pytest.approx(0.5 + 0.25 + 0.125)
    assert (Entry("a", 1.0, 3).tokens, Entry("a", 0.0, 3).tokens) == (3.0, 0.0)
    of_two = estimate(2)
    # 2 slots and 3 + 3 drafts are 8 rows, which take 1 s: 1 + 3 tokens and 1 + 0.5.
    both = [(Entry("a", 1.0, 3),), (Entry("b", 0.0, 3),)]
    assert (of_two.rows(both), of_two.rate(both)) == (8, pytest.approx(5.0))
    # A drafter on the device takes 3 * 0.5 s for all slots, whether one has it or both.
    slow = (Entry("slow", 1.0, 3),)
    assert of_two.rate([slow, ()]) == pytest.approx(5 / 2.5)
    assert of_two.rate([slow, slow]) == pytest.approx(8 / 2.5)
    # Of drafters that race, the best counts; both take rows: 2 + 3 + 4 are more than 8.
    race = (Entry("a", 0.0, 3), Entry("b", 1.0, 4))
    assert (of_two.rows([race, ()]), of_two.rate([race, ()])) == (16, pytest.approx(6 / 1.25))
    # Tokens that are only sampled ahead do not count; those of inactive slots do, in a plain step.
    ahead = estimate(2, current=np.asarray([False, True]))
    assert ahead.rate([slow, ()]) == pytest.approx(1 / 2.5)
    assert estimate(2, inactive=2, plain=0.5).rate([(), ()]) == pytest.approx(8.0)


def test_a_race_takes_idle_rows():
    alone = [(Entry("a", 0.9, 2),), (Entry("a", 0.1, 1),)]  # 5 of 8 rows
    race = (Entry("a", 0.1, 1), Entry("b", 0.8, 2))
    assert windows(give_rows(alone, {1: race}, estimate(2))) == [{"a": 2}, {"a": 1, "b": 2}]
    # Of longer windows, as much as fits: 1 + 3 idle rows for both.
    race = (Entry("a", 0.1, 4), Entry("b", 0.1, 7))
    assert windows(give_rows(alone, {1: race}, estimate(2))) == [{"a": 2}, {"a": 2, "b": 2}]


def test_a_race_without_idle_rows_waits_and_the_first_get_them():
    race = (Entry("a", 0.1, 1), Entry("b", 0.1, 3))
    alone = [(Entry("a", 0.1, 1),)] * 4  # all 8 rows
    assert give_rows(alone, {1: race}, estimate(4)) == alone
    three = [(Entry("a", 0.1, 1),)] * 3  # 6 of 8
    assert windows(give_rows(three, {2: race, 0: race}, estimate(3))) == [
        {"a": 1},
        {"a": 1},
        {"a": 1, "b": 2},
    ]


def test_a_race_takes_a_larger_pass_only_where_that_pays():
    alone = [(Entry("a", 0.1, 1),)] * 4
    good, bad = (Entry("a", 0.1, 1), Entry("b", 0.95, 6)), (Entry("a", 0.1, 1), Entry("b", 0.2, 6))
    # 16 rows take a quarter longer; four slots bring about 4.4 tokens, and a good drafter four more.
    assert windows(give_rows(alone, {0: good}, estimate(4)))[0] == {"a": 1, "b": 6}
    assert give_rows(alone, {0: bad}, estimate(4)) == alone
    dear = estimate(4, passes=((8, 7, 1.0), (16, 7, 2.5)))
    assert give_rows(alone, {0: good}, dear) == alone


def test_a_pass_verifies_no_more_of_a_slot_than_it_has_nodes():
    race = (Entry("a", 0.5, 7), Entry("b", 0.5, 7))
    narrow = estimate(1, passes=((16, 4, 1.0),))
    assert windows(give_rows([()], {0: race}, narrow)) == [{"a": 2, "b": 2}]


def test_a_drafter_that_was_found_is_left_out_where_it_costs_more_than_it_brings():
    first = (Entry("a", 0.9, 2),)
    slow = (Entry("slow", 0.9, 2),)
    # Three others wait a second for it.
    assert plan_pass([first] * 3 + [()], {3: slow}, estimate(4)) == [first] * 3 + [()]
    assert plan_pass([()], {0: slow}, estimate(1, plain=2.0)) == [slow]
    # Two that have it share its time: together they pay for it, though one alone would not.
    shared = estimate(2, drafting=DRAFTING | {"slow": 0.6})
    assert plan_pass([(), ()], {0: slow}, shared) == [(), ()]
    assert plan_pass([(), ()], {0: slow, 1: slow}, shared) == [slow, slow]
    # Races are run in any case: what they bring is not known before.
    race = (Entry("a", 0.1, 1), Entry("slow", 0.1, 1))
    assert plan_pass([first, first], {1: race}, estimate(2)) == [first, race]


HISTORY = {"a": 0.8, "b": 0.7, "slow": 0.75}


def state_of(acceptance, requests=(0, 1), first="a", slow=0.01, **changes):
    costs = {"a": Affine(0, 0), "b": Affine(0, 0), "slow": Affine(0, slow)}
    verification = {rows: seconds for rows, _, seconds in PASSES}
    ladder = profile(Costs(costs, {len(requests): 1.0}, verification, 7), np.linspace(0, 1, 41))
    of_pass = estimate(len(requests), drafting={name: cost(1) for name, cost in costs.items()})
    entry = None if first is None else Entry(first, HISTORY[first], 2)
    of_pass = dataclasses.replace(of_pass, **changes)
    return RaceState(list(requests), acceptance, HISTORY, ladder, of_pass, entry)


def told(counts):
    """Acceptance from {(drafter, request): (judged, accepted)}, one pass each."""
    acceptance = RequestAcceptance(HISTORY)
    for (drafter, request), (judged, accepted) in counts.items():
        acceptance.ask(drafter, [request], [True])
        acceptance.add(drafter, [request], np.asarray([judged]), np.asarray([accepted]))
    return acceptance


def raced(races, state):
    return {
        state.requests[slot]: [entry.drafter for entry in entries]
        for slot, entries in races.wanted(state).items()
    }


def test_acceptance_of_a_request_begins_at_the_history():
    acceptance = told({("a", 0): (4, 0), ("a", 1): (12, 12)})
    assert acceptance.rate("a", [0], HISTORY) == pytest.approx(4 * 0.8 / 8)
    assert acceptance.rate("a", [0, 1], HISTORY) == pytest.approx((12 + 3.2) / 20)
    assert acceptance.rate("b", [0], HISTORY) == acceptance.rate("a", [2], {"a": 0.7}) == pytest.approx(0.7)
    acceptance.ask("a", [0], [False])  # nothing to say in one pass of two
    assert acceptance.rate("a", [0], HISTORY) == pytest.approx(0.2)
    acceptance.ask("b", [0], [True])  # whose drafts were not verified
    assert acceptance.totals() == {"a": (16, 12)}


def test_requests_that_are_accepted_badly_enter_against_all_that_may_pay():
    acceptance, races = told({("a", 0): (8, 8), ("a", 1): (8, 0)}), Races()
    races.enter(state_of(acceptance))
    assert raced(races, state_of(acceptance)) == {1: ["a", "slow", "b"]}  # 0.27 is less than half of 0.8
    races = Races()
    races.enter(state_of(acceptance, slow=3.0))  # too slow, were it as good as in history
    assert raced(races, state_of(acceptance, slow=3.0)) == {1: ["a", "b"]}


def test_no_race():
    for counts, changes in (
        ({("a", 1): (8, 4)}, {}),  # 0.6
        ({}, {}),  # nothing known
        ({("a", 1): (8, 0)}, {"first": None}),  # decodes plainly
        ({("a", 1): (8, 0)}, {"current": np.asarray([True, False])}),  # is only sampled ahead
        ({("a", 1): (8, 0), ("b", 1): (1, 1), ("slow", 1): (1, 1)}, {}),  # has had all drafters
    ):
        races, state = Races(), state_of(told(counts), **changes)
        races.enter(state)
        assert races.wanted(state) == {} and not races.has_own(1)


def test_the_worst_request_gets_rows_first():
    acceptance, races = told({("a", 0): (8, 1), ("a", 1): (8, 0), ("a", 2): (8, 8)}), Races()
    state = state_of(acceptance, (0, 1, 2))
    races.enter(state)
    assert list(races.wanted(state)) == [1, 0]


def run(acceptance, counts, passes=8, **changes):
    """A race of request 1, in which drafters are accepted as in `told` in every pass."""
    races, state = Races(), state_of(acceptance, **changes)
    races.enter(state)
    begun, ended = [], []
    for _ in range(passes):
        ended += races.end(state)
        plan = plan_pass(races.first_come(state), races.wanted(state), state.estimate)
        begun += races.run(state.requests, plan)
        for entry in plan[1]:
            judged, accepted = counts[entry.drafter]
            acceptance.ask(entry.drafter, [1], [True])
            acceptance.add(entry.drafter, [1], np.asarray([judged]), np.asarray([accepted]))
    return races, state, begun, ended + races.end(state)


def test_a_request_stays_with_the_winner_and_others_keep_theirs():
    counts = {"a": (1, 0), "b": (3, 3), "slow": (2, 1)}
    races, state, begun, ended = run(told({("a", 1): (8, 0)}), counts)
    assert begun == ["request 1: a is accepted at 27%; it races slow, b"]
    assert ended == ["request 1 stays with b, accepted: a 16%, slow 55%, b 96%"]
    plan = plan_pass(races.first_come(state), races.wanted(state), state.estimate)
    assert [[entry.drafter for entry in entries] for entries in plan] == [["a"], ["b"]]
    races.enter(state)
    assert raced(races, state) == {1: ["b"]}  # and does not race again
    races, state, _, ended = run(told({("a", 1): (8, 0)}), counts, passes=7)
    assert not ended and raced(races, state) == {1: ["a", "slow", "b"]}


@pytest.mark.parametrize(("slow", "winner"), [(0.001, "slow"), (0.2, "b")])
def test_a_slow_drafter_must_win_by_enough(slow, winner):
    counts = {"a": (1, 0), "b": (3, 2), "slow": (3, 3)}
    _, _, _, (ended,) = run(told({("a", 1): (8, 0)}), counts, slow=slow)
    assert ended.startswith(f"request 1 stays with {winner}")


def test_a_race_goes_on_with_the_drafter_that_the_request_had():
    """The others' drafter may be chosen anew meanwhile."""
    acceptance, races = told({("a", 1): (8, 0)}), Races()
    races.enter(state_of(acceptance))
    state = state_of(acceptance, first="b")
    assert [[entry.drafter for entry in entries] for entries in races.first_come(state)] == [["b"], ["a"]]
    assert raced(races, state)[1][0] == "a"
