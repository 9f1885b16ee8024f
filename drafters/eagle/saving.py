"""Checkpoints of a head while it is trained: TLT's selective asynchronous checkpointing (section 4.2).

*Selective*: only the trained weights are written, not the policy's embeddings and LM head. *Asynchronous*:
training goes on as soon as the weights have been copied to the host; a thread writes them. A head that was
stopped at any moment loses what was learned since the last save, and nothing else.

    head.safetensors    the weights by their path (`layer.q`), and as metadata the step and the head's shape,
                        with a draft vocabulary also `d2t` as in a checkpoint; the old file or the new one

`load_head` (`checkpoint.py`) reads such a directory as well: `path` of a drafter may name a `save_dir`.
"""

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from drafters.eagle.head_state import named_leaves, nested_leaves
from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig, head_structs
from rljax.durable_files import write_durably
from rljax.errors import CheckpointError
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params

_FILE = "head.safetensors"
_VOCABULARY = "d2t"


def holds_saved(directory: Path) -> bool:
    """Whether an `AsyncHeadSaver` has written to the directory."""
    return (directory / _FILE).is_file()


def load_saved(directory: Path, policy: ModelConfig) -> tuple[HeadConfig, Params]:
    """Loads the head that an `AsyncHeadSaver` wrote, as NumPy arrays.

    Raises:
      CheckpointError: the file is damaged, says nothing of the head's shape, or is for another policy.
    """
    path = directory / _FILE
    try:
        tensors = safetensors.numpy.load_file(path)
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is no saved head ({error}); delete it to go on without") from error
    offsets = tensors.pop(_VOCABULARY, None)
    try:
        vocabulary = None if offsets is None else DraftVocabulary.from_offsets(offsets)
        layers = tuple(json.loads(metadata["layers"]))
        block = BlockShape(**json.loads(metadata["block"])) if "block" in metadata else None
        normed = metadata.get("norm_before_residual") == "true"
        config = HeadConfig(metadata["variant"], policy, layers, vocabulary, block, normed)
    except KeyError as error:
        raise CheckpointError(f"{path} does not tell the head's {error}; save it again") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    params = nested_leaves(tensors)
    expected, stored = named_leaves(head_structs(config)), named_leaves(params)
    stored.pop("fc_bias", None)
    for name in sorted(expected.keys() | stored.keys()):
        shapes = [list(leaves[name].shape) if name in leaves else "absent" for leaves in (expected, stored)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{path}: {name} is {shapes[1]}, but a {config.variant} head of this policy has {shapes[0]}"
                " there"
            )
    return config, params


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

    def save(self, step: int, params: Params, config: HeadConfig) -> None:
        """Starts writing, and returns when the weights are copied to the host, so that the caller may change
        or donate them. One save runs at a time: the call first waits for the last one.

        Args:
          step: the RL step behind the weights.
          params: the head's weights.
          config: the head's shape.

        Raises:
          CheckpointError: the last save could not be written, and nobody was told.
        """
        self.wait()
        leaves = named_leaves(params)
        for leaf in leaves.values():
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        # A copy on a CPU, too. There np.asarray is a view: donation spares such a buffer, and an update would
        # have to find other memory for as long as the save takes.
        tensors = {name: np.array(leaf) for name, leaf in leaves.items()}
        metadata = {"step": str(step), "variant": config.variant, "layers": json.dumps(config.layers)}
        if config.block is not None:
            metadata["block"] = json.dumps(dataclasses.asdict(config.block))
        if config.norm_before_residual:
            metadata["norm_before_residual"] = "true"
        if config.vocabulary is not None:
            tensors[_VOCABULARY] = config.vocabulary.offsets
        # Not a daemon: a process that ends normally first finishes its save.
        self._thread = threading.Thread(
            target=self._write, args=(step, tensors, metadata), name="head checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is on disk; raises a CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, step: int, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        path = self.directory / _FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_durably(path, safetensors.numpy.save(tensors, metadata=metadata))
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            failure = CheckpointError(f"{path}: the head of step {step} could not be written ({reason})")
            if self._on_failure is None:
                self._failure = failure
            else:
                self._on_failure(failure)
