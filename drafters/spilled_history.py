"""Prompts of a history on disk: a compressed file for every version of a prompt's rollouts.

A file is never changed: a prompt that is evicted again, with other rollouts, gets another file. The history's
state names the files, so a run that goes back to an earlier checkpoint finds the rollouts of that time.
"""

import collections
import hashlib
import io
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rljax.errors import UserError

_OWNER, _PROMPT, _VERSION = 8, 16, 8  # bytes of the parts of a file's name
FILE_ARRAYS = ("spill_owner", "spilled")
"""Arrays of a history's state that name files, which only the process that wrote them may delete."""
_KEPT = 8
"""A file that is out of date is deleted when so many states were saved after it: no checkpoint needs it."""


class SpilledHistory:
    """Files of evicted prompts.

    Args:
      directory: parent of the files. Every history has a folder there, with a random name.

    Attributes:
      damaged: number of files that could not be read. Their prompts have no history.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._owner = secrets.token_bytes(_OWNER)
        # Owner and version of each prompt's file, by the prompt's digest.
        self._files: dict[bytes, bytes] = {}
        self._outdated: collections.deque[list[Path]] = collections.deque([[]], maxlen=_KEPT)
        self.damaged = 0

    def __len__(self) -> int:
        """Prompts on disk."""
        return len(self._files)

    def write(self, prompt: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the rollouts of a prompt.

        Raises:
          UserError: the file cannot be written.
        """
        stream = io.BytesIO()
        np.savez_compressed(stream, **arrays)
        digest = _digest(prompt)
        content = b"".join(
            name.encode() + np.ascontiguousarray(array).tobytes() for name, array in arrays.items()
        )
        place = self._owner + hashlib.sha256(content).digest()[:_VERSION]
        file = self._file(digest, place)
        if self._files.get(digest) == place and file.exists():
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{secrets.token_hex(4)}.tmp")  # others may write the same file
            temporary.write_bytes(stream.getvalue())
            temporary.replace(file)
        except OSError as error:
            raise UserError(f"speculation.args.spill_dir: cannot write {file}: {error.strerror}") from error
        before = self._files.get(digest)
        if before is not None and before[:_OWNER] == self._owner:
            self._outdated[-1].append(self._file(digest, before))
        self._files[digest] = place

    def read(self, prompt: Sequence[int]) -> dict[str, np.ndarray] | None:
        """Returns the arrays of a prompt; None without a file, or with a warning if it is damaged."""
        digest = _digest(prompt)
        place = self._files.get(digest)
        if place is None:
            return None
        file = self._file(digest, place)
        try:
            with np.load(file) as arrays:
                return dict(arrays)
        except Exception as error:  # a damaged archive raises errors of half a dozen kinds
            self.refuse(prompt, error)
            return None

    def refuse(self, prompt: Sequence[int], error: Exception) -> None:
        """Counts the file of a prompt as damaged, and warns: its rollouts are lost, and nothing else."""
        digest = _digest(prompt)
        file = self._file(digest, self._files.pop(digest))
        self.damaged += 1
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"{file}: this part of the drafter's history is lost: {reason}", stacklevel=2)

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content: the folder's name and the files, uint8 [8] and [n, 32]."""
        self._outdated.append([])
        if len(self._outdated) == _KEPT:
            for file in self._outdated[0]:
                file.unlink(missing_ok=True)
        rows = [np.frombuffer(digest + place, np.uint8) for digest, place in self._files.items()]
        return {
            FILE_ARRAYS[0]: np.frombuffer(self._owner, np.uint8),
            FILE_ARRAYS[1]: np.stack(rows) if rows else np.zeros((0, _PROMPT + _OWNER + _VERSION), np.uint8),
        }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores `state`; a history that was saved without one has no files. Files since then stay until
        they are out of date.
        """
        self._files = {}
        self._outdated = collections.deque([[]], maxlen=_KEPT)
        if "spilled" in state:
            self._owner = state["spill_owner"].tobytes()
            rows = [row.tobytes() for row in state["spilled"]]
            self._files = {row[:_PROMPT]: row[_PROMPT:] for row in rows}

    def _file(self, digest: bytes, place: bytes) -> Path:
        folder = self._directory / place[:_OWNER].hex()
        return folder / f"{digest.hex()}-{place[_OWNER:].hex()}.npz"


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(prompt, np.int32).tobytes()).digest()[:_PROMPT]
