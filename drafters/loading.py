"""Loads a drafter by its import path, for drafters that are not in this package.

    speculation.drafter=my_module:MyDrafter
    speculation.drafter=./my_file.py:MyDrafter

`MyDrafter` may be of any tier of the protocol (`drafters/base.py`).
"""

from collections.abc import Mapping
from typing import Any

from drafters.base import Drafter
from drafters.device import DeviceDrafter, SelfDrafter
from drafters.simple import SimpleDrafterAdapter
from rljax.errors import ConfigError
from rljax.importing import LoadError, called, load

_METHODS = ("begin", "propose", "observe", "learn", "state", "load_state", "metrics")  # of a `HostDrafter`


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
    """Returns a drafter of the second or third tier."""
    if isinstance(drafter, DeviceDrafter | SelfDrafter):
        return drafter
    missing = [method for method in _METHODS if not callable(getattr(drafter, method, None))]
    if "propose" in missing:
        raise ConfigError(f"{key}: {path}: {type(drafter).__name__} has no method propose")
    if not missing:
        return drafter
    if {"begin", "observe"} <= set(missing):
        return SimpleDrafterAdapter(drafter)
    raise ConfigError(
        f"{key}: {path}: {type(drafter).__name__} has no method {missing[0]}; derive it from"
        " drafters.base.HostDrafter, which has defaults"
    )
