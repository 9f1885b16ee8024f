"""Makes an environment from its import path, in a worker process."""

from collections.abc import Callable, Mapping
from typing import Any

from rljax.environments.base import Environment
from rljax.environments.episodes import Episodes
from rljax.importing import LoadError, called, load

_METHODS = ("problem", "reset", "step")


def make_environment(path: str, args: Mapping[str, Any]) -> Environment:
    """Makes the environment at `module:Class`; raises a LoadError where there is none."""
    environment = called(load(path, "name"), args, path, "name")
    for method in _METHODS:
        if not callable(getattr(environment, method, None)):
            raise LoadError(
                f"name: {path}: {type(environment).__name__} has no method {method}; see"
                " rljax/environments/base.py"
            )
    return environment


def answers(path: str, args: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Makes what answers requests about the episodes of the environment at `module:Class`: the checker of its
    worker (`rljax/tasks/rewards/worker.py`).
    """
    return Episodes(make_environment(path, args)).answer
