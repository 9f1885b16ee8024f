"""Computes the rewards of many responses at once, for any task."""

import math
from collections.abc import Mapping, Sequence

from rljax.errors import UserError
from rljax.tasks.base import Problem, Task

Answered = tuple[Problem, str]
"""A problem and the text of one response to it."""


def judge(task: Task, answered: Sequence[Answered]) -> list[dict[str, float]]:
    """Returns the task's reward of each response, in order; see `Task.reward`.

    A task with a method `rewards(answered)` computes all of them in one call; see `RewardedTask`.

    Raises:
      UserError: the task raised, or one of its rewards is not a finite number; names the problem.
    """
    batch_rewards = getattr(task, "rewards", None)
    if batch_rewards is not None:
        judged = batch_rewards(answered)
    else:
        judged = [_reward(task, problem, text) for problem, text in answered]
    for (problem, _), rewards in zip(answered, judged, strict=True):
        if not isinstance(rewards, Mapping) or "reward" not in rewards:
            raise UserError(f"task: the reward of problem {problem.id} is {rewards!r}, without a 'reward'")
        for name, value in rewards.items():
            if not _is_finite(value):  # training on it would ruin all weights, a metric every mean
                raise UserError(
                    f"task: the reward of problem {problem.id} has {name} {value!r}, no finite number"
                )
    return judged


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _reward(task: Task, problem: Problem, text: str) -> dict[str, float]:
    try:
        return task.reward(problem, text)
    except Exception as error:
        raise UserError(f"task: the reward of problem {problem.id} raised {error!r}") from error
