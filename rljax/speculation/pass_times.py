"""Measured times of plain steps, verifying passes and drafting."""

import collections
import statistics

from rljax.engine.draft_tree import DraftStrategy

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
