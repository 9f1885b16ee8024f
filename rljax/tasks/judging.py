"""Computes the rewards of many responses together, for any task."""

import math
from collections.abc import Mapping, Sequence

from rljax.errors import UserError
from rljax.tasks.base import Problem, Rewards, Task

Answered = tuple[Problem, str]
"""A problem and the text of one response to it."""


LARGEST_REWARD = 1e18
"""Squares of larger rewards are beyond float32: a group's standard deviation would be infinite, and every
advantage 0."""


def judge(task: Task, answered: Sequence[Answered]) -> list[Rewards]:
    """Returns the task's reward of each response, in order; see `Task.reward`.

    A task with a method `rewards(answered)` computes all of them in one call; see `RewardedTask`.

    Raises:
      UserError: the task raised, or one of its rewards is not a finite number, or the whole beyond
        `LARGEST_REWARD`; names the problem.
    """
    batch_rewards = getattr(task, "rewards", None)
    if batch_rewards is not None:
        scored = batch_rewards(answered)
    else:
        scored = [_reward(task, problem, text) for problem, text in answered]
    for (problem, _), rewards in zip(answered, scored, strict=True):
        if not isinstance(rewards, Mapping) or "reward" not in rewards:
            raise UserError(f"task: the reward of problem {problem.id} is {rewards!r}, without a 'reward'")
        for name, value in rewards.items():
            if value is not None and not _is_finite(
                value
            ):  # training on it would ruin all weights, a metric every mean
                raise UserError(
                    f"task: the reward of problem {problem.id} has {name} {value!r}, no finite number"
                )
        if abs(rewards["reward"] or 0.0) > LARGEST_REWARD:
            raise UserError(
                f"task: the reward of problem {problem.id} is {rewards['reward']:g}, beyond"
                f" {LARGEST_REWARD:g}, where the statistics of a group overflow; lower its weight"
            )
    return scored


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def own_reward(task: Task, problem: Problem, text: str) -> Rewards:
    """Returns the reward that a task gives itself, and as the part "answer_found" whether the response had an
    answer, where the task can tell (`extracted_answer`).
    """
    rewards = task.reward(problem, text)
    extract = getattr(task, "extracted_answer", None)
    if extract is None or not isinstance(rewards, Mapping):
        return rewards
    return {**rewards, "answer_found": float(extract(problem, text) is not None)}


def _reward(task: Task, problem: Problem, text: str) -> Rewards:
    try:
        return own_reward(task, problem, text)
    except Exception as error:
        raise UserError(f"task: the reward of problem {problem.id} raised {error!r}") from error
