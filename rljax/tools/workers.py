"""Calls tools in separate threads: decoding continues, and no response waits for a tool without end.

A thread cannot be stopped. A call that takes too long is answered with an error, and its thread is abandoned.
The limit on abandoned threads tolerates a tool that hangs occasionally; a tool that always hangs ends the
run.
"""

import collections
import dataclasses
import itertools
import queue
import threading
import time

from rljax.errors import UserError
from rljax.tools.base import Tool, ToolError

MOST_ABANDONED = 64
_MOST_OF_AN_ERROR = 200  # characters


@dataclasses.dataclass(frozen=True)
class ToolAnswer:
    """Result of a call.

    Attributes:
      key: key that was passed to `submit`.
      text: the answer, or one line about the error.
      failed: whether the call failed, so that `text` is about an error.
      seconds: time that the tool took.
    """

    key: int
    text: str
    failed: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Call:
    key: int
    name: str
    tool: Tool
    text: str


class ToolWorkers:
    """Calls tools in daemon threads.

    Args:
      most: most calls at a time; others wait.
      time_limit: seconds that a call may take from its start.
      where, key: what the calls are of, and the config key of the time limit, for errors.
    """

    def __init__(
        self, most: int, time_limit: float, where: str = "tools", key: str = "tools.time_limit"
    ) -> None:
        self._where, self._key = where, key
        self._most, self._time_limit = most, time_limit
        self._numbers = itertools.count()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._running: dict[int, tuple[_Call, float]] = {}  # by number: the call and its deadline
        self._done: queue.SimpleQueue[tuple[int, str | UserError, bool, float]] = queue.SimpleQueue()
        self._abandoned: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether a call has no answer yet."""
        return bool(self._waiting or self._running)

    def forget(self) -> None:
        """Drops the calls made so far; their answers are never returned."""
        self._waiting.clear()
        self._abandoned |= self._running.keys()
        self._running.clear()

    def submit(self, key: int, name: str, tool: Tool, text: str) -> None:
        """Calls `tool` as soon as a thread is free; the answer carries `key`."""
        self._waiting.append(_Call(key, name, tool, text))
        self._start()

    def answers(self, timeout: float | None) -> list[ToolAnswer]:
        """Returns new answers. Waits up to `timeout` seconds for the first one, without limit for None.

        Raises:
          UserError: tools hang again and again, or this machine cannot run them.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        new_answers: list[ToolAnswer] = []
        while True:
            self._take(new_answers, 0.0)
            now = time.monotonic()
            self._expire(new_answers, now)
            self._start()
            if new_answers or not self.pending or (give_up is not None and now >= give_up):
                return new_answers
            ends = [end for _, end in self._running.values()] + ([] if give_up is None else [give_up])
            self._take(new_answers, max(min(ends) - now, 0.0))

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most:
            call, number = self._waiting.popleft(), next(self._numbers)
            self._running[number] = (call, time.monotonic() + self._time_limit)
            threading.Thread(target=self._work, args=(number, call), name=call.name, daemon=True).start()

    def _work(self, number: int, call: _Call) -> None:
        start, failed = time.perf_counter(), False
        text: str | UserError
        try:
            text = call.tool.call(call.text)
            if not isinstance(text, str):
                raise TypeError(f"{call.name} answered with {type(text).__name__}, not with text")
        except ToolError as error:
            text, failed = str(error), True
        except UserError as error:  # the machine is at fault, not the call
            text, failed = error, True
        except BaseException as error:  # an exception that leaves the thread would be lost
            text, failed = f"{type(error).__name__}: {error}", True
        self._done.put((number, text, failed, time.perf_counter() - start))

    def _take(self, new_answers: list[ToolAnswer], timeout: float) -> None:
        """Appends the answers of finished calls, after waiting up to `timeout` seconds for the first."""
        try:
            while True:
                number, text, failed, seconds = self._done.get(timeout > 0, timeout or None)
                timeout = 0.0
                self._abandoned.discard(number)
                if number in self._running:
                    call, _ = self._running.pop(number)
                    if isinstance(text, UserError):
                        raise text
                    text = error_line(text) if failed else text
                    new_answers.append(ToolAnswer(call.key, text, failed, seconds))
        except queue.Empty:
            return

    def _expire(self, new_answers: list[ToolAnswer], now: float) -> None:
        for number in [number for number, (_, end) in self._running.items() if now >= end]:
            call, _ = self._running.pop(number)
            self._abandoned.add(number)
            if len(self._abandoned) > MOST_ABANDONED:
                raise UserError(
                    f"{self._where}: {len(self._abandoned)} calls have not come back, the last one of"
                    f" {call.name} after {self._time_limit:g} s; mend it, or raise {self._key}"
                )
            text = error_line(f"no answer after {self._time_limit:g} s")
            new_answers.append(ToolAnswer(call.key, text, True, self._time_limit))


def error_line(text: str) -> str:
    """Returns the text that a policy reads in place of an answer."""
    return f"error: {' '.join(text.split())}"[:_MOST_OF_AN_ERROR]
