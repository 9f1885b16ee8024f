"""How long passes of each shape took so far (`PassTimes`), and when the device works (`DeviceClock`)."""

import collections
import math
import statistics
import time

import numpy as np

from rljax.engine.draft_tree import DraftStrategy
from rljax.processes import copied_from_first
from rljax.requests import DecodeStatistics

_TIMES_KEPT = 9
_UNKNOWN = 0.01  # seconds of a plain step before anything was measured
_PASSES_UNTIL_OLD = 32, 1024  # verifying passes after which a plain step's time is old: at first, and at most


class PassTimes:
    """Seconds by the shape of the decode state: medians of the last measurements.

    A shape that was never measured has the time of its measured neighbours. The estimate is an optimistic
    one, because a pass is measured only once it is chosen: a pass that nothing is known of takes as long as
    a plain step, and drafting half of it. Batch and cache length are the buckets of the state.

    While passes verify, nothing tells that a plain step is faster than it was. So its time grows old with
    them, and is replaced by the next one that is measured.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple, collections.deque[float]] = {}
        self._passes: collections.Counter[tuple[int, int]] = collections.Counter()  # since a plain step
        self._measured_anew: collections.Counter[tuple[int, int]] = collections.Counter()  # plain steps

    def has_plain(self, batch: int, length: int) -> bool:
        """Whether a plain step over this shape was measured."""
        return ("plain", batch, length) in self._seconds

    def has_verify(self, batch: int, length: int, rows: int) -> bool:
        """Whether a verifying pass of this shape was measured."""
        return ("verify", batch, length, rows) in self._seconds

    def plain(self, batch: int, length: int) -> float:
        """Seconds of a plain step."""
        if self.has_plain(batch, length):
            return self._median("plain", batch, length)
        shape = self._nearest("plain", batch, length)
        if shape is not None:
            return self._median("plain", *shape)
        shape = self._nearest("verify", batch, length)
        if shape is not None:
            return min(self._by_rows(*shape).values())
        return _UNKNOWN

    def verify(self, batch: int, length: int, rows: int) -> float:
        """Seconds of a verifying pass over `rows` rows."""
        if self.has_verify(batch, length, rows):
            return self._median("verify", batch, length, rows)
        # Between the measured passes of this shape, where a plain step has a row for every slot.
        by_rows = self._by_rows(batch, length)
        if not by_rows and (shape := self._nearest("verify", batch, length)) is not None:
            by_rows = self._by_rows(*shape)
        by_rows.setdefault(batch, self.plain(batch, length))
        measured = sorted(by_rows)
        return float(np.interp(rows, measured, [by_rows[rows] for rows in measured]))

    def draft(self, batch: int, length: int, drafter: str, strategy: DraftStrategy | None = None) -> float:
        """Seconds of drafting: a tree of this strategy, or without one a step of a self-drafter."""
        if ("draft", batch, length, drafter, strategy) in self._seconds:
            return self._median("draft", batch, length, drafter, strategy)
        shape = self._nearest("draft", batch, length, drafter, strategy)
        if shape is not None:
            return self._median("draft", *shape, drafter, strategy)
        return self.plain(batch, length) / 2

    def plain_rate(self, responses: int, batch: int, length: int) -> float:
        """Tokens per second of plain steps over so many responses."""
        return responses / self.plain(batch, length)

    def plain_is_old(self, batch: int, length: int) -> bool:
        """Whether so many passes of this shape verified since a plain step was measured that it should be
        measured anew: after 32 at first, and after twice as many every time.
        """
        first, most = _PASSES_UNTIL_OLD
        return self._passes[batch, length] >= min(first * 2 ** self._measured_anew[batch, length], most)

    def add_plain(self, batch: int, length: int, seconds: float) -> None:
        """A plain step was measured."""
        if self.plain_is_old(batch, length):
            self._seconds.pop(("plain", batch, length), None)
            self._measured_anew[batch, length] += 1
        self._passes[batch, length] = 0
        self._add(seconds, "plain", batch, length)

    def add_verify(self, batch: int, length: int, rows: int, seconds: float | None) -> None:
        """A verifying pass was measured, with the work of the host for which the device waits; None for one
        whose time is not known.
        """
        self._passes[batch, length] += 1
        if seconds is not None:
            self._add(seconds, "verify", batch, length, rows)

    def add_draft(
        self, batch: int, length: int, drafter: str, seconds: float, strategy: DraftStrategy | None = None
    ) -> None:
        """Drafting was measured, see `draft`."""
        self._add(seconds, "draft", batch, length, drafter, strategy)

    def forget_passes(self, drafts: bool = False) -> None:
        """Forgets the times of plain steps and of verifying passes, and with `drafts` those of drafting: they
        are measured anew.
        """
        kept = {key: seconds for key, seconds in self._seconds.items() if key[0] == "draft"}
        self._seconds = {} if drafts else kept

    def agree(self) -> None:
        """Takes, in every process of the run, the times that process 0 has measured."""
        self._seconds = copied_from_first(lambda: self._seconds)

    def _nearest(self, kind: str, batch: int, length: int, *rest) -> tuple[int, int] | None:
        """The measured batch and cache length that are nearest in ratio; None if there are none.

        `rest` is the rest of the key, unless any would do.
        """
        shapes = {key[1:3] for key in self._seconds if key[0] == kind and (not rest or key[3:] == rest)}

        def distance(shape: tuple[int, int]) -> float:
            return abs(math.log(shape[0] / batch)) + abs(math.log(shape[1] / length))

        return min(sorted(shapes), key=distance, default=None)

    def _by_rows(self, batch: int, length: int) -> dict[int, float]:
        """Seconds of the measured verifying passes of a shape, by rows."""
        keys = [key for key in self._seconds if key[:3] == ("verify", batch, length)]
        return {key[3]: self._median(*key) for key in keys}

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
