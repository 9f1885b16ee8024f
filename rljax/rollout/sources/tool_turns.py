"""Responses that pause for a tool: ReTool's rollouts (Feng et al., arXiv 2504.11536), slot by slot.

A response that has completed a call pauses: its request keeps its slot and its KV cache, the tool runs in a
thread, and the other slots decode. The answer's tokens are then appended (`rljax/engine/appending.py`), and
the response continues. The order of the answers has no effect on the tokens, only on the time.
"""

import abc
import itertools
import time

from rljax.requests import DecodeStatistics
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.sources.turns import Answered, Turns
from rljax.tools.base import Tool
from rljax.tools.markup import ToolCall
from rljax.tools.use import ToolUse
from rljax.tools.workers import ToolAnswer, ToolWorkers

_PATIENCE = 0.002
"""Seconds that decoding waits for the next answer to new calls: most tools are faster than a host sync. It
goes on while answers come, up to the time of a host sync: a pass for the first of many would be nearly
empty.
"""
_WAIT_WHERE_JOINED = 0.02  # seconds of waiting for an answer while nothing decodes and others may join


class Pauses(Turns, abc.ABC):
    """The responses of one decode loop that pause, and what they wait for.

    Args:
      workers: threads that work for them.

    Attributes:
      paused: responses that wait for an answer.
      takes_last: whether a response pauses although no token fits behind its call.
    """

    takes_last = False

    def __init__(self, workers: ToolWorkers) -> None:
        self._workers = workers
        self.paused: set[LiveResponse] = set()
        self._numbers = itertools.count()
        self._calling: dict[int, LiveResponse] = {}  # by number of the call
        self._new = False  # whether decoding has not yet waited for the newest call
        workers.forget()

    def end(self, response: LiveResponse, known: int) -> bool:
        call = self._find(response, known, response.find_stop(known))
        if call is None:
            return super().end(response, known)
        response.cut(call.end)
        if not response.yields and (self.takes_last or call.end < response.request.max_response):
            self._call(response, call)
        else:
            response.ending = "length"
        return True

    @abc.abstractmethod
    def _find(self, response: LiveResponse, known: int, stop: int | None) -> ToolCall | None:
        """Returns the call that a response completes after its first `known` tokens, or None.

        Args:
          known: number of leading tokens that complete no call.
          stop: number of tokens up to the one that completes a stop string; None without one.
        """

    @abc.abstractmethod
    def _call(self, response: LiveResponse, call: ToolCall) -> None:
        """Pauses a response, and starts its call."""

    @abc.abstractmethod
    def _answered(self, response: LiveResponse, answer: ToolAnswer) -> Answered:
        """Returns what follows from the answer to a response's call."""

    def drop(self, response: LiveResponse) -> None:
        """Ignores the answer that a response waits for, if any."""
        if response in self.paused:
            self.paused.remove(response)
            self._calling = {number: other for number, other in self._calling.items() if other != response}

    def answers(self, statistics: DecodeStatistics, alone: bool, joined: bool) -> list[Answered]:
        if not self.paused:
            return []
        answered, most_seconds = [], _WAIT_WHERE_JOINED if joined else None
        start = time.perf_counter()
        answers = self._workers.answers(most_seconds if alone else _PATIENCE if self._new else 0.0)
        longest = max(statistics.device_seconds / max(statistics.host_syncs, 1), _PATIENCE)
        while answers and self._workers.pending and time.perf_counter() - start < longest:
            more = self._workers.answers(_PATIENCE)
            answers += more
            if not more:
                break
        statistics.tool_waiting_seconds += time.perf_counter() - start
        self._new = False
        for answer in answers:
            response = self._calling.pop(answer.key, None)
            if response is None:  # dropped
                continue
            self.paused.remove(response)
            answered.append(self._answered(response, answer))
            statistics.tool_calls += 1
            statistics.tool_errors += answer.failed
            statistics.tool_seconds += answer.seconds
        return answered

    def _pause(self, response: LiveResponse, name: str, tool: Tool, text: str) -> None:
        number = next(self._numbers)
        self.paused.add(response)
        self._calling[number] = response
        self._new = True
        self._workers.submit(number, name, tool, text)


class ToolTurns(Pauses):
    """The calls of one decode loop."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use.workers)
        self._use = use

    def _find(self, response: LiveResponse, known: int, stop: int | None) -> ToolCall | None:
        if response.tool_calls == self._use.max_calls:
            return None
        call = self._use.markup.find(response.tokens, response.turn_begin, known)
        return call if call is None or stop is None or call.end < stop else None

    def _call(self, response: LiveResponse, call: ToolCall) -> None:
        response.tool_calls += 1
        self._pause(response, call.name, self._use.tools[call.name], call.text)

    def _answered(self, response: LiveResponse, answer: ToolAnswer) -> Answered:
        return Answered(response, self._use.markup.answer_ids(answer.text), None)


def tool_metrics(statistics: DecodeStatistics) -> dict[str, float]:
    """Returns the counts of tool calls in `statistics`, for the metrics line."""
    return {
        "tools/calls": statistics.tool_calls,
        "tools/errors": statistics.tool_errors,
        "tools/seconds": statistics.tool_seconds,
        "tools/tokens": statistics.tool_tokens,
        "tools/waiting_seconds": statistics.tool_waiting_seconds,
    }
