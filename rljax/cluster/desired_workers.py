"""The number of workers as a file that the user may write while the run goes on: `echo 4 > RUN/workers`."""

from collections.abc import Callable
from pathlib import Path

_EVERY = 1.0  # seconds between two looks


class DesiredWorkersFile:
    """The file `workers` in a run's directory. As long as there is none, `cluster.workers` counts.

    Args:
      directory: the run's.
      say: shows a line to the user.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = directory / "workers", say
        self._looked, self._text = -_EVERY, ""

    def changed(self, now: float) -> int | None:
        """Returns the number in the file where that has just changed; else None."""
        if now - self._looked < _EVERY:
            return None
        self._looked = now
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace").strip()[:20]
        except OSError:
            return None
        if text == self._text:
            return None
        self._text = text
        if not text.isdecimal() or not int(text):
            if text:  # else it is being written
                self._say(f"{self.path}: {text!r} is no number of workers from 1 on, and changes nothing")
            return None
        self._say(f"{self.path}: {int(text)} workers are kept running from now on")
        return int(text)
