"""Weights through files: in shared memory for workers on this machine, or on a disk that all machines see.

A file is a line of JSON (name, type, shape and size of each array), filled up with blanks, and the arrays'
bytes. It is written whole or not at all, and has another name for each version. Workers map one in shared
memory, so that they read it without a copy, also once its name is gone; one on a disk that other machines
see could be lost under them, so they copy it.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from rljax.cluster.messages import Weights
from rljax.cluster.weights.channel import Published
from rljax.durable_files import write_durably
from rljax.errors import ClusterError
from rljax.models.host_params import Part
from rljax.models.transformer import Params

_PREFIX = "rljax-weights-"
_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64  # bytes: a processor's arrays begin there, or are copied once more


@dataclasses.dataclass(frozen=True)
class FileWeights:
    """A version in a file."""

    path: str


class Files:
    """See the module's docstring, and `WeightChannel` for the methods.

    Args:
      directory: where a directory of this run's is made; None for shared memory.

    Raises:
      ClusterError: it cannot be made.
    """

    early = True

    def __init__(self, directory: str | None) -> None:
        if directory is None:
            parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
            _remove_orphans(parent)
        else:
            parent = Path(directory).absolute()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        except OSError as error:
            raise ClusterError(
                f"cluster.weights_dir: {parent} cannot be written ({error.strerror}); choose another"
            ) from error

    def publish(self, version: int, params: Params, parts: list[Part], digest: str) -> Published:
        path = self._directory / str(version)
        head = json.dumps([(name, dtype, shape, data.nbytes) for name, dtype, shape, data in parts]).encode()
        blanks = b" " * (-(len(head) + 1) % _ALIGNMENT)
        try:
            write_durably(path, [head + blanks + b"\n", *(data for *_, data in parts)])
        except OSError as error:
            raise ClusterError(
                f"cluster.weights_dir: {path} cannot be written ({error.strerror}); make room there, or use"
                " cluster.weights=object_store"
            ) from error
        nbytes = sum(data.nbytes for *_, data in parts)
        return Published(version, digest, nbytes, FileWeights(str(path)))

    def deliver(self, published: Published) -> Weights:
        return Weights(published.version, published.digest, published.kept, published.nbytes)

    def remove(self, published: Published) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(published.kept.path)

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def read_file(weights: FileWeights) -> list[Part]:
    """Returns the arrays of a file.

    Raises:
      OSError, ValueError: it is not there, or not whole.
    """
    parts: list[Part] = []
    with open(weights.path, "rb") as file:
        head = file.readline()
        if Path(weights.path).is_relative_to(_SHARED_MEMORY):
            content, begin = np.memmap(file, np.uint8, "r"), len(head)
        else:
            content, begin = np.fromfile(file, np.uint8), 0
        for name, dtype, shape, nbytes in json.loads(head):
            data, begin = content[begin : begin + nbytes], begin + nbytes
            if len(data) != nbytes:
                raise ValueError(f"{weights.path} ends early")
            parts.append((name, dtype, tuple(shape), data))
    return parts


def _remove_orphans(parent: Path) -> None:
    """Removes directories in shared memory of processes of this machine that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(directory, ignore_errors=True)
