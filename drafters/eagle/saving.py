"""Checkpoints of a head while it is trained: TLT's selective asynchronous checkpointing (section 4.2).

*Selective*: only the trained weights are written, not the policy's embeddings and LM head. *Asynchronous*:
training goes on as soon as the weights have been copied to the host; a thread writes them. A head that was
stopped at any moment loses what was learned since the last save, and nothing else.

    head.safetensors    the weights by their path (`layer.q`), and the step; the old file or the new one
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from rljax.durable_files import write_durably
from rljax.errors import CheckpointError
from rljax.models.transformer import Params

_FILE = "head.safetensors"


class AsyncHeadSaver:
    """The newest saved weights of one head, in a directory that only one process writes to.

    Args:
      directory: made by the first save.
      on_failure: hears of a save that could not be written, as soon as that is known, from the thread that
        writes. None: the next call raises it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        on_failure: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, step: int, params: Params) -> None:
        """Starts writing, and returns when the weights are copied to the host, so that the caller may change
        or donate them. One save runs at a time: the call first waits for the last one.

        Raises:
          CheckpointError: the last save could not be written, and nobody was told.
        """
        self.wait()
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for _, leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        # A copy on a CPU, too. There np.asarray is a view: donation spares such a buffer, and an update would
        # have to find other memory for as long as the save takes.
        tensors = {
            jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in leaves
        }
        # Not a daemon: a process that ends normally first finishes its save.
        self._thread = threading.Thread(target=self._write, args=(step, tensors), name="head checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is on disk; raises a CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def latest(self) -> tuple[int, Params] | None:
        """Returns the newest complete save, NumPy arrays and its step, or None. Waits for the save under way.

        Raises:
          CheckpointError: the last save failed, or a file is damaged.
        """
        self.wait()
        path = self.directory / _FILE
        if not path.exists():
            return None
        try:
            tensors = safetensors.numpy.load_file(path)
            with safetensors.safe_open(path, framework="np") as file:
                step = int(file.metadata()["step"])
        except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is no saved head ({error}); delete it to go on without") from error
        params: Params = {}
        for name, array in tensors.items():
            *parents, last = name.split(".")
            place = params
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = array
        return step, params

    def _write(self, step: int, tensors: dict[str, np.ndarray]) -> None:
        path = self.directory / _FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_durably(path, safetensors.numpy.save(tensors, metadata={"step": str(step)}))
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            failure = CheckpointError(f"{path}: the head of step {step} could not be written ({reason})")
            if self._on_failure is None:
                self._failure = failure
            else:
                self._on_failure(failure)
