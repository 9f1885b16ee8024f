"""HistoPipe's plans, against cases computed by hand; and where Fig. 12's listing leaves a hole."""

import itertools

import pytest

from rljax.cluster.router import halves
from rljax.papers.rhymerl.histopipe import (
    OutlierRule,
    dealt,
    equal_groups,
    groups_of_places,
    growth_factor,
    less_loaded,
    rank,
)
from rljax.papers.rhymerl.two_tiers import group_seconds, tier_sizes, two_steps, workers_of_groups
from rljax.papers.specactor.racing import Copy, assign

PROMPTS = [(1,), (2,), (3,), (4,)]


def test_prompts_are_ranked_by_the_median_of_their_group():
    history = {(1,): [9, 10, 500], (2,): [1, 2, 3], (3,): [30, 40, 50]}
    # The mean of the first one is the largest; of the last one nothing is known, so it is in the middle.
    assert rank(PROMPTS, history) == [1, 0, 3, 2]
    assert rank(PROMPTS, {}) == [0, 1, 2, 3]


def test_groups_are_of_equal_size():
    assert equal_groups([5, 3, 1, 0, 2, 4, 6], 3) == [[5, 3, 1], [0, 2], [4, 6]]
    assert equal_groups([7, 8], 5) == [[7], [8]]


def test_odd_steps_go_up_and_even_steps_down():
    assert groups_of_places([1, 1, 2], 1) == [0, 1, 2, 2]
    assert groups_of_places([1, 1, 2], 2) == [2, 2, 1, 0]


def linear(length, workers):
    return length / workers


def test_two_tiers_of_a_case_by_hand():
    """Lengths 10, 20, 40, 80 on 8 workers, tau = l / k, training takes 10. So t0 = 10, and targets are 10,
    10 + d, 10 + 2 d, 10 + 3 d. From d = 50 / 9 on, 80 / 3 is in time, and 1 + 2 + 2 + 3 workers are enough;
    below, the last group needs 4 of them. The shortest group is not given all that it can use: as printed,
    t0 = tau(l_0, MAX), without training it would get 5 workers, and the last group take 80 seconds.
    """
    lengths = [10.0, 20.0, 40.0, 80.0]
    assert (
        workers_of_groups(lengths, 8, linear, 10.0) == workers_of_groups(lengths, 8, linear) == [1, 2, 2, 3]
    )
    slow = lambda length, workers: 1000.0 * length / workers  # noqa: E731
    assert workers_of_groups([1.0, 1.0], 6, slow, most=5) == [3, 3]


def test_more_than_the_workers_give_is_still_a_plan():
    """Nothing helps the long group below its target: the listing's bisection ends without a plan."""
    stubborn = lambda length, workers: length  # noqa: E731
    plan = workers_of_groups([1.0, 50.0, 50.0, 50.0], 4, stubborn)
    assert plan == [1, 1, 1, 1]
    # A slope that is infeasible from the first group on, since even MAX workers are too slow for it.
    assert sum(workers_of_groups([5.0, 4.0, 100.0], 7, linear, most=3)) == 7


def test_spare_workers_go_where_they_help_most():
    """All targets are met by a worker each: the others go to the longest group."""
    assert workers_of_groups([1.0, 100.0], 4, linear, train_seconds=1000.0) == [1, 3]
    # No group takes more than MAX, and what is left over stays so.
    assert workers_of_groups([1.0, 1.0], 9, linear, most=2) == [2, 2]


def test_groups_that_are_nearly_equal_get_as_many_workers():
    """Whatever the unit: a precision of a second would be all of the slope where groups take a second."""
    for second in (1000.0, 1.0, 0.001):
        seconds = lambda length, workers, second=second: second * length / workers  # noqa: E731
        assert workers_of_groups([1.0, 1.01, 1.02], 6, seconds) == [2, 2, 2]


def test_two_steps_at_each_place_by_hand():
    """Groups that take 10, 20 and 20 seconds, on 1, 1 and 2 workers: in the even step the first place has one
    of 20, and the last one that of 10.
    """
    assert two_steps([1, 1, 2], [10.0, 20.0, 40.0], linear) == [(40.0, 1), (40.0, 1), (30.0, 1), (30.0, 1)]
    assert two_steps([2, 2], [10.0, 30.0], linear) == [(20.0, 2), (20.0, 2)]


@pytest.mark.parametrize("workers", [8, 12])
def test_nobody_has_the_two_longest_groups(workers):
    """Against every plan of four groups, two steps take nearly the least time. Along the line of groups alone
    a worker may have the longest group in one step and the second longest in the other.
    """
    groups = [[length] * 48 for length in (3, 5, 9, 33)]
    plan = tier_sizes(groups, workers, 1, lambda running, tokens: 1.0, 0.0, most=workers)
    assert sum(plan) == workers

    def longest(sizes):
        time = lambda length, size: group_seconds([length] * 48, size, 1, lambda *_: 1.0)  # noqa: E731
        return two_steps(sizes, [3, 5, 9, 33], time)[0][0]

    every = [each for each in itertools.product(range(1, workers), repeat=4) if sum(each) == workers]
    assert longest(plan) <= 1.05 * min(map(longest, every))


def test_too_few_workers_are_an_error():
    with pytest.raises(ValueError, match="3 ranking groups of at least 1 workers need more than the 2"):
        workers_of_groups([1.0, 2.0, 3.0], 2, linear)


def test_the_time_of_a_group_is_that_of_its_shrinking_batches():
    """Lengths 2, 4 and 10 on one worker: 2 passes of 3, 2 of 2, 6 of 1, of n seconds each."""
    seconds = lambda running, tokens: float(running)  # noqa: E731
    assert group_seconds([4, 10, 2], 1, 8, seconds) == 2 * 3 + 2 * 2 + 6 * 1
    # Two workers: the longer one has 10 and 2, or with another dealing 10 and 4.
    assert group_seconds([4, 10, 2], 2, 8, seconds) == 2 * 2 + 8 * 1
    # One slot: the three share the time of one.
    assert group_seconds([4, 10, 2], 1, 1, lambda running, tokens: 1.0) == 16


def test_growth():
    assert growth_factor({1: 10, 2: 10, 3: 10, 4: 10}, {1: 10, 2: 11, 3: 12, 4: 30}) == 3.0
    assert growth_factor({1: 10, 2: 10, 3: 10, 4: 10}, {1: 9, 2: 10, 3: 12, 4: 10}) == 1.2
    assert growth_factor({1: 10, 2: 10}, {1: 9, 2: 10}) == 1.1
    assert growth_factor({}, {1: 3}) == 1.1


def test_requests_are_dealt_out_by_prompt_as_far_as_they_go():
    assert dealt([[1, 2], [3, 4], [5, 6]], 2) == [[[1, 2], [5]], [[3, 4], [6]]]
    assert dealt([[1, 2]], 3) == [[], [[1]], [[2]]]


def test_outliers_are_among_the_last_and_beyond_history():
    rule = OutlierRule(0.1, 1.5)
    assert rule.outliers({1: 100, 2: 16, 3: 17}, 20, 10.0) == []  # three of twenty are more than a tenth
    assert rule.outliers({1: 15, 2: 16, 3: 17}, 30, 10.0) == [3, 2]
    assert rule.outliers({1: 10**9}, 30, float("inf")) == []
    assert less_loaded({"a": 3, "b": 1, "c": 1}, ["b"]) == "c"
    assert less_loaded({"b": 1}, ["b"]) is None


def test_halves_of_the_fullest_go_to_the_free():
    held = {"a": [1, 2, 3, 4], "b": [5]}
    assert halves(held, ["c", "d"], 2) == [(3, "c"), (4, "c"), (2, "d")]
    assert halves(held, ["c"], 5) == []
    assert halves({}, ["c"], 2) == []


def test_free_workers_take_the_least_accepted_with_the_rarest_drafter():
    """Algorithm 3: the first free worker takes the drafter that nobody has, so does the next, since then two
    are as rare.
    """
    acceptances, had = {1: 0.9, 2: 0.1, 3: 0.5}, {1: ["small"], 2: ["small"], 3: ["small"]}
    using, loads = {"small": ["w0", "w1"], "ngram": [], "srt": ["w2"]}, {"w0": 9, "w1": 9, "w2": 2}
    copies = assign(acceptances, using, ["w3", "w4"], loads, 2, had)
    assert copies == [Copy(2, "w3", "ngram"), Copy(3, "w3", "ngram"), Copy(1, "w4", "ngram")]
    # No request has a drafter twice.
    had = {1: ["ngram"], 3: ["small"]}
    again = assign(acceptances, using, ["w3"], {"w0": 9, "w1": 9, "w2": 9}, 9, had)
    assert again == [Copy(2, "w3", "ngram"), Copy(3, "w3", "ngram")]


def test_a_drafter_that_all_have_had_is_left_out():
    using, had = {"ngram": [], "srt": []}, {1: ["ngram"], 2: ["ngram"]}
    assert assign({1: 0.5, 2: 0.1}, using, ["w"], {}, 1, had) == [Copy(2, "w", "srt")]
    assert assign({1: 0.5}, using, ["w"], {}, 1, {1: ["srt", "ngram"]}) == []


def test_workers_with_copies_are_filled_up():
    """Line 6 of Algorithm 3 goes over all workers of a drafter, not those alone that have become free."""
    acceptances, had = {1: 0.9, 2: 0.1, 3: 0.5}, {2: ["srt"]}
    using, loads = {"ngram": [], "srt": ["w2"]}, {"w2": 1}
    assert assign(acceptances, using, [], loads, 2, had) == [Copy(3, "w2", "srt")]
    both = assign(acceptances, using, ["w3"], loads, 2, had)
    assert both == [Copy(2, "w3", "ngram"), Copy(3, "w3", "ngram"), Copy(3, "w2", "srt")]
    assert assign(acceptances, using, [], {"w2": 2}, 2, had) == []
