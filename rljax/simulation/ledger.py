"""A ledger that counts tokens instead of keeping them.

Tokens of a simulated piece are a range of positions. So the coordinator runs as it is: lengths are the
lengths of ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import Key, Piece
from rljax.requests import PartialResponse

_NOTHING: Any = range(0)
_NO_TOKENS = PartialResponse()


@dataclasses.dataclass(slots=True)
class Count:
    """A response; see `rljax.cluster.ledger.Entry`."""

    version: int
    tokens: range = _NOTHING
    ending: str | None = None
    renewed: bool = False
    order: int = 0

    def takes(self, piece: Piece) -> bool:
        """Whether a piece is one of this response."""
        return piece.version == self.version

    def ordered(self, number: int) -> None:
        """A worker is told to go on with what is known."""
        self.order = number

    def partial(self) -> PartialResponse:
        """The response so far."""
        if not self.tokens:
            return _NO_TOKENS
        tokens: Any = self.tokens
        return PartialResponse(tokens, tokens)


class CountingLedger(Ledger):
    """The responses of the rollouts in progress, as `Ledger`, without what they say. A piece that leaves a
    gap is an error: a simulated network loses nothing.
    """

    def open(
        self,
        keys: Iterable[Key],
        version: int,
        renewed: bool = False,
        partials: Mapping[Key, PartialResponse] | None = None,
    ) -> None:
        entries: Any = self._entries
        entries.update((key, Count(version)) for key in keys)

    def add(self, worker: str, piece: Piece) -> int:
        entry: Any = self._entries[piece.key]
        known, end = len(entry.tokens), piece.begin + len(piece.tokens)
        if piece.begin > known:
            raise ValueError(f"request {piece.key}: tokens from {known} to {piece.begin} are missing")
        if entry.ending is not None and end > known:
            raise ValueError(f"request {piece.key} goes on behind its end")
        if end > known:
            entry.tokens = range(end)
            self.tokens += end - known
        if piece.ending is not None:
            entry.ending = piece.ending
        return max(end - known, 0)

    def has_gap(self, key: Key) -> bool:
        return False
