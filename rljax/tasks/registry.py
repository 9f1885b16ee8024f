"""The tasks by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.errors import ConfigError, known_names
from rljax.tasks.arguments import check_arguments
from rljax.tasks.base import Task
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.dataset import Dataset
from rljax.tasks.instructions import Instructions
from rljax.tasks.reasoning_gym import ReasoningGym
from rljax.tasks.tool_arithmetic import ToolArithmetic
from rljax.tasks.worded_arithmetic import WordedArithmetic

TASKS: dict[str, Callable[..., Task]] = {
    "chain_arithmetic": ChainArithmetic,
    "dataset": Dataset,
    "instructions": Instructions,
    "reasoning_gym": ReasoningGym,
    "tool_arithmetic": ToolArithmetic,
    "worded_arithmetic": WordedArithmetic,
}


def make_task(name: str, seed: int, **args: Any) -> Task:
    """Builds a task, without the rewards of a config: see `rljax.assembly.task.configured_task`.

    Args:
      seed: the run seed; with the split and the index it determines every problem.
      **args: arguments of the task (`task.args` of a config).

    Raises:
      ConfigError: an unknown name or argument (with the nearest known one), or a value the task cannot take.
    """
    check_task(name, args)
    return TASKS[name](seed=seed, **args)


def check_task(name: str, args: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Checks the name of a task and of its arguments, without reading data.

    Args:
      name, args: as of `make_task`.
      others: further names that `task.name` may have, for the error.

    Raises:
      ConfigError: as of `make_task`.
    """
    if name not in TASKS:
        raise ConfigError(f"task.name: unknown task {name!r}; {known_names(name, [*TASKS, *others])}")
    check_arguments(name, TASKS[name], args)
