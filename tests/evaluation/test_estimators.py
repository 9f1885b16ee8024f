"""pass@k and maj@k against every subset there is and by hand; intervals that cover what they should."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.evaluation.estimators import MAX_SAMPLES, bootstrap_interval, majority_at_k, pass_at_k


def test_pass_at_k_by_hand():
    # Of 4 responses 1 passes: of the 6 pairs 3 hold it.
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - math.comb(7, 5) / math.comb(10, 5))
    assert pass_at_k(5, 0, 3) == 0.0
    assert pass_at_k(5, 3, 3) == 1.0  # two fail: among any three, one passes


def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    samples = 6
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        assert pass_at_k(samples, passed, k) == pytest.approx(np.mean([any(each) for each in subsets]))


def test_pass_at_k_is_exact_where_binomials_overflow():
    exact = 1 - math.comb(9_900, 5_000) / math.comb(10_000, 5_000)
    assert pass_at_k(10_000, 100, 5_000) == pytest.approx(exact)
    assert 0.0 <= pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)


def test_pass_at_k_refuses_what_there_is_not():
    for samples, passed, k in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="no pass@"):
            pass_at_k(samples, passed, k)


def majority_by_enumeration(votes, scores, silent, k):
    responses = [answer for answer, count in enumerate(votes) for _ in range(count)] + [None] * silent
    worth = []
    for drawn in itertools.combinations(responses, k):
        counts = {answer: drawn.count(answer) for answer in drawn if answer is not None}
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        worth.append(np.mean([scores[answer] for answer in winners]) if winners else 0.0)
    return np.mean(worth)


def test_majority_by_hand():
    # Two right, one wrong, drawn in threes: right wins. In pairs: RR once, RW twice, which is a tie.
    assert majority_at_k([2, 1], [1, 0], 0, [1, 2, 3]) == pytest.approx([2 / 3, (1 + 2 * 0.5) / 3, 1.0])
    # A response without an answer has no vote, but is drawn.
    assert majority_at_k([1], [1], 1, [1, 2]) == pytest.approx([0.5, 1.0])
    assert majority_at_k([], [], 3, [1, 3]) == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=4),
    st.integers(0, 2),
)
def test_majority_is_the_mean_over_all_subsets(answers, silent):
    votes, scores = [count for count, _ in answers], [score for _, score in answers]
    ks = range(1, min(sum(votes) + silent, 9) + 1)
    if sum(votes) + silent > 10 or not ks:
        return
    expected = [majority_by_enumeration(votes, scores, silent, k) for k in ks]
    assert majority_at_k(votes, scores, silent, ks) == pytest.approx(expected, abs=1e-12)


def test_majority_of_one_is_the_mean_and_of_many_stays_finite():
    votes, scores = [MAX_SAMPLES // 2, MAX_SAMPLES // 4], [0.0, 1.0]
    silent = MAX_SAMPLES - sum(votes)
    one, two = majority_at_k(votes[:1], scores[:1], silent, [1, 2])
    assert (one, two) == (0.0, 0.0)
    small = majority_at_k([6, 4], [0, 1], 2, [1, 12])
    assert small == pytest.approx([4 / 12, 0.0])
    with pytest.raises(ValueError, match="at most"):
        majority_at_k([MAX_SAMPLES], [1.0], 1, [1])


def test_intervals_cover_the_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval(rng.binomial(1, 0.3, (60, 1)).astype(float), resamples=300)
        covered += low[0] <= 0.3 <= high[0]
    assert 0.88 <= covered / 100 <= 0.99


def test_intervals_are_repeatable_and_none_for_one_problem():
    values = np.random.default_rng(0).normal(size=(20, 3))
    first, second = bootstrap_interval(values), bootstrap_interval(values)
    np.testing.assert_array_equal(first, second)
    assert (first[0] < values.mean(axis=0)).all() and (values.mean(axis=0) < first[1]).all()
    assert bootstrap_interval(values[:1]) is None
    low, high = bootstrap_interval(np.ones((5, 1)))
    assert low == high == 1.0
