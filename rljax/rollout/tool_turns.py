"""Responses that pause for a tool: ReTool's rollouts (Feng et al., arXiv 2504.11536), slot by slot.

A response that has completed a call pauses: its request keeps its slot and its KV cache, the tool runs in a
thread, and the other slots decode. The answer's tokens are then appended (`rljax/engine/appending.py`), and
the response continues. The order of the answers has no effect on the tokens, only on the time.
"""

import itertools
import time

from rljax.requests import DecodeStatistics
from rljax.rollout.live_response import LiveResponse
from rljax.tools.markup import ToolCall
from rljax.tools.use import ToolUse

_PATIENCE = 0.002
"""Seconds that decoding waits for the answer to a new call: most tools are faster than a host sync."""


class ToolTurns:
    """The calls of one decode loop.

    Args:
      use: the tools.
      statistics: counts of the loop, to add to.

    Attributes:
      paused: responses that wait for an answer.
    """

    def __init__(self, use: ToolUse, statistics: DecodeStatistics) -> None:
        self._use, self._statistics = use, statistics
        self.paused: set[LiveResponse] = set()
        self._numbers = itertools.count()
        self._calling: dict[int, LiveResponse] = {}  # by number of the call
        self._new = False  # whether decoding has not yet waited for the newest call
        use.workers.forget()

    def find(self, response: LiveResponse, known: int) -> ToolCall | None:
        """Returns the call that a response completes after its first `known` tokens, or None."""
        if response.tool_calls == self._use.max_calls:
            return None
        return self._use.markup.find(response.tokens, response.turn_begin, known)

    def call(self, response: LiveResponse, call: ToolCall) -> None:
        """Pauses a response, and starts its call."""
        response.tool_calls += 1
        number = next(self._numbers)
        self.paused.add(response)
        self._calling[number] = response
        self._new = True
        self._use.workers.submit(number, call.name, self._use.tools[call.name], call.text)

    def drop(self, response: LiveResponse) -> None:
        """Ignores the answer that a response waits for, if any."""
        if response in self.paused:
            self.paused.remove(response)
            self._calling = {number: other for number, other in self._calling.items() if other != response}

    def answers(self, alone: bool, most_seconds: float | None = None) -> list[tuple[LiveResponse, list[int]]]:
        """Returns answers that have arrived, with their responses, and ends the pause of these.

        Args:
          alone: whether to wait for an answer, as no response can decode meanwhile.
          most_seconds: longest wait in that case; None for no limit.
        """
        if not self.paused:
            return []
        answered, statistics = [], self._statistics
        start = time.perf_counter()
        answers = self._use.workers.answers(most_seconds if alone else _PATIENCE if self._new else 0.0)
        statistics.tool_waiting_seconds += time.perf_counter() - start
        self._new = False
        for answer in answers:
            response = self._calling.pop(answer.key, None)
            if response is None:  # dropped
                continue
            self.paused.remove(response)
            answered.append((response, self._use.markup.answer_ids(answer.text)))
            statistics.tool_calls += 1
            statistics.tool_errors += answer.failed
            statistics.tool_seconds += answer.seconds
        return answered

    def answered(self, response: LiveResponse, begin: int, end: int) -> None:
        """Records that a response continues after an answer, its tokens `begin` to `end`."""
        response.tool_answers.append((begin, end))
        self._statistics.tool_tokens += end - begin


def tool_metrics(statistics: DecodeStatistics) -> dict[str, float]:
    """Returns the counts of tool calls in `statistics`, for the metrics line."""
    return {
        "tools/calls": statistics.tool_calls,
        "tools/errors": statistics.tool_errors,
        "tools/seconds": statistics.tool_seconds,
        "tools/tokens": statistics.tool_tokens,
        "tools/waiting_seconds": statistics.tool_waiting_seconds,
    }
