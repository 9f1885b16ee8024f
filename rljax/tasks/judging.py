"""The rewards of many responses at once, whatever task they are of."""

import math
from collections.abc import Mapping, Sequence

from rljax.errors import UserError
from rljax.tasks.base import Problem, Task

Answered = tuple[Problem, str]
"""A problem and the text of one response to it."""


def judge(task: Task, answered: Sequence[Answered]) -> list[dict[str, float]]:
    """The task's reward of each response, in order: see `Task.reward`.

    A task with a method `rewards(answered)` computes them together; see `RewardedTask`.

    Raises:
      UserError: the task raised, or one of its rewards is no finite number; with the problem's name.
    """
    together = getattr(task, "rewards", None)
    if together is not None:
        found = together(answered)
    else:
        found = [_reward(task, problem, text) for problem, text in answered]
    for (problem, _), rewards in zip(answered, found, strict=True):
        if not isinstance(rewards, Mapping) or "reward" not in rewards:
            raise UserError(f"task: the reward of problem {problem.id} is {rewards!r}, without a 'reward'")
        for name, value in rewards.items():
            if not _is_finite(value):  # learned from, it is in all weights; in a metric, in every mean
                raise UserError(
                    f"task: the reward of problem {problem.id} has {name} {value!r}, no finite number"
                )
    return found


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
