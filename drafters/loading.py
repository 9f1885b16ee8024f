"""Loads a drafter by its import path, for drafters that are not in this package.

    speculation.drafter=my_module:MyDrafter
    speculation.drafter=./my_file.py:MyDrafter

`MyDrafter` derives from `Drafter` (`drafters/base.py`), or is a `SimpleDrafter`.
"""

from collections.abc import Mapping
from typing import Any

from drafters.base import Drafter
from drafters.simple import SimpleDrafterAdapter
from rljax.errors import ConfigError
from rljax.importing import LoadError, called, load


def load_drafter(key: str, path: str, args: Mapping[str, Any]) -> Drafter:
    """Builds a drafter from a class, or another callable, by its import path.

    Args:
      key: the config key that holds the path, for errors.
      path: `module:Class`, or `file.py:Class`.
      args: keyword arguments of the class.

    Raises:
      ConfigError: the class cannot be imported or called, or its instance is not a drafter.
    """
    try:
        drafter = called(load(path, key), args, path, key)
    except LoadError as error:
        raise ConfigError(str(error)) from error
    return _adapted(key, path, drafter)


def _adapted(key: str, path: str, drafter: Any) -> Drafter:
    """Returns a drafter that may be a simple one."""
    if isinstance(drafter, Drafter):
        return drafter
    kind = type(drafter).__name__
    if not callable(getattr(drafter, "propose", None)):
        raise ConfigError(f"{key}: {path}: {kind} has no method propose")
    if hasattr(drafter, "begin") or hasattr(drafter, "observe"):
        raise ConfigError(
            f"{key}: {path}: {kind} has more methods than propose; derive it from drafters.base.Drafter,"
            " which has defaults"
        )
    return SimpleDrafterAdapter(drafter)
