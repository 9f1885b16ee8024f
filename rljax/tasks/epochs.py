"""A task whose training problems come back epoch after epoch."""

from collections.abc import Sequence

from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Rewards, Split, Task
from rljax.tasks.judging import Answered, judge
from rljax.tasks.wrapper import Wrapper


class EpochTask(Wrapper):
    """The first `problems` training problems of a task, again and again; its other splits are unchanged.

    A position in the data stays one integer that only grows, so a problem that returns is a new request with
    new noise.
    """

    def __init__(self, task: Task, problems: int) -> None:
        super().__init__(task)
        self._task = task
        self._problems = problems

    def problem(self, split: Split, index: int) -> Problem:
        return self._task.problem(split, index % self._problems if split == "train" else index)

    def rewards(self, answered: Sequence[Answered]) -> list[Rewards]:
        return judge(self._task, answered)

    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        return extracted_answer(self._task, problem, response_text)
