"""The checkpoints of a run: written while training goes on, complete or invisible, checked on reading.

    checkpoints/20/arrays/           the train state, as Orbax writes it
    checkpoints/20/host_arrays.npz   arrays of the host, if there are any
    checkpoints/20/checkpoint.json   written last: leaves, host state, score, and every file's size and CRC-32

A checkpoint without its `checkpoint.json` was never finished (the process was killed, the disk was full): it
does not count and is cleared away by the next save. What Orbax alone would not notice, `restore` does before
it reads an array: a flipped bit comes back as a wrong weight without a word, and a cut file as pages of
TensorStore's internals. Older checkpoints are deleted only after a newer one is complete, and only those that
`rljax/training/retention.py` does not keep.
"""

import contextlib
import json
import math
import os
import re
import shutil
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rljax.durable_files import sync_directory, write_durably
from rljax.errors import CheckpointError
from rljax.training.orbax_silence import silence_orbax
from rljax.training.retention import Retention

_SEAL = "checkpoint.json"
_ARRAYS = "arrays"
_HOST_ARRAYS = "host_arrays.npz"
_CRC_BLOCK = 1 << 22


class RunCheckpoints:
    """The checkpoints of one run, in one directory that only one process writes to.

    Args:
      directory: created by the first save.
      keep, keep_every, keep_best: which complete ones are left after a save; see `Retention`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int, keep_every: int = 0, keep_best: int = 0
    ) -> None:
        self.directory = Path(directory).absolute()
        self._retention = Retention(keep, keep_every, keep_best)
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._thread: threading.Thread | None = None
        self._saving: int | None = None
        self._failure: BaseException | None = None
        silence_orbax()

    def save(
        self,
        step: int,
        train_state: Any,
        host_state: Mapping[str, Any],
        host_arrays: Mapping[str, np.ndarray] | None = None,
        score: float | None = None,
    ) -> None:
        """Starts saving and returns as soon as the caller may change or donate the arrays.

        The transfer from an accelerator is waited for. On a CPU nothing is copied: Orbax writes from views,
        and while those live JAX does not give the buffers to a donating computation, which takes new ones.
        NumPy leaves are copied. One save runs at a time: the call first waits for the last one.

        Args:
          step: greater than that of the newest checkpoint; a step that is already there is left as it is.
          train_state: any pytree of arrays; names of leaves are their paths in it.
          host_state: what else the run needs to go on (data position, counters), as JSON values; read now.
          host_arrays: arrays of any size by name, such as a drafter's history; not to be changed afterwards.
          score: how good the policy is, larger is better, for `keep_best`; None is not known.

        Raises:
          CheckpointError: this or the last save could not be written; older checkpoints stay usable.
        """
        leaves = _named_leaves(train_state)
        host_json = json.dumps(dict(host_state))
        if json.loads(host_json) != dict(host_state):
            raise TypeError(
                "host_state: only JSON values come back as they were (no tuples, no NaN, text as keys)"
            )
        self.wait()
        newest = self.latest_step()
        if newest is not None and step <= newest:
            if step == newest:
                return
            raise ValueError(f"step {step} is not after the newest checkpoint's, {newest}")
        seal = {
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "host_state": json.loads(host_json),
            "score": None if score is None or not math.isfinite(score) else score,
        }
        self._saving = step
        path = self.directory / str(step)
        try:
            self._clear_unfinished()
            path.mkdir(parents=True)
            if self._checkpointer is None:
                # Weights hardly compress, and zstd costs processor time: the row `checkpoint/50M/Orbax
                # uncompressed, processor time` of benchmarks/results/training.json.
                handler = ocp.PyTreeCheckpointHandler(use_compression=False)
                self._checkpointer = ocp.AsyncCheckpointer(handler)
            self._checkpointer.save(path / _ARRAYS, args=ocp.args.PyTreeSave(leaves))
        except Exception as error:
            self._failure = error
            self._raise_failure()
        self._thread = threading.Thread(
            target=self._finish,
            args=(self._checkpointer, path, seal, dict(host_arrays or {})),
            name="checkpoint",
        )
        self._thread.start()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        try:
            entries = list(self.directory.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot be read ({error.strerror})") from error
        return sorted(int(e.name) for e in entries if e.name.isdecimal() and (e / _SEAL).is_file())

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None when there is none."""
        return max(self.steps(), default=None)

    def restore(
        self, template_state: Any, step: int | None = None, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """Reads a checkpoint, bit for bit, into the template's tree.

        Args:
          template_state: a tree with the saved one's leaves, arrays or `jax.ShapeDtypeStruct`s (as from
            `jax.eval_shape`, which takes no memory). Leaves with a sharding come back with it, whatever mesh
            they were saved from; uncommitted ones on the default device, uncommitted; NumPy ones as NumPy.
          step: which one; None is the newest complete.
          partial: the template may lack leaves, which are not read.

        Returns:
          (step, state, host_state).

        Raises:
          CheckpointError: there is none, its leaves are not the template's, or a file is damaged.
        """
        if step is None:
            step = self.latest_step()
        if step is None or not (self.directory / str(step) / _SEAL).is_file():
            which = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
            raise CheckpointError(f"{self.directory}: holds no {which}")
        path = self.directory / str(step)
        template = _named_leaves(template_state)
        seal = self._read_seal(path)
        saved = {name: leaf for name, leaf in seal["leaves"].items() if not partial or name in template}
        _check_leaves(path, saved, {name: _describe(leaf) for name, leaf in template.items()})
        self._check_files(path, seal["files"])
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                restored = checkpointer.restore(
                    path / _ARRAYS,
                    args=ocp.args.PyTreeRestore(
                        item=dict.fromkeys(template, 0),
                        restore_args={name: _restore_args(leaf) for name, leaf in template.items()},
                        partial_restore=partial,
                    ),
                )
            except Exception as error:
                raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error
        leaves = [
            jax.device_put(restored[name]) if _is_uncommitted(leaf) else restored[name]
            for name, leaf in template.items()
        ]
        state = jax.tree.unflatten(jax.tree.structure(template_state), leaves)
        return step, state, seal["host_state"]

    def host_state(self, step: int) -> dict[str, Any]:
        """What `restore` gives last, without reading an array; a CheckpointError if it is damaged."""
        return self._read_seal(self.directory / str(step))["host_state"]

    def host_arrays(self, step: int) -> dict[str, np.ndarray]:
        """The host arrays saved at `step`, whose files `restore` has checked."""
        path = self.directory / str(step) / _HOST_ARRAYS
        if not path.is_file():
            return {}
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def wait(self) -> None:
        """Returns when the last save is on disk; a CheckpointError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def check(self) -> None:
        """A CheckpointError when the last save has failed; does not wait for one that is under way."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def close(self) -> None:
        """Waits as `wait` does and gives Orbax's threads back."""
        try:
            self.wait()
        finally:
            self._drop_checkpointer()

    def _finish(
        self,
        checkpointer: ocp.AsyncCheckpointer,
        path: Path,
        seal: dict[str, Any],
        host_arrays: dict[str, np.ndarray],
    ) -> None:
        """The background part of a save: the arrays' end, the seal, and only then older ones' deletion."""
        try:
            if host_arrays:
                with open(path / _HOST_ARRAYS, "wb") as file:
                    np.savez(file, **host_arrays)
            checkpointer.wait_until_finished()
            files = sorted(file for file in path.rglob("*") if file.is_file())
            seal["files"] = {str(file.relative_to(path)): _fingerprint(file, sync=True) for file in files}
            # The seal stands for all that is below: it must not be on disk before any of it.
            for directory in (path, *(entry for entry in path.rglob("*") if entry.is_dir())):
                sync_directory(directory)
            write_durably(path / _SEAL, json.dumps(seal, indent=1).encode())
            for directory in (path.parent, path.parent.parent):
                sync_directory(directory)
            scores = {step: self._score(step) for step in self.steps()}
            for old in sorted(scores.keys() - self._retention.kept(scores)):
                _delete(self.directory / str(old))
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        error, self._failure = self._failure, None
        with contextlib.suppress(Exception):  # what else of Orbax's failed by the same cause
            self._drop_checkpointer()
        self._clear_unfinished()  # on a full disk the space is needed: metrics must still be written
        newest = self.latest_step()
        left = "there is no older one" if newest is None else f"that of step {newest} is still good"
        raise CheckpointError(
            f"{self.directory}: the checkpoint of step {self._saving} could not be written"
            f" ({_reason(error)}); {left}"
        ) from error

    def _drop_checkpointer(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _clear_unfinished(self) -> None:
        if self.directory.is_dir():
            for entry in self.directory.iterdir():
                if entry.name.isdecimal() and not (entry / _SEAL).is_file():
                    shutil.rmtree(entry, ignore_errors=True)

    def _read_seal(self, path: Path) -> dict[str, Any]:
        try:
            seal = json.loads((path / _SEAL).read_bytes())
            if not all(isinstance(seal[key], dict) for key in ("leaves", "files", "host_state")):
                raise TypeError
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / _SEAL}: damaged; {self._way_out(path)}") from error
        return seal

    def _score(self, step: int) -> float | None:
        try:
            return json.loads((self.directory / str(step) / _SEAL).read_bytes()).get("score")
        except (OSError, ValueError, AttributeError):
            return None  # damaged: `restore` says so to whoever asks for it

    def _check_files(self, path: Path, files: dict[str, list[int]]) -> None:
        for name, (size, crc) in files.items():
            try:
                found_size, found_crc = _fingerprint(path / name)
            except OSError as error:
                raise CheckpointError(
                    f"{path / name}: cannot be read ({error.strerror}); {self._way_out(path)}"
                ) from error
            if found_size != size:
                damage = f"has {found_size} bytes, but {size} were saved"
            elif found_crc != crc:
                damage = "differs from what was saved (CRC-32)"
            else:
                continue
            raise CheckpointError(f"{path / name}: {damage}; {self._way_out(path)}")

    def _way_out(self, path: Path) -> str:
        older = [step for step in self.steps() if step < int(path.name)]
        after = f"go on from step {older[-1]}" if older else "start over (there is no older checkpoint)"
        return f"delete {path} to {after}"


def template_of(state: Any) -> Any:
    """What `RunCheckpoints.restore` has to know of a state: shapes and shardings, without its arrays."""

    def described(leaf: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = None if _is_uncommitted(leaf) else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(described, state)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their path, such as `params.layers.query.weight`, in the tree's order."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) or jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.extended
        ):
            raise TypeError(f"{name}: {type(leaf).__name__} is not an array of numbers")
        if name in leaves:
            raise ValueError(f"{name}: two leaves have this path")
        leaves[name] = leaf
    return leaves


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype.name}[{', '.join(map(str, leaf.shape))}]"


def _check_leaves(path: Path, saved: Mapping[str, str], template: Mapping[str, str]) -> None:
    for name in [*template, *(saved.keys() - template.keys())]:
        if saved.get(name) != template.get(name):
            here, there = template.get(name, "absent"), saved.get(name, "absent")
            raise CheckpointError(
                f"{path}: {name} is {there} in the checkpoint, but {here} in this run; give the run the"
                " policy and optimizer it was saved with, or another run_dir"
            )


def _is_uncommitted(leaf: Any) -> bool:
    """Whether a leaf is JAX's but bound to no device; jit compiles apart for such, so it must stay so."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is None
    return isinstance(leaf, jax.Array) and not leaf.committed


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, np.ndarray) or _is_uncommitted(leaf):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _fingerprint(file: Path, sync: bool = False) -> tuple[int, int]:
    """Size and CRC-32; with `sync` it is also on disk, by whomever it was written."""
    size = crc = 0
    with open(file, "rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        while block := stream.read(_CRC_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _delete(path: Path) -> None:
    """The seal goes first: killed in between, what is left is an unfinished checkpoint, not a damaged one."""
    with contextlib.suppress(OSError):  # what has to stay (a reader on NFS) is no failure of the newer one
        (path / _SEAL).unlink()
        shutil.rmtree(path)


def _reason(error: BaseException) -> str:
    """The cause in a few words; TensorStore's messages go on for pages and end with the system's error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
