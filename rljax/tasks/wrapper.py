"""Base of tasks made of other tasks: mixtures, epochs and rewards.

The functions here, `rljax.tasks.judging.judge` and `rljax.tasks.answers.extracted_answer` call the optional
methods of a `Task`, and have defaults. A `Wrapper` forwards these calls; the methods that a subclass must
define are abstract.
"""

import abc
from collections.abc import Sequence

from rljax.tasks.base import Problem, Rewards, Split, Task
from rljax.tasks.judging import Answered


def finite_problems(task: Task) -> list[Problem]:
    """Returns all problems of a task that declares a finite number; else none."""
    return getattr(task, "finite_problems", list)()


def fingerprint(task: Task) -> dict[str, str]:
    """Returns a digest of each data source of a task, by its name; empty for a task that reads no data."""
    return getattr(task, "fingerprint", dict)()


def close(task: Task) -> None:
    """Ends the workers of a task, if it has any."""
    getattr(task, "close", lambda: None)()


class Wrapper(abc.ABC):
    """A task made of one or several others.

    Args:
      *tasks: the inner tasks.
    """

    def __init__(self, *tasks: Task) -> None:
        self._inner = tasks

    @property
    def inner(self) -> tuple[Task, ...]:
        """The inner tasks."""
        return self._inner

    @abc.abstractmethod
    def problem(self, split: Split, index: int) -> Problem:
        """See `Task.problem`."""

    @abc.abstractmethod
    def rewards(self, answered: Sequence[Answered]) -> list[Rewards]:
        """Returns the rewards of many responses, in order; see `Task.reward`."""

    @abc.abstractmethod
    def extracted_answer(self, problem: Problem, response_text: str) -> str | None:
        """See `rljax.tasks.answers.extracted_answer`."""

    def reward(self, problem: Problem, response_text: str) -> Rewards:
        """Returns the reward of one response; see `Task.reward`."""
        return self.rewards([(problem, response_text)])[0]

    def finite_problems(self) -> list[Problem]:
        """Returns the problems of the inner tasks that declare a finite number."""
        return [problem for task in self._inner for problem in finite_problems(task)]

    def fingerprint(self) -> dict[str, str]:
        """Returns the digests of all inner tasks."""
        return {name: digest for task in self._inner for name, digest in fingerprint(task).items()}

    def close(self) -> None:
        """Ends the workers of the inner tasks. Without this call they end with the process."""
        for task in self._inner:
            close(task)
