"""Failures of one reward of one response, and what a line for the user shows of long texts."""

import json
from collections.abc import Callable
from typing import Literal

from rljax.config import TaskConfig
from rljax.errors import UserError

Kind = Literal["errors", "timeouts"]

_SHOWN = 160  # characters of a prompt, response or answer in an error
REPORTED = 10  # failures that are shown; the others are counted only


class CheckerError(Exception):
    """A reward raised or died; the message says which, and does not name the problem."""


class CheckerTimeout(CheckerError):
    """A reward took longer than its limit, so many seconds by a config key, over a response."""

    def __init__(self, seconds: float, key: str = "task.reward_timeout") -> None:
        super().__init__(f"took more than {seconds:g} seconds ({key})")


class Failures:
    """Stops the run at a failure, or reports it, as `task.reward_errors` and `task.reward_timeouts` say.

    Args:
      report: called with a line for each of the first failures.
    """

    def __init__(self, config: TaskConfig, report: Callable[[str], None]) -> None:
        self._config, self._report = config, report
        self._reported = 0

    def declines(self, kind: Kind) -> bool:
        """Returns whether the response is left out after a failure; else its reward counts as 0."""
        return getattr(self._config, f"reward_{kind}") == "decline"

    def take(self, message: str, kind: Kind) -> None:
        """Takes a failure; raises a UserError where it stops the run."""
        key = f"reward_{kind}"
        if getattr(self._config, key) == "stop":
            raise UserError(
                f"{message}. task.{key}: zero counts such a reward as 0, decline leaves the response out"
            )
        self._reported += 1
        if self._reported <= REPORTED:
            self._report(message)
        if self._reported == REPORTED:
            self._report("further rewards that fail are only counted: see reward/errors and reward/timeouts")


def shown(text: str) -> str:
    """Returns a text in quotes on one line; a long one without its middle."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
    return json.dumps(text, ensure_ascii=False)
