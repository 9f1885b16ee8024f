"""Files that a crash or a power cut leaves whole: how run directories and checkpoints are written."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rljax.errors import UserError


def write_durably(path: Path, content: bytes | Sequence[Any]) -> None:
    """Puts content in a file so that a crash leaves the old or the new one, never a part. It may come as a
    sequence of buffers.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    parts: Sequence[Any] = [content] if isinstance(content, bytes) else content
    try:
        with open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk needs every byte
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk: a renaming itself must survive a power cut, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path, error_type: type[UserError], way_out: str) -> Iterator[None]:
    """A full disk, or one that refuses, is one line: an `error_type` that ends with the way out."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{path}: cannot be written ({error.strerror}); {way_out}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Keeps other processes out, which enter this with the same file: gives whether it is ours. The lock goes
    with the process, however that ends. On a file system without locks nobody is kept out.
    """
    with open(path, "ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not inherited by children
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # the user has to know
        yield True
