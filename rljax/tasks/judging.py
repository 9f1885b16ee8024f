"""The rewards of many responses at once, whatever task they are of."""

from collections.abc import Sequence

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
        return together(answered)
    return [_reward(task, problem, text) for problem, text in answered]


def _reward(task: Task, problem: Problem, text: str) -> dict[str, float]:
    try:
        return task.reward(problem, text)
    except Exception as error:
        raise UserError(f"task: the reward of problem {problem.id} raised {error!r}") from error
