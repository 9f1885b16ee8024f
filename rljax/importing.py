"""Loads what a user wrote by its import path, `module:name`."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from rljax.errors import ConfigError


class LoadError(ValueError):
    """An import path that leads to nothing; the message begins with the config key that holds it."""


def load(path: str, where: str) -> Any:
    """Returns the object at an import path.

    Args:
      path: `module:name`; the name may have dots.
      where: config key of the path, for errors.

    Raises:
      LoadError: it cannot be imported.
    """
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not (module and name):
        raise LoadError(f"{where}: write it as module:name, not {path!r}")
    try:
        target = importlib.import_module(module)
    except Exception as error:
        raise LoadError(f"{where}: {path}: importing {module} raised {error!r}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise LoadError(f"{where}: {path}: {module} has no {name}")
        target = getattr(target, part)
    return target


def called(target: Any, args: Mapping[str, Any], path: str, where: str) -> Any:
    """Returns what the class or function at `path` makes of its arguments.

    Raises:
      LoadError: it cannot be called with them, or raises.
    """
    if not callable(target):
        raise LoadError(f"{where}: {path}: is a {type(target).__name__}, not a class or a function")
    try:
        signature = inspect.signature(target)
    except ValueError:  # some callables have none
        signature = None
    try:
        if signature is not None:
            signature.bind(**args)
    except TypeError as error:
        raise LoadError(f"{where}: {path}: cannot be called with its args: {error}") from error
    try:
        return target(**args)
    except (LoadError, ConfigError) as error:  # about an argument, whose key the message names
        raise LoadError(str(error)) from error
    except Exception as error:
        raise LoadError(f"{where}: {path}: calling it raised {error!r}") from error
