"""An environment as a task of a run: its problems, and the steps of their episodes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rljax.config import TaskConfig
from rljax.environments.episodes import problem_of
from rljax.environments.places import Here, Place
from rljax.errors import UserError
from rljax.tasks.base import Problem, Rewards, Split, Task
from rljax.tasks.rewards.failures import CheckerError, CheckerTimeout, Failures, Kind, shown
from rljax.tasks.wrapper import Wrapper


class Outcome(NamedTuple):
    """A step, as the rollout takes it.

    Attributes:
      messages: what the policy reads next.
      done: whether the episode has ended.
      info: numbers for metrics, by name.
      failure: the failure that ended the episode, whose reward is then 0; None where there was none.
    """

    messages: Sequence[dict[str, str]]
    reward: float
    done: bool
    info: dict[str, float]
    failure: Kind | None = None


class EnvironmentTask:
    """The task of an environment.

    Args:
      config: the task section: what happens where a step raises or takes too long.
      report: called with a line for each failure that does not stop the run.

    Attributes:
      declines: whether an episode is left out after a kind of failure; see `Failures`.
    """

    def __init__(self, place: Place, config: TaskConfig, report: Callable[[str], None]) -> None:
        self.config, self._place = config, place
        self._failures = Failures(config, report)
        self.declines = self._failures.declines
        self._size: int | None = self._ask("size")["size"]
        self._problem = functools.lru_cache(maxsize=4096)(self._made)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`."""
        return self._problem(split, index)

    def reward(self, problem: Problem, response_text: str) -> Rewards:
        """Raises an error: the turns of an episode are rewarded, not a text."""
        raise UserError(f"task: {self.config.name} is an environment, which rewards turns and not a text")

    def demonstration(self, problem: Problem) -> list[str] | None:
        """Returns the policy's turns of a solution; None where the environment demonstrates none."""
        return self._ask("demonstration", problem=_fields(problem))["turns"]

    def step(self, key: str, problem: Problem, actions: Sequence[str], last: bool) -> Outcome:
        """Plays the last of an episode's turns; arguments as for `Episodes.step`. Several threads call it.

        Raises:
          UserError: the environment failed, and the task section says that such a failure stops the run.
        """
        try:
            request = {"problem": _fields(problem), "key": key, "actions": list(actions), "last": last}
            return Outcome(**self._place.ask(key, {"call": "step", **request}))
        except CheckerError as error:
            failure: Kind = "timeouts" if isinstance(error, CheckerTimeout) else "errors"
            return self.failed(str(error), failure, problem, actions)

    def failed(self, what: str, failure: Kind, problem: Problem, actions: Sequence[str]) -> Outcome:
        """Returns the outcome of a step that failed, or raises its error; see `step`."""
        message = (
            f"task.name ({self.config.name}): {what}; problem {problem.id}, turn {len(actions)},"
            f" {shown(actions[-1])}"
        )
        self._failures.take(message, failure)
        return Outcome((), 0.0, False, {}, failure)

    @property
    def is_here(self) -> bool:
        """Whether the environment runs in this process."""
        return isinstance(self._place, Here)

    def finite_problems(self) -> list[Problem]:
        """Returns the training problems where their number is finite."""
        return [self.problem("train", index) for index in range(self._size or 0)]

    def fingerprint(self) -> dict[str, str]:
        """Returns a digest of each data source; see `Task`."""
        return self._ask("fingerprint")

    def close(self) -> None:
        """Ends the workers."""
        self._place.close()

    def _made(self, split: Split, index: int) -> Problem:
        return problem_of(self._ask("problem", split=split, index=index))

    def _ask(self, call: str, **request: Any) -> dict[str, Any]:
        try:
            return self._place.ask("", {"call": call, **request})
        except CheckerError as error:
            raise UserError(f"task.name ({self.config.name}): {call}: {error}") from error


def environment_of(task: Task) -> EnvironmentTask | None:
    """Returns the environment of a task, also where its problems come back in epochs; else None."""
    while isinstance(task, Wrapper) and len(task.inner) == 1:
        (task,) = task.inner
    return task if isinstance(task, EnvironmentTask) else None


def _fields(problem: Problem) -> dict[str, Any]:
    return {**vars(problem), "messages": [dict(message) for message in problem.messages]}
