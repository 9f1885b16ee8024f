"""Stopping a run from outside: what is worth finishing is finished and saved first, unless one insists."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens for SIGINT and SIGTERM while it is entered.

        with StopRequest(print) as stop:
            while work_is_left and stop.signal is None: ...

    A first signal is only noted where something is to be finished first; elsewhere it raises
    KeyboardInterrupt where the program stands, as a second one does anywhere. A third one ends the process on
    the spot. Outside the main thread, where Python delivers no signals, it does nothing. Python looks for
    signals between two of its own steps: a program that is being compiled or run by the device ends first.

    Args:
      say: called with a line for the user when the first signal is noted.
      first: what is finished first, such as "this step"; None for nothing, but see `finish_first`.

    Attributes:
      signal: the first signal; None until it comes.
      insisted: whether a second one has come.
    """

    def __init__(self, say: Callable[[str], None], first: str | None = "this step") -> None:
        self._say, self._first = say, first
        self._replaced: dict[signal.Signals, object] = {}
        self.signal: signal.Signals | None = None
        self.insisted = False

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._replaced = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def finish_first(self, what: str) -> Iterator[None]:
        """A first signal is only noted in here: whoever works looks at `signal` once `what` is done, and
        saves.
        """
        before, self._first = self._first, what
        try:
            yield
        finally:
            self._first = before

    def check(self) -> None:
        """Raises the KeyboardInterrupt of a signal that was noted."""
        if self.signal is not None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.insisted:
            os._exit(128 + number)
        if self.signal is not None:
            self.insisted = True
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self._first is None:
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it may have come in the middle of writing another line
            self._say(f"{self.signal.name}: stopping after {self._first}; again to stop at once")
