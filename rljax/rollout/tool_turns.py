"""Responses that pause for a tool: ReTool's rollouts (Feng et al., arXiv 2504.11536), slot by slot.

A response that has completed a call pauses: its request keeps its slot and its KV cache, the tool works in a
thread, everybody else decodes. The answer's tokens are then appended (`rljax/engine/appending.py`), and the
response goes on where it was. Which answer comes first changes nothing but the time that it takes.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from rljax.requests import DecodeStatistics
from rljax.tools.markup import ToolCall
from rljax.tools.use import ToolUse

_PATIENCE = 0.002
"""Seconds that others wait for the answer to a new call: most tools are faster than a visit of the device."""


@dataclasses.dataclass
class _Turns:
    """What is known of one response.

    Attributes:
      begin: where the policy's own tokens since the last answer begin.
      calls: so far.
      answers: (begin, end) of each in the response.
    """

    begin: int = 0
    calls: int = 0
    answers: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class ToolTurns:
    """The calls of one rollout.

    Args:
      use: the tools.
      statistics: what the rollout accounts for itself in.

    Attributes:
      paused: requests that wait for an answer.
    """

    def __init__(self, use: ToolUse, statistics: DecodeStatistics) -> None:
        self._use, self._statistics = use, statistics
        self._turns: dict[int, _Turns] = {}
        self.paused: set[int] = set()
        self._new = False  # a call that nobody has waited for yet
        use.workers.forget()

    def begin(self, request: int) -> int:
        """Where the policy's own tokens since the last answer begin."""
        return self._of(request).begin

    def find(self, request: int, tokens: Sequence[int], known: int) -> ToolCall | None:
        """The call that a response completes behind its first `known` tokens."""
        turns = self._of(request)
        if turns.calls == self._use.max_calls:
            return None
        return self._use.markup.find(tokens, turns.begin, known)

    def call(self, request: int, call: ToolCall) -> None:
        """A response pauses for its call."""
        self._of(request).calls += 1
        self.paused.add(request)
        self._new = True
        self._use.workers.submit(request, call.name, self._use.tools[call.name], call.text)

    def answers(self, alone: bool) -> list[tuple[int, list[int]]]:
        """(request, tokens) of the answers that have come; these requests are not paused any more.

        Args:
          alone: nobody else could decode meanwhile: wait for one.
        """
        if not self.paused:
            return []
        found, statistics = [], self._statistics
        start = time.perf_counter()
        answers = self._use.workers.answers(None if alone else _PATIENCE if self._new else 0.0)
        statistics.tool_waiting_seconds += time.perf_counter() - start
        self._new = False
        for answer in answers:
            self.paused.remove(answer.key)
            found.append((answer.key, self._use.markup.answer_ids(answer.text)))
            statistics.tool_calls += 1
            statistics.tool_errors += answer.failed
            statistics.tool_seconds += answer.seconds
        return found

    def answered(self, request: int, begin: int, end: int) -> None:
        """A response goes on behind an answer, its tokens begin to end."""
        turns = self._of(request)
        turns.answers.append((begin, end))
        turns.begin = end
        self._statistics.tool_tokens += end - begin

    def own(self, request: int, tokens: int) -> np.ndarray:
        """Which of a response's tokens are the policy's own, bool [tokens]."""
        mask = np.ones(tokens, bool)
        for begin, end in self._of(request).answers:
            mask[begin:end] = False
        return mask

    def _of(self, request: int) -> _Turns:
        return self._turns.setdefault(request, _Turns())


def tool_metrics(statistics: DecodeStatistics) -> dict[str, float]:
    """What tools did in the rollouts of `statistics`, for the metrics line."""
    return {
        "tools/calls": statistics.tool_calls,
        "tools/errors": statistics.tool_errors,
        "tools/seconds": statistics.tool_seconds,
        "tools/tokens": statistics.tool_tokens,
        "tools/waiting_seconds": statistics.tool_waiting_seconds,
    }
