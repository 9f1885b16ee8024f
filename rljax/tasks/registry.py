"""Finds a task by the name a config gives it and checks the arguments before anything expensive starts."""

import inspect
from collections.abc import Callable
from typing import Any

from rljax.errors import ConfigError, known_names
from rljax.tasks.base import Task
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.tool_arithmetic import ToolArithmetic

TASKS: dict[str, Callable[..., Task]] = {
    "chain_arithmetic": ChainArithmetic,
    "tool_arithmetic": ToolArithmetic,
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
        raise ConfigError(f"task.name: unknown task {name!r}; {known_names(name, TASKS)}")
    factory = TASKS[name]
    known = [parameter for parameter in inspect.signature(factory).parameters if parameter != "seed"]
    for argument in args:
        if argument not in known:
            raise ConfigError(
                f"task.args.{argument}: {name} has no such argument; {known_names(argument, known)}"
            )
    return factory(seed=seed, **args)
