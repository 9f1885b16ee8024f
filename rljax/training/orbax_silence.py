"""What Orbax and those below it say besides the one `CheckpointError` that a failed save is.

Of arrays that fail together, as on a full disk, Orbax waits for the first and closes its event loop. The
others end in one of three ways, by the moment that finds them: they have failed, and asyncio prints a
traceback of each; TensorStore tells a loop that is gone, and Python prints one; or they have not begun, and
Python warns that they never will.
"""

import logging
import os
import sys
import warnings
from typing import Any

_OF_ORBAX = (f"{os.sep}orbax{os.sep}", ".orbax-checkpoint-tmp")  # its files, and what it is writing
_NOT_BEGUN = r"coroutine '(async_serialize_from_host|Store\.write)\b.*' was never awaited"


def silence_orbax() -> None:
    """Until the process ends; it may be called any number of times."""
    logging.getLogger("absl").addFilter(_is_not_narrated)
    logging.getLogger("asyncio").addFilter(_is_not_left_behind)
    warnings.filterwarnings("ignore", _NOT_BEGUN, RuntimeWarning)
    if not isinstance(sys.unraisablehook, _LostCallbacks):
        sys.unraisablehook = _LostCallbacks(sys.unraisablehook)


def _is_not_narrated(record: logging.LogRecord) -> bool:
    """Orbax tells of every save through absl, and of failures with their traceback."""
    return _OF_ORBAX[0] not in record.pathname


def _is_not_left_behind(record: logging.LogRecord) -> bool:
    if "exception was never retrieved" not in record.getMessage():
        return True
    with_traceback = logging.Formatter().format(record)
    return not any(sign in with_traceback for sign in _OF_ORBAX)


class _LostCallbacks:
    """A hook that leaves out what TensorStore tells a closed loop.

    Args:
      say: the hook of before.
    """

    def __init__(self, say: Any) -> None:
        self._say = say

    def __call__(self, lost: Any) -> None:
        if not (lost.exc_type is RuntimeError and str(lost.exc_value) == "Event loop is closed"):
            self._say(lost)
