"""Loads what a user wrote by its import path, `module:name` or `path/to/file.py:name`."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rljax.errors import ConfigError


class LoadError(ValueError):
    """An import path that leads to nothing; the message begins with the config key that holds it."""


def load(path: str, where: str) -> Any:
    """Returns the object at an import path.

    Args:
      path: `module:name`, or `file.py:name` with the path of a file; the name may have dots. Modules next to
        the file can be imported from it.
      where: config key of the path, for errors.

    Raises:
      LoadError: it cannot be imported.
    """
    module, _, name = path.rpartition(":") if isinstance(path, str) else ("", "", "")
    if not (module and name):
        raise LoadError(f"{where}: write it as module:name, not {path!r}")
    file = Path(module).expanduser()
    if is_file(module) and not file.is_file():
        raise LoadError(f"{where}: {path}: there is no file {module} in {Path.cwd()}")
    try:
        target = _from_file(file.resolve()) if is_file(module) else importlib.import_module(module)
    except Exception as error:
        raise LoadError(f"{where}: {path}: importing {module} raised {error!r}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise LoadError(f"{where}: {path}: {module} has no {name}")
        target = getattr(target, part)
    return target


def is_file(module: str) -> bool:
    """Returns whether the part of an import path before the colon is the path of a file."""
    return module.endswith(".py") or "/" in module


def _from_file(file: Path) -> ModuleType:
    """Returns the module of a file, under a name of its own: two files may have one name."""
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name not in sys.modules:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python source")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


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
