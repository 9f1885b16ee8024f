"""How long passes of each shape took so far (`PassTimes`), and when the device works (`DeviceClock`)."""

import collections
import statistics
import time

from rljax.engine.draft_tree import DraftStrategy
from rljax.requests import DecodeStatistics

_TIMES_KEPT = 9


class PassTimes:
    """Seconds by the shape of the decode state: medians of the last measurements.

    A shape that was never measured raises a KeyError. Batch and cache length are the buckets of the state.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple, collections.deque[float]] = {}

    def has_plain(self, batch: int, length: int) -> bool:
        """Whether a plain step over this shape was measured."""
        return ("plain", batch, length) in self._seconds

    def plain(self, batch: int, length: int) -> float:
        """Seconds of a plain step."""
        return self._median("plain", batch, length)

    def verify(self, batch: int, length: int, rows: int) -> float:
        """Seconds of a verifying pass over `rows` rows."""
        return self._median("verify", batch, length, rows)

    def draft(self, batch: int, length: int, drafter: str, strategy: DraftStrategy | None = None) -> float:
        """Seconds of drafting: a tree of this strategy, or without one a step of a self-drafter."""
        return self._median("draft", batch, length, drafter, strategy)

    def plain_rate(self, responses: int, batch: int, length: int) -> float:
        """Tokens per second of plain steps over so many responses."""
        return responses / self.plain(batch, length)

    def add_plain(self, batch: int, length: int, seconds: float) -> None:
        """A plain step was measured."""
        self._add(seconds, "plain", batch, length)

    def add_verify(self, batch: int, length: int, rows: int, seconds: float) -> None:
        """A verifying pass was measured."""
        self._add(seconds, "verify", batch, length, rows)

    def add_draft(
        self, batch: int, length: int, drafter: str, seconds: float, strategy: DraftStrategy | None = None
    ) -> None:
        """Drafting was measured, see `draft`."""
        self._add(seconds, "draft", batch, length, drafter, strategy)

    def _median(self, *key) -> float:
        return statistics.median(self._seconds[key])

    def _add(self, seconds: float, *key) -> None:
        self._seconds.setdefault(key, collections.deque(maxlen=_TIMES_KEPT)).append(seconds)


class DeviceClock:
    """Follows the device's work as the host sees it.

    Attributes:
      last_end: when the last work ended that the host waited for, by `time.perf_counter`.
    """

    def begin(self, statistics: DecodeStatistics) -> None:
        """A rollout begins; idle time is added to its statistics."""
        self._statistics = statistics
        self.last_end = self._busy_until = time.perf_counter()

    def dispatched(self, seconds: float = 0.0) -> float:
        """The device was given work for about so long. Returns the time of day.

        The time since its earlier work was over counts as idle.
        """
        now = time.perf_counter()
        self._statistics.idle_seconds += max(0.0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + seconds
        return now

    def host_waited(self) -> None:
        """Part of the time until now was the device's, for work that goes on."""
        self._busy_until = max(self._busy_until, time.perf_counter())

    def finished(self, still_busy: float = 0.0) -> float:
        """The host saw the end of a work. Returns the time of day.

        Args:
          still_busy: seconds that work behind it will take.
        """
        self.last_end = time.perf_counter()
        self._busy_until = self.last_end + still_busy
        return self.last_end
