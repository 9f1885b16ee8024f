"""Environments by name, and by the import path of a user's."""

import os
from collections.abc import Callable
from typing import Any

from rljax.config import TaskConfig
from rljax.environments.adapters.seeded import Gymnasium, OpenEnv
from rljax.environments.adapters.verifiers import Verifiers
from rljax.environments.guess_number import GuessNumber
from rljax.environments.places import Here, Place, Workers
from rljax.environments.task import EnvironmentTask
from rljax.errors import ConfigError
from rljax.tasks.arguments import check_arguments

ENVIRONMENTS: dict[str, Callable[..., Any]] = {"guess_number": GuessNumber}
"""Environments that run in the process of the run."""

ADAPTERS: dict[str, Callable[..., Any]] = {"gymnasium": Gymnasium, "openenv": OpenEnv, "verifiers": Verifiers}
"""Environments made of a user's object, which run in worker processes."""


def is_environment(name: str) -> bool:
    """Whether `task.name` names an environment, by name or as `module:Class`."""
    return name in ENVIRONMENTS or name in ADAPTERS or ":" in name


def make_environment_task(config: TaskConfig, seed: int, report: Callable[[str], None]) -> EnvironmentTask:
    """Makes the environment that `config.name` names.

    Args:
      seed: the run seed, the environment's argument `seed`.
      report: called with a line for each failure of a step that does not stop the run.

    Raises:
      ConfigError: the environment cannot be imported or made, or an argument is wrong.
    """
    if config.rewards:
        raise ConfigError(
            f"task.rewards: {config.name} is an environment, which gives the rewards itself; leave them out"
        )
    return EnvironmentTask(_place(config, seed), config, report)


def _place(config: TaskConfig, seed: int) -> Place:
    name, args = config.name, {"seed": seed, **config.args}
    if name in ENVIRONMENTS:
        check_arguments(name, ENVIRONMENTS[name], config.args)
        return Here(ENVIRONMENTS[name](**args))
    if name in ADAPTERS:
        check_arguments(name, ADAPTERS[name], config.args)
        path = f"{ADAPTERS[name].__module__}:{ADAPTERS[name].__name__}"
    else:
        path = name
    processes = config.reward_workers or len(os.sched_getaffinity(0))
    return Workers(path, args, config.reward_timeout, processes)
