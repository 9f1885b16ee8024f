"""What a tracker has been sent: the id of the run there, and the newest step."""

import json
from collections.abc import Callable
from pathlib import Path

from rljax.durable_files import write_durably


class SentSteps:
    """A file of the run directory that keeps both over the sessions of a run. A step that is repeated after a
    resume has the same numbers, so it is not sent again.

    Args:
      make_id: makes the id where there is no file yet.

    Attributes:
      id: id of the run in the tracker.
    """

    def __init__(self, path: Path, make_id: Callable[[], str]) -> None:
        self._path = path
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.id, self._step = kept["id"], kept["step"]
        else:
            self.id, self._step = make_id(), -1
            self._keep()

    def is_new(self, step: int) -> bool:
        """Returns whether a step has not been sent."""
        return step > self._step

    def sent(self, step: int) -> None:
        """Notes that a step has been sent."""
        self._step = step
        self._keep()

    def _keep(self) -> None:
        write_durably(self._path, json.dumps({"id": self.id, "step": self._step}).encode())
