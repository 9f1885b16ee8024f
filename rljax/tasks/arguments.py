"""Checks the arguments that a config gives a task."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rljax.errors import ConfigError, known_names


def checked(name: str, value: Any, kind: type, low: float, high: float) -> Any:
    """Returns an argument as `kind`; raises a ConfigError with the allowed range otherwise."""
    accepted = (int, float) if kind is float else (int,)
    # `not low <= value` rather than `value < low`: NaN must fail as well.
    if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
        noun = "a number" if kind is float else "an integer"
        raise ConfigError(f"task.args.{name}: must be {noun} from {low:g} to {high:g}, not {value!r}")
    return kind(value)


def check_arguments(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Checks the names of the arguments that a config gives a task or an environment, `seed` left out.

    Raises:
      ConfigError: an argument is unknown (with the nearest known one), or a necessary one is missing.
    """
    parameters = inspect.signature(factory).parameters
    known = [parameter for parameter in parameters if parameter != "seed"]
    for argument in args:
        if argument not in known:
            raise ConfigError(
                f"task.args.{argument}: {name} has no such argument; {known_names(argument, known)}"
            )
    for argument in known:
        if parameters[argument].default is inspect.Parameter.empty and argument not in args:
            raise ConfigError(f"task.args.{argument}: must be set for {name}")
