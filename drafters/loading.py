"""Loads a drafter by its import path, for drafters that are not in this package.

    speculation.drafter=my_module:MyDrafter

`MyDrafter` may be of any tier of the protocol (`drafters/base.py`).
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from drafters.base import Drafter
from drafters.device import DeviceDrafter, SelfDrafter
from drafters.simple import SimpleDrafterAdapter
from rljax.errors import ConfigError

_METHODS = ("begin", "propose", "observe", "learn", "state", "load_state", "metrics")  # of a `HostDrafter`


def load_drafter(key: str, args_key: str, path: str, args: Mapping[str, Any]) -> Drafter:
    """Builds a drafter from a class, or another callable, by its import path.

    Args:
      key: the config key that holds the path, for errors.
      args_key: the config key that holds the arguments, for errors.
      path: `module:Class`.
      args: keyword arguments of the class.

    Raises:
      ConfigError: the class cannot be imported or called, or its instance is not a drafter.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"{key}: write a drafter as module:Class, not {path!r}")
    try:
        factory = importlib.import_module(module)
        for part in name.split("."):
            factory = getattr(factory, part)
    except Exception as error:
        raise ConfigError(f"{key}: {path}: importing it raised {_line(error)}") from error
    try:
        inspect.signature(factory).bind(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{args_key}: {path} cannot be called with them: {error}") from error
    try:
        drafter = factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {path}: calling it raised {_line(error)}") from error
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


def _line(error: Exception) -> str:
    return " ".join(repr(error).split())[:300]
