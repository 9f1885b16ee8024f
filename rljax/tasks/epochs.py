"""A task whose training problems come back epoch after epoch."""

from collections.abc import Sequence

from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Split, Task
from rljax.tasks.judging import Answered, judge


class EpochTask:
    """The first `problems` training problems of a task, again and again; its other splits are unchanged.

    A position in the data stays one integer that only grows, so every visit of a problem is a request of its
    own, with noise of its own.
    """

    def __init__(self, task: Task, problems: int) -> None:
        self._task = task
        self._problems = problems

    def problem(self, split: Split, index: int) -> Problem:
        return self._task.problem(split, index % self._problems if split == "train" else index)

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        return self._task.reward(problem, response_text)

    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        return extracted_answer(self._task, problem, response_text)

    def finite_problems(self) -> list[Problem]:
        return getattr(self._task, "finite_problems", list)()

    def fingerprint(self) -> dict[str, str]:
        return getattr(self._task, "fingerprint", dict)()

    def rewards(self, answered: Sequence[Answered]) -> list[dict[str, float]]:
        return judge(self._task, answered)
