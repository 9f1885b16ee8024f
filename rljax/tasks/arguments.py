"""Checks the arguments that a config gives a task."""

from typing import Any

from rljax.errors import ConfigError


def checked(name: str, value: Any, kind: type, low: float, high: float) -> Any:
    """Returns an argument as `kind`; raises a ConfigError with the allowed range otherwise."""
    accepted = (int, float) if kind is float else (int,)
    # `not low <= value` rather than `value < low`: NaN must fail as well.
    if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
        noun = "a number" if kind is float else "an integer"
        raise ConfigError(f"task.args.{name}: must be {noun} from {low:g} to {high:g}, not {value!r}")
    return kind(value)
