"""Which drafters draft for each slot of a pass, how far, and in how many rows.

A slot has one drafter or none; in a race (`races.py`) it has several, whose drafts are branches of
one tree. What a pass brings is predicted as by the draft ladder (`ladder.py`), but for drafters that
differ between slots: a drafter on the device takes its time for the whole pass, whoever has it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.speculation.draft_length import expected_tokens


@dataclasses.dataclass(frozen=True)
class Entry:
    """A drafter that drafts for a slot.

    Attributes:
      drafter: its name.
      acceptance: probability that one of its tokens is accepted, given that its predecessors are.
      window: draft tokens at most.
    """

    drafter: str
    acceptance: float
    window: int

    @property
    def tokens(self) -> float:
        """Draft tokens that are expected to be accepted: a + a^2 + ... + a^window."""
        return expected_tokens(self.acceptance, self.window) - 1.0


Entries = tuple[Entry, ...]
"""The drafters of one slot in a pass: none, its own, or those that race."""


@dataclasses.dataclass(frozen=True)
class PassEstimate:
    """Predicts tokens per second of a pass over n slots.

    Attributes:
      plain: seconds of a plain step.
      passes: rows of each compiled pass, draft nodes of a slot at most, and seconds; ascending, at least one.
      drafting: seconds of drafting one token for every slot, by drafter.
      current: bool [n], False for slots that are only sampled ahead: their tokens do not count.
      inactive: further responses that only a plain step would serve.
    """

    plain: float
    passes: Sequence[tuple[int, int, float]]
    drafting: Mapping[str, float]
    current: np.ndarray
    inactive: int = 0

    def rows(self, slots: Sequence[Entries]) -> int:
        """Rows of the smallest pass that holds all windows, or of the largest."""
        needed = _rows_needed(slots)
        return next((rows for rows, _, _ in self.passes if rows >= needed), self.passes[-1][0])

    def rate(self, slots: Sequence[Entries], rows: int | None = None) -> float:
        """Tokens of current requests per second of drafting and verifying.

        Where nobody drafts it is the rate of a plain step. Of drafters that race, the best counts.

        Args:
          slots: the drafters of each slot.
          rows: rows of the pass; None for those of `rows`.
        """
        if not any(slots):
            return float(self.current.sum() + self.inactive) / self.plain
        rows = self.rows(slots) if rows is None else rows
        (seconds,) = (seconds for size, _, seconds in self.passes if size == rows)
        windows: dict[str, int] = {}
        for entry in (entry for entries in slots for entry in entries):
            windows[entry.drafter] = max(entry.window, windows.get(entry.drafter, 0))
        seconds += sum(window * self.drafting[drafter] for drafter, window in windows.items())
        tokens = [1.0 + max((entry.tokens for entry in entries), default=0.0) for entries in slots]
        return float(np.asarray(tokens)[self.current].sum()) / seconds


def give_rows(
    alone: Sequence[Entries], wanted: Mapping[int, Entries], estimate: PassEstimate
) -> list[Entries]:
    """Gives slots what they want, in the rows that would be idle otherwise.

    Windows are shortened until they fit; a slot that has no row for each of its drafters keeps `alone`. A
    larger pass is taken only where it brings more tokens per second.

    Args:
      alone: drafters of every slot that come first.
      wanted: by slot, the drafters that it gets instead where there is room; the first slots first.
      estimate: predicts what a pass brings.
    """
    smallest = estimate.rows(alone)
    plans = [
        (rows, _fill(alone, wanted, rows, nodes)) for rows, nodes, _ in estimate.passes if rows >= smallest
    ]
    return max(plans, key=lambda plan: estimate.rate(plan[1], plan[0]))[1]


def plan_pass(
    alone: Sequence[Entries], wanted: Mapping[int, Entries], estimate: PassEstimate
) -> list[Entries]:
    """`give_rows`, without the single drafters among `wanted` that cost the pass more than they bring."""
    kept = dict(wanted)
    plan = give_rows(alone, kept, estimate)
    for slot in [slot for slot, entries in wanted.items() if len(entries) == 1]:
        others = {other: entries for other, entries in kept.items() if other != slot}
        without = give_rows(alone, others, estimate)
        if estimate.rate(without) >= estimate.rate(plan):
            kept, plan = others, without
    return plan


def _rows_needed(slots: Sequence[Entries]) -> int:
    return len(slots) + sum(map(_nodes, slots))


def _nodes(entries: Entries) -> int:
    return sum(entry.window for entry in entries)


def _fill(alone: Sequence[Entries], wanted: Mapping[int, Entries], rows: int, nodes: int) -> list[Entries]:
    """What slots get in a pass of so many rows, with so many draft nodes of a slot at most."""
    plan, idle = list(alone), max(rows - _rows_needed(alone), 0)
    for slot, entries in wanted.items():
        own = _nodes(alone[slot])
        fitted = _shorten(entries, min(own + idle, nodes))
        if fitted:
            plan[slot] = fitted
            idle -= max(_nodes(fitted) - own, 0)
    return plan


def _shorten(entries: Entries, room: int) -> Entries:
    """Shortens the longest windows until they fit; returns nothing if a drafter would have no node."""
    if room < len(entries):
        return ()
    windows = [entry.window for entry in entries]
    while sum(windows) > room:
        windows[windows.index(max(windows))] -= 1
    return tuple(
        dataclasses.replace(entry, window=window) for entry, window in zip(entries, windows, strict=True)
    )
