"""Compiled programs on disk, so that the next process neither traces nor lowers nor compiles them.

JAX's persistent cache finds a program by its lowered text: a process that starts again still traces and
lowers every program, which for many small ones takes longer than reading them. Here a program is found by its
key in the pool, beside all else that it depends on: our source, the versions of the libraries, the processor,
compiler settings, and the shapes of its arguments. Change any of them and it is compiled anew.

Files are pickles, as JAX's own: only use a directory that you would also run code from.
"""

import functools
import hashlib
import os
import pickle
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Hashable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from rljax.provenance import source_digest

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
_KEPT = 4  # sources, versions and settings whose programs are kept; the least recently used go first


class StoredPrograms:
    """A directory of compiled programs. With several devices, or several processes, nothing is stored.

    Args:
      directory: made when the first program is saved. Unreadable files are reported and compiled anew; so is
        a directory that cannot be written to.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory) / "programs" / _surroundings()
        self._usable = jax.device_count() == 1
        if self._directory.exists():
            os.utime(self._directory)

    def load(self, key: Hashable, args: tuple, options: Any) -> Callable[..., Any] | None:
        """The program that was saved under the same key, for arguments of the same shapes."""
        path = self._path(key, args, options)
        if path is None or not path.exists():
            return None
        try:
            data = path.read_bytes()
            digest, payload = data[:32], data[32:]
            if hashlib.sha256(payload).digest() != digest:
                raise ValueError("it is damaged")
            serialized, out = pickle.loads(payload)
            in_tree, out_tree = jax.tree.structure((args, {})), jax.tree.structure(out)
            return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree)
        except Exception as error:  # whatever is wrong with the file, compiling helps
            warnings.warn(f"{path}: compiled anew, since it cannot be loaded: {error}", stacklevel=2)
            return None

    def save(self, key: Hashable, args: tuple, options: Any, program: jax.stages.Compiled) -> None:
        path = self._path(key, args, options)
        if path is None:
            return
        try:
            serialized, _, out_tree = serialize_executable.serialize(program)
        except (AttributeError, TypeError, pickle.PicklingError):  # it calls Python: interpreted kernels do
            return
        # A tree definition with our own node types cannot be pickled, but a tree can.
        out = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        payload = pickle.dumps((serialized, out))
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            if not self._directory.exists():
                self._directory.mkdir(parents=True)
                _prune(self._directory.parent)
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        except OSError as error:
            warnings.warn(f"{path}: a compiled program cannot be kept: {error.strerror}", stacklevel=2)
            self._usable = False

    def _path(self, key: Hashable, args: tuple, options: Any) -> Path | None:
        """None for a key that says nothing in another process, such as one with a function in it."""
        name = repr((key, options))
        if not self._usable or re.search(r" at 0x[0-9a-f]+", name):
            return None
        leaves, tree = jax.tree.flatten(args)
        shapes = [(getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
        return self._directory / hashlib.sha256(repr((name, str(tree), shapes)).encode()).hexdigest()


def count_stored(directory: str | os.PathLike[str]) -> int:
    """Returns how many programs a directory holds that this process could load."""
    return sum(1 for _ in (Path(directory) / "programs" / _surroundings()).glob("*"))


def _prune(directory: Path) -> None:
    by_age = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _surroundings() -> str:
    """A digest of what every program depends on, besides its key."""
    device = jax.devices()[0]
    facts = [platform.python_version(), platform.machine(), processor(), device.platform]
    facts += [device.device_kind, device.client.platform_version, os.environ.get("XLA_FLAGS", "")]
    facts += [os.environ.get("NPROC", os.cpu_count())]  # a CPU's loops are split for as many threads
    facts += [f"{library} {version(library)}" for library in _LIBRARIES]
    facts += [f"{name} {getattr(jax.config, name, None)}" for name in _SETTINGS]
    return hashlib.sha256(repr([source_digest(), *facts]).encode()).hexdigest()[:24]


def processor() -> str:
    """The processor's model and instruction sets, where the system tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE)
    model = re.search(r"^model name\s*:.*$", text, re.MULTILINE)
    return f"{found and found.group()} {model and model.group()}"
