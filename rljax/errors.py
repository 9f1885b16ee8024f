"""Errors that are the user's to mend: scripts print their message as one line, without a traceback."""

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec

_Arguments = ParamSpec("_Arguments")


class UserError(Exception):
    """Bad input, such as a config or a checkpoint; the message names it and says what would be right."""


class ConfigError(UserError):
    """A config key that is unknown, of the wrong type, or impossible together with another."""


class CheckpointError(UserError):
    """A model checkpoint or run checkpoint that cannot be read as asked."""


class RunDirectoryError(UserError):
    """A file of a run directory that cannot be read or written."""


class TokenizerError(UserError):
    """A tokenizer directory that cannot be read, or that does not fit the policy."""


class PolicyError(UserError):
    """A policy whose weights, or what it computes, are no numbers."""


class DrafterError(UserError):
    """A drafter that raises, or that returns what the protocol does not know."""


class ClusterError(UserError):
    """A cluster that cannot be reached, has too little room, or has lost all of its workers."""


class NumericsError(UserError):
    """Two machines that compute different bits where a run needs equal ones."""


class Interrupted(Exception):
    """A run was asked by a signal to stop, and has saved its state."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def known_names(given: str, known: Iterable[str]) -> str:
    """For a message about an unknown name: the nearest known one, if any is near, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(names)}"


def exit_status(
    interrupted: str = "",
) -> Callable[[Callable[_Arguments, int | None]], Callable[_Arguments, int]]:
    """Makes a command's `main` return its exit status: 0 if it returns nothing, 2 and one line for a
    `UserError`, 130 where Ctrl-C ends it, with what `interrupted` says, and 141 where what reads its output
    has gone, as `head` does.
    """

    def decorate(main: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
        @functools.wraps(main)
        def command(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
            try:
                return main(*args, **kwargs) or 0
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                if interrupted:
                    print(interrupted, file=sys.stderr)
                return 130
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the final flush
                return 141

        return command

    return decorate
