"""Makes an environment from its import path, in a worker process."""

from collections.abc import Mapping
from typing import Any

from rljax.environments.base import Environment
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
