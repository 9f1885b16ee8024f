"""Finds a task by the name a config gives it and checks the arguments before anything expensive starts."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rljax.errors import ConfigError
from rljax.tasks.base import Task
from rljax.tasks.chain_arithmetic import ChainArithmetic

TASKS: dict[str, Callable[..., Task]] = {
    "chain_arithmetic": ChainArithmetic,
}


def make_task(name: str, seed: int, **args: Any) -> Task:
    """Builds a task.

    Args:
      name: a key of `TASKS`.
      seed: the run seed; with the split and the index it determines every problem.
      **args: the task's own arguments (`task.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), or a value the task cannot take.
    """
    if name not in TASKS:
        raise ConfigError(f"task.name: unknown task {name!r}; {_suggest(name, TASKS)}")
    factory = TASKS[name]
    known = [parameter for parameter in inspect.signature(factory).parameters if parameter != "seed"]
    for argument in args:
        if argument not in known:
            raise ConfigError(
                f"task.args.{argument}: {name} has no such argument; {_suggest(argument, known)}"
            )
    return factory(seed=seed, **args)


def _suggest(given: str, known: Iterable[str]) -> str:
    """Names the nearest known word, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(names)}"
