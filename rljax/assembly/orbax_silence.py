"""Silences messages of Orbax and its dependencies: a failed save is one `CheckpointError`, and nothing else.

When several arrays fail together, as on a full disk, Orbax waits for the first one and closes its event loop.
Depending on their progress, the others print a message in one of three ways: asyncio prints a traceback for a
write that has failed; Python prints one when TensorStore calls the closed loop; or Python warns of a
coroutine that was never awaited.
"""

import logging
import os
import sys
import warnings
from typing import Any

_OF_ORBAX = (
    f"{os.sep}orbax{os.sep}",
    ".orbax-checkpoint-tmp",
)  # its source files, and the directories it is writing
_NOT_BEGUN = r"coroutine '(async_serialize_from_host|Store\.write)\b.*' was never awaited"


def silence_orbax() -> None:
    """Filters the messages until the process ends. May be called repeatedly."""
    logging.getLogger("absl").addFilter(_is_not_narrated)
    logging.getLogger("asyncio").addFilter(_is_not_left_behind)
    warnings.filterwarnings("ignore", _NOT_BEGUN, RuntimeWarning)
    if not isinstance(sys.unraisablehook, _LostCallbacks):
        sys.unraisablehook = _LostCallbacks(sys.unraisablehook)


def _is_not_narrated(record: logging.LogRecord) -> bool:
    """Drops Orbax's log records, which narrate every save, and failures with their traceback."""
    return _OF_ORBAX[0] not in record.pathname


def _is_not_left_behind(record: logging.LogRecord) -> bool:
    if "exception was never retrieved" not in record.getMessage():
        return True
    with_traceback = logging.Formatter().format(record)
    return not any(sign in with_traceback for sign in _OF_ORBAX)


class _LostCallbacks:
    """An unraisable hook that drops TensorStore's calls of a closed event loop; `say` gets the others."""

    def __init__(self, say: Any) -> None:
        self._say = say

    def __call__(self, lost: Any) -> None:
        if not (lost.exc_type is RuntimeError and str(lost.exc_value) == "Event loop is closed"):
            self._say(lost)
