"""Base of tasks made of other tasks: mixtures, epochs and rewards.

What `Task` leaves optional is asked for by the functions here, `rljax.tasks.judging.judge` and
`rljax.tasks.answers.extracted_answer`. A `Wrapper` passes it on; what it must decide itself is abstract.
"""

import abc
from collections.abc import Sequence

from rljax.tasks.base import Problem, Split, Task
from rljax.tasks.judging import Answered


def finite_problems(task: Task) -> list[Problem]:
    """All problems of a task that has finitely many, and says so; else none."""
    return getattr(task, "finite_problems", list)()


def fingerprint(task: Task) -> dict[str, str]:
    """A digest of each source of data of a task, by its name; empty where it reads none."""
    return getattr(task, "fingerprint", dict)()


def close(task: Task) -> None:
    """Ends the workers of a task, if it has any."""
    getattr(task, "close", lambda: None)()


class Wrapper(abc.ABC):
    """A task made of one or several others.

    Args:
      *tasks: these.
    """

    def __init__(self, *tasks: Task) -> None:
        self._inner = tasks

    @abc.abstractmethod
    def problem(self, split: Split, index: int) -> Problem:
        """See `Task.problem`."""

    @abc.abstractmethod
    def rewards(self, answered: Sequence[Answered]) -> list[dict[str, float]]:
        """The rewards of many responses, in order; see `Task.reward`."""

    @abc.abstractmethod
    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        """See `rljax.tasks.answers.extracted_answer`."""

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        """Returns the reward of one response; see `Task.reward`."""
        return self.rewards([(problem, response_text)])[0]

    def finite_problems(self) -> list[Problem]:
        """The problems of those tasks that have finitely many."""
        return [problem for task in self._inner for problem in finite_problems(task)]

    def fingerprint(self) -> dict[str, str]:
        """Those of its tasks."""
        return {name: digest for task in self._inner for name, digest in fingerprint(task).items()}

    def close(self) -> None:
        """Ends the workers of its tasks. Without it they end with the process."""
        for task in self._inner:
            close(task)
