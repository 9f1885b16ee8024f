"""The checkpoints of a run: written in the background, complete or invisible, checked when they are read.

    checkpoints/20/arrays/           the train state, as Orbax writes it
    checkpoints/20/host_arrays.npz   arrays of the host, if there are any
    checkpoints/20/checkpoint.json   the seal, written last: leaves, host state, score, sizes, CRC-32s

A checkpoint without its `checkpoint.json` was never finished, because the process was killed or the disk was
full. It is ignored, and deleted by the next save. `restore` verifies sizes and checksums before it reads an
array, because Orbax alone would return a wrong weight for a flipped bit, and pages of TensorStore's internals
for a truncated file. Older checkpoints are deleted only after a newer one is complete, and only those that
`rljax/assembly/retention.py` does not keep.

Of several processes each writes and reads its parts of the arrays, through Orbax, in a directory that all of
them see; the first writes everything else. Saves, restores and waits are collectives then.
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

from rljax import processes
from rljax.assembly.orbax_silence import silence_orbax
from rljax.assembly.retention import Retention
from rljax.durable_files import sync_directory, write_durably
from rljax.errors import CheckpointError

_SEAL = "checkpoint.json"
_ARRAYS = "arrays"
_HOST_ARRAYS = "host_arrays.npz"
_CRC_BLOCK = 1 << 22
ROUTING, SAMPLED_BY = "routing/", "sampled_by/"
"""Begin names among the host arrays of a run: of what routes its requests, and of older weights. All others
are a drafter's.
"""


class RunCheckpoints:
    """The checkpoints of one run, in a directory that only one process writes to.

    Args:
      directory: path of the checkpoints; created by the first save.
      keep, keep_every, keep_best: number of newest checkpoints, interval, and number of best checkpoints that
        a save keeps; see `Retention`.
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
        """Starts a save, and returns as soon as the caller may change or donate the arrays.

        The call waits for the transfer from an accelerator. On a CPU nothing is copied: Orbax writes from
        views, and while they live JAX gives a donating computation new buffers instead. NumPy leaves are
        copied. One save runs at a time: the call first waits for the previous one.

        Args:
          step: step of the checkpoint, not before the newest one. A save of the newest step does nothing.
          train_state: any pytree of arrays; a leaf is named by its path.
          host_state: other state needed to resume (data position, counters), as JSON values; read by this
            call.
          host_arrays: arrays of any size by name, such as a drafter's history; must not change afterwards.
          score: quality of the policy for `keep_best`, larger is better; None if unknown.

        Raises:
          CheckpointError: this or the previous save could not be written; older checkpoints stay usable.
        """
        leaves = _named_leaves(train_state)
        host_json = json.dumps(dict(host_state))
        if json.loads(host_json) != dict(host_state):
            raise TypeError(
                "host_state: only JSON values come back as they were (no tuples, no NaN, text as keys)"
            )
        self.wait()
        newest = processes.from_first(self.latest_step)
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
            processes.from_first(lambda: self._make_directory(path))
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

    def _make_directory(self, path: Path) -> None:
        try:
            self._clear_unfinished()
            path.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(_reason(error)) from error

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first."""
        try:
            entries = list(self.directory.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot be read ({error.strerror})") from error
        return sorted(int(e.name) for e in entries if e.name.isdecimal() and (e / _SEAL).is_file())

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def restore(
        self, template_state: Any, step: int | None = None, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """Reads a checkpoint, bit for bit, into the structure of a template.

        Args:
          template_state: a pytree with the saved leaves, as arrays or `jax.ShapeDtypeStruct`s (from
            `jax.eval_shape`, for example, which takes no memory). Leaves with a sharding are restored to it,
            whatever mesh they were saved from; uncommitted leaves to the default device, uncommitted; NumPy
            leaves as NumPy arrays.
          step: step of the checkpoint; None reads the newest complete one.
          partial: whether the template may lack leaves; those are not read.

        Returns:
          (step, state, host_state).

        Raises:
          CheckpointError: there is no such checkpoint, its leaves differ from the template's, or a file is
            damaged.
        """
        if step is None:
            step = processes.from_first(self.latest_step)
        if step is None or not (self.directory / str(step) / _SEAL).is_file():
            which = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
            raise CheckpointError(f"{self.directory}: holds no {which}")
        path = self.directory / str(step)
        template = _named_leaves(template_state)
        seal = self._read_seal(path)
        saved = {name: leaf for name, leaf in seal["leaves"].items() if not partial or name in template}
        _check_leaves(path, saved, {name: _describe(leaf) for name, leaf in template.items()})
        processes.from_first(lambda: self._check_files(path, seal["files"]))
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
        """Returns the host state saved at `step`, without reading an array. Raises a CheckpointError if it is
        damaged.
        """
        return self._read_seal(self.directory / str(step))["host_state"]

    def host_arrays(self, step: int) -> dict[str, np.ndarray]:
        """Returns the host arrays saved at `step`. Their file is checked by `restore`, not here."""
        path = self.directory / str(step) / _HOST_ARRAYS
        if not path.is_file():
            return {}
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises a CheckpointError if it failed."""
        self._join()
        processes.from_first(self._raise_failure)
        self._raise_failure()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raises a CheckpointError if the last save has failed. Does not wait for a save in progress. With
        several processes it does nothing, since one may have finished earlier: `wait` raises.
        """
        if processes.several():
            return
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def close(self) -> None:
        """Waits as `wait` does, though not for other processes, and ends Orbax's threads."""
        try:
            self._join()
            self._raise_failure()
        finally:
            self._drop_checkpointer()

    def _finish(
        self,
        checkpointer: ocp.AsyncCheckpointer,
        path: Path,
        seal: dict[str, Any],
        host_arrays: dict[str, np.ndarray],
    ) -> None:
        """The background part of a save: waits for the arrays, seals, and only then deletes older ones."""
        try:
            if not processes.is_first():
                checkpointer.wait_until_finished()
                return
            if host_arrays:
                with open(path / _HOST_ARRAYS, "wb") as file:
                    np.savez(file, **host_arrays)
            checkpointer.wait_until_finished()
            files = sorted(file for file in path.rglob("*") if file.is_file())
            seal["files"] = {str(file.relative_to(path)): _fingerprint(file, sync=True) for file in files}
            # The seal vouches for every file, so all of them must be on disk before it.
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
        with contextlib.suppress(Exception):  # further failures of Orbax by the same cause
            self._drop_checkpointer()
        if processes.is_first():
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
            return None  # damaged; `restore` raises for it

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
    """Returns shapes, dtypes and shardings of a state as a template for `RunCheckpoints.restore`."""

    def described(leaf: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = None if _is_uncommitted(leaf) else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(described, state)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by path, such as `params.layers.query.weight`, in the order of the pytree."""
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
    """Whether a leaf is a JAX array bound to no device. It must be restored that way: jit compiles separate
    programs for committed and uncommitted arguments.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is None
    return isinstance(leaf, jax.Array) and not leaf.committed


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, np.ndarray) or _is_uncommitted(leaf):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _fingerprint(file: Path, sync: bool = False) -> tuple[int, int]:
    """Returns size and CRC-32 of a file. `sync` first flushes it to disk, whichever process wrote it."""
    size = crc = 0
    with open(file, "rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        while block := stream.read(_CRC_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _delete(path: Path) -> None:
    """Deletes a checkpoint, its seal first: killed in between, it is unfinished rather than damaged."""
    with contextlib.suppress(OSError):  # a file held open (by a reader on NFS) is no failure of the newer one
        (path / _SEAL).unlink()
        shutil.rmtree(path)


def _reason(error: BaseException) -> str:
    """Returns the cause in a few words; TensorStore's messages are pages long, the system's error last."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
