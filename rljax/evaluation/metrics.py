"""From scored responses to metrics: means over problems, pass@k and maj@k, by difficulty, with intervals."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.errors import ConfigError, known_names
from rljax.evaluation.estimators import bootstrap_interval, majority_at_k, pass_at_k
from rljax.tasks.base import Rewards

MAX_GROUPS = 8
"""Most difficulty groups: with more groups, each would hold too few problems for a useful mean."""

PASSED_FROM = 1.0 - 1e-6
"""Value of its success part from which a response passes: in floating point, 0.7 + 0.2 + 0.1 is below 1."""


@dataclasses.dataclass(frozen=True)
class ScoredProblem:
    """The n scored responses to one problem.

    Attributes:
      rewards: "reward" and its parts, per response; a "reward" of None leaves the response out.
      answers: answer of each response; None where a response has no answer.
    """

    difficulty: int
    rewards: Sequence[Rewards]
    answers: Sequence[str | None]


def success_part(parts: Sequence[str], success: str | None, key: str = "evaluation.success") -> str:
    """Returns the name of the reward's part that decides whether a response passes.

    Args:
      parts: "reward" and its parts, as the task names them.
      success: `evaluation.success`; None for "correct" where the task has this part, else the whole reward.
      key: config key of `success`, for errors.

    Raises:
      ConfigError: the task has no such part.
    """
    if success is None:
        return "correct" if "correct" in parts else "reward"
    if success not in parts:
        raise ConfigError(
            f"{key}: the task's rewards have no part {success!r}; {known_names(success, parts)}"
        )
    return success


def part_names(rewards: Sequence[Rewards]) -> list[str]:
    """Returns the names of all parts of several rewards, in their order."""
    return list(dict.fromkeys(name for each in rewards for name in each))


def default_ks(samples: int) -> tuple[int, ...]:
    """Returns the powers of two from 2 below `samples`, and `samples`; none for a single sample."""
    powers = itertools.takewhile(lambda k: k < samples, (2**i for i in itertools.count(1)))
    return (*powers, samples) if samples > 1 else ()


def problem_metrics(problem: ScoredProblem, ks: Sequence[int], success: str | None) -> dict[str, float]:
    """Returns the metrics of one problem: `reward` and its parts, means over its n responses; `mean@n`, the
    share that passes; `pass@k` and `maj@k` for each k. Responses that are left out count in none of them, and
    a k above the number of the others has no estimate.

    Args:
      problem: the n scored responses.
      ks: values of k, from 1 to n.
      success: see `success_part`; a response passes where this part is at least 1.
    """
    names = part_names(problem.rewards)
    success = success_part(names, success)
    metrics: dict[str, float] = {}
    for name in names:
        values = [rewards[name] for rewards in problem.rewards if rewards.get(name) is not None]
        if values:
            metrics[name] = float(np.mean(values))
    scored = [
        (rewards[success], answer)
        for rewards, answer in zip(problem.rewards, problem.answers, strict=True)
        if rewards["reward"] is not None and rewards.get(success) is not None
    ]
    samples, ks = len(scored), [k for k in ks if k <= len(scored)]
    if not scored:
        return metrics
    passed = [value >= PASSED_FROM for value, _ in scored]
    metrics[f"mean@{len(problem.rewards)}"] = float(np.mean(passed))
    metrics |= {f"pass@{k}": pass_at_k(samples, sum(passed), k) for k in ks}
    by_answer: dict[str, list[bool]] = {}
    for (_, answer), right in zip(scored, passed, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(right)
    # Responses with the same answer may differ in passing: the answer scores their mean.
    votes = [len(outcomes) for outcomes in by_answer.values()]
    scores = [np.mean(outcomes) for outcomes in by_answer.values()]
    majority = majority_at_k(votes, scores, samples - sum(votes), ks)
    return metrics | {f"maj@{k}": value for k, value in zip(ks, majority, strict=True)}


@dataclasses.dataclass(frozen=True)
class DifficultyGroup:
    """Problems of similar difficulty.

    Attributes:
      low, high: lowest and highest difficulty of the group.
      members: indices of the problems.
    """

    low: int
    high: int
    members: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def difficulty_groups(difficulties: Sequence[int], most: int = MAX_GROUPS) -> list[DifficultyGroup]:
    """Groups problems by difficulty, the easiest first. With more than `most` difficulties, neighbours are
    merged, so that the remaining problems are spread evenly over the remaining groups.
    """
    by_difficulty: dict[int, list[int]] = {}
    for index, difficulty in enumerate(difficulties):
        by_difficulty.setdefault(difficulty, []).append(index)
    values = sorted(by_difficulty)
    groups: list[DifficultyGroup] = []
    left = len(difficulties)
    while values:
        room, low = most - len(groups), values.pop(0)
        high, members = low, by_difficulty[low]
        while len(values) >= room and (room == 1 or len(members) < left / room):
            high = values.pop(0)
            members = members + by_difficulty[high]
        left -= len(members)
        groups.append(DifficultyGroup(low, high, tuple(members)))
    return groups


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems, with the ends of its 95 % interval; None for fewer than two problems."""

    value: float
    low: float | None
    high: float | None


def means(problems: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the means of problems' metrics (`problem_metrics`). A part that some tasks of a mixture lack is
    averaged over the problems that have it.
    """
    names = dict.fromkeys(name for metrics in problems for name in metrics)
    return {
        name: float(np.mean([metrics[name] for metrics in problems if name in metrics])) for name in names
    }


def estimates(problems: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Returns `means` with their intervals."""
    together: dict[tuple[int, ...], list[str]] = {}  # metrics by the problems that have them
    values = means(problems)
    for name in values:
        members = tuple(index for index, metrics in enumerate(problems) if name in metrics)
        together.setdefault(members, []).append(name)
    ends: dict[str, tuple[float, float]] = {}
    for members, names in together.items():
        interval = bootstrap_interval(np.asarray([[problems[i][name] for name in names] for i in members]))
        if interval is not None:
            ends |= zip(names, np.stack(interval, axis=1).tolist(), strict=True)
    return {name: Estimate(value, *ends.get(name, (None, None))) for name, value in values.items()}
