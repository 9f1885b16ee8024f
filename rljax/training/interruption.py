"""Stopping a run from outside: the first signal lets it finish its step and save, the second insists."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens for SIGINT and SIGTERM while it is entered.

        with StopRequest(print) as stop:
            while work_is_left and stop.signal is None: ...

    The first signal is only noted. A second one raises KeyboardInterrupt where the program stands. Outside
    the main thread, where Python delivers no signals, it does nothing.

    Args:
      say: called with a line for the user when the first signal arrives.

    Attributes:
      signal: the first signal; None until it comes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._replaced: dict[signal.Signals, object] = {}
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._replaced = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._say(f"{self.signal.name}: stopping after this step; again to stop at once")
