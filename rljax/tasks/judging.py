"""The rewards of many responses at once, whatever task they are of."""

import math
import numbers
from collections.abc import Mapping, Sequence

from rljax.errors import UserError
from rljax.tasks.base import Problem, Task

Answered = tuple[Problem, str]
"""A problem and the text of one response to it."""


def judge(task: Task, answered: Sequence[Answered]) -> list[dict[str, float]]:
    """The task's reward of each response, in order: see `Task.reward`.

    A task with a method `rewards(answered)` computes them together; see `RewardedTask`.
    """
    together = getattr(task, "rewards", None)
    if together is not None:
        found = together(answered)
    else:
        found = [_reward(task, problem, text) for problem, text in answered]
    for (problem, _), rewards in zip(answered, found, strict=True):
        if not _is_reward(rewards):  # after the update it is in all weights
            raise UserError(
                f"task: the reward of problem {problem.id} is {rewards!r}, without a finite 'reward'"
            )
    return found


def _is_reward(rewards: object) -> bool:
    reward = rewards.get("reward") if isinstance(rewards, Mapping) else None
    return isinstance(reward, numbers.Real) and math.isfinite(reward)


def _reward(task: Task, problem: Problem, text: str) -> dict[str, float]:
    try:
        return task.reward(problem, text)
    except Exception as error:
        raise UserError(f"task: the reward of problem {problem.id} raised {error!r}") from error
