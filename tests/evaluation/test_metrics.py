"""Metrics of judged responses: by hand, and groups of difficulty that lose no problem."""

import dataclasses
import itertools

import numpy as np
import pytest

from rljax.errors import ConfigError
from rljax.evaluation.metrics import (
    ScoredProblem,
    default_ks,
    difficulty_groups,
    estimates,
    problem_metrics,
    success_part,
)


def judged(*pairs, difficulty=1):
    rewards = [{"reward": 0.9 * right + 0.1, "correct": float(right)} for right, _ in pairs]
    return ScoredProblem(difficulty, rewards, [answer for _, answer in pairs])


def test_metrics_of_a_problem_by_hand():
    problem = judged((1, "7"), (0, "8"), (0, None), (1, "7"))
    metrics = problem_metrics(problem, (2, 4), "correct")
    # Pairs: 7-8, 7-None twice each... of 6: 77, 78 x2, 7- x2, 8-.
    assert metrics == {
        "reward": pytest.approx(0.55),
        "correct": 0.5,
        "mean@4": 0.5,
        "pass@2": pytest.approx(5 / 6),
        "pass@4": 1.0,
        "maj@2": pytest.approx((1 + 2 * 0.5 + 2) / 6),
        "maj@4": 1.0,
    }
    sometimes = problem_metrics(judged((1, "7"), (0, "7")), (2,), "correct")
    assert sometimes["maj@2"] == 0.5  # an answer that passes sometimes is worth its mean


def test_responses_that_are_left_out_count_in_nothing():
    """Of the three others two pass: pass@2 is 1; pass@4 has no estimate."""
    problem = judged((1, "7"), (0, "8"), (0, "8"), (1, "7"))
    rewards = [*problem.rewards[:2], {"reward": None}, {**problem.rewards[3], "more": None}]
    problem = dataclasses.replace(problem, rewards=rewards)
    assert problem_metrics(problem, (2, 4), "correct") == {
        "reward": pytest.approx(0.7),
        "correct": pytest.approx(2 / 3),
        "mean@4": pytest.approx(2 / 3),
        "pass@2": 1.0,
        "maj@2": pytest.approx((1 + 0.5 + 0.5) / 3),
    }
    nothing = ScoredProblem(1, [{"reward": None}] * 2, ["7", "8"])
    assert problem_metrics(nothing, (2,), None) == {}


def test_what_passes():
    assert success_part(["reward", "correct"], None) == "correct"
    assert success_part(["reward", "tests"], None) == "reward"
    assert success_part(["reward", "tests"], "tests") == "tests"
    with pytest.raises(ConfigError, match=r"evaluation.success: .* 'test'; did you mean 'tests'"):
        success_part(["reward", "tests"], "test")
    summed = ScoredProblem(1, [{"reward": 0.7 + 0.2 + 0.1}, {"reward": 0.9}], [None, None])
    assert problem_metrics(summed, (), "reward")["mean@2"] == 0.5


def test_default_ks():
    assert [default_ks(n) for n in (1, 2, 3, 8, 10)] == [(), (2,), (2, 3), (2, 4, 8), (2, 4, 8, 10)]


def test_few_difficulties_stay_by_themselves():
    groups = difficulty_groups([3, 1, 3, 2])
    assert [(group.name, group.members) for group in groups] == [("1", (1,)), ("2", (3,)), ("3", (0, 2))]


@pytest.mark.parametrize("seed", range(4))
def test_many_difficulties_are_grouped_without_losing_a_problem(seed):
    rng = np.random.default_rng(seed)
    difficulties = np.minimum(rng.zipf(1.6, 200), 40).tolist()
    groups = difficulty_groups(difficulties, most=8)
    assert len(groups) <= 8
    assert sorted(index for group in groups for index in group.members) == list(range(200))
    for group, after in itertools.pairwise(groups):
        assert group.low <= group.high < after.low
    for group in groups:
        assert all(group.low <= difficulties[index] <= group.high for index in group.members)
    assert len(groups) == min(8, len(set(difficulties)))


def test_groups_of_an_even_spread_are_alike():
    groups = difficulty_groups([value for value in range(40) for _ in range(5)], most=8)
    assert [group.name for group in groups][:2] == ["0-4", "5-9"]
    assert {len(group.members) for group in groups} == {25}


def test_estimates_are_means_inside_their_intervals():
    estimated = estimates([{"reward": float(i % 2), "mean@1": 1.0} for i in range(40)])
    assert estimated["reward"].value == 0.5
    assert 0.3 < estimated["reward"].low < 0.5 < estimated["reward"].high < 0.7
    assert (estimated["mean@1"].low, estimated["mean@1"].high) == (1.0, 1.0)
    alone = estimates([{"reward": 0.25}])["reward"]
    assert (alone.value, alone.low, alone.high) == (0.25, None, None)
    some = estimates([{"reward": 1.0, "tests": 0.5}, {"reward": 0.0}, {"reward": 0.5, "tests": 1.0}])
    assert (some["reward"].value, some["tests"].value) == (0.5, 0.75)  # of those that have the part
