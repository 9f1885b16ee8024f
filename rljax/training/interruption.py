"""Stopping a run by a signal: the current step is finished and saved first, a second signal stops at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rljax import processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager that listens for SIGINT and SIGTERM.

        with StopRequest(print) as stop:
            while work_is_left and stop.signal is None: ...

    While some work should be finished first, the first signal is only recorded. Otherwise it raises
    KeyboardInterrupt at once, as a second signal always does. A third signal ends the process. Outside the
    main thread, where Python delivers no signals, the context does nothing. Python handles signals between
    two bytecodes, so a running compilation or device program ends first.

    Args:
      say: called with a line for the user when the first signal is recorded.
      first: name of the work to finish first, such as "this step". With None, only work inside `finish_first`
        is finished.

    Attributes:
      signal: the first signal; None before it.
      insisted: whether a second signal has come.
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
        """Context in which the first signal is only recorded. The caller checks `signal` when `what` is done,
        and saves.
        """
        before, self._first = self._first, what
        try:
            yield
        finally:
            self._first = before

    def agreed(self) -> signal.Signals | None:
        """Returns `signal`, or with several processes the signal that any of them has recorded, so that all
        stop after the same work. Every process calls it at the same point.
        """
        number = processes.largest(0 if self.signal is None else int(self.signal))
        if number and self.signal is None:
            self.signal = signal.Signals(number)
        return signal.Signals(number) if number else None

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal has been recorded."""
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
        with contextlib.suppress(RuntimeError):  # the signal may interrupt the writing of another line
            self._say(f"{self.signal.name}: stopping after {self._first}; again to stop at once")
