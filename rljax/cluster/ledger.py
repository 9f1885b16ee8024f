"""The ledger: every token that any worker has sampled in the rollouts in progress.

A token is a function of the run's seed, its request, its position, the tokens before it and the weights. So
pieces of responses may come twice, late, in any order and from any worker: what is known already must be the
same bits, and what is new is appended. Whoever goes on with a response begins behind what the ledger has.

A response that is `renewed` goes on under newer weights at a position that timing decides. So only pieces of
the last order to decode it are taken: what came of an earlier one may have gone on otherwise.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from rljax.cluster.messages import Key, Piece
from rljax.errors import NumericsError
from rljax.requests import Completion, PartialResponse

_NOTHING = PartialResponse()


@dataclasses.dataclass
class Entry:
    """A response.

    Attributes:
      version: version of the weights that it began with.
      renewed: whether it goes on under newer ones.
      order: number of the last order to decode it.
      tokens, logprobs: so far.
      versions: (position, version) where each version began.
      writers: (position, worker) where each worker's tokens begin.
      ending: reason of its end; None before.
      drafted, accepted: by the worker that ended it.
      answers: (begin, end) of tools' answers among the tokens.
    """

    version: int
    renewed: bool = False
    order: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    writers: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    ending: str | None = None
    drafted: int = 0
    accepted: int = 0
    ended_by: str = ""
    early: dict[tuple[int, str], Piece] = dataclasses.field(default_factory=dict)
    answers: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def writer(self, position: int) -> str:
        """The worker whose token at a position was taken."""
        return next(worker for begin, worker in reversed(self.writers) if begin <= position)

    def takes(self, piece: Piece) -> bool:
        """Whether a piece is of the version that this is sampled with, or of the last order to do so."""
        return piece.order == self.order if self.renewed else piece.version == self.version

    def ordered(self, number: int) -> None:
        """A worker is told to go on with what is known."""
        self.order = number
        if self.renewed:
            self.early.clear()

    def partial(self) -> PartialResponse:
        """The response so far, for a worker to go on with."""
        return PartialResponse(
            tuple(self.tokens), tuple(self.logprobs), tuple(self.answers), versions=tuple(self.versions)
        )

    def completion(self, with_mask: bool = False) -> Completion:
        """The ended response; `with_mask` as of `LiveResponse.completion`."""
        mask = np.ones(len(self.tokens), bool) if with_mask else None
        for begin, end in self.answers if with_mask else ():
            mask[begin:end] = False
        return Completion(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.logprobs, np.float32),
            self.ending,
            self.drafted,
            self.accepted,
            mask,
            versions=tuple(self.versions),
        )


class Ledger:
    """The responses of the rollouts in progress.

    Args:
      strict: whether tokens or logprobs that differ are an error; False counts them, and keeps those that
        came first.

    Attributes:
      differences: pieces that differed from what was known.
      tokens: of all responses so far.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict, self.differences, self.tokens = strict, 0, 0
        self._entries: dict[Key, Entry] = {}

    def open(
        self,
        keys: Iterable[Key],
        version: int,
        renewed: bool = False,
        partials: Mapping[Key, PartialResponse] | None = None,
    ) -> None:
        """Takes requests in, of which nothing is known but what is in `partials`."""
        for key in keys:
            known = (partials or {}).get(key, _NOTHING)
            self._entries[key] = Entry(
                version,
                renewed,
                tokens=list(known.tokens),
                logprobs=list(known.logprobs),
                answers=list(known.tool_answers),
                versions=list(known.versions),
                writers=[(0, "an earlier rollout")] if known.tokens else [],
            )

    def close(self, keys: Iterable[Key]) -> None:
        """Forgets requests."""
        for key in keys:
            del self._entries[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Entry:
        return self._entries[key]

    @property
    def entries(self) -> Mapping[Key, Entry]:
        return self._entries

    def add(self, worker: str, piece: Piece) -> int:
        """Takes a piece.

        Returns:
          The number of tokens by which the response has grown; 0 for what was known already, for a piece
          whose predecessor is missing (kept until that comes), and for one of another rollout or order.

        Raises:
          NumericsError: it differs from what is known.
        """
        entry = self._entries.get(piece.key)
        if entry is None or not entry.takes(piece):
            return 0
        if piece.begin > len(entry.tokens):
            entry.early[piece.begin, worker] = piece
            return 0
        grown = self._append(entry, worker, piece)
        while ready := [each for each in entry.early if each[0] <= len(entry.tokens)]:
            first = min(ready)
            grown += self._append(entry, first[1], entry.early.pop(first))
        return grown

    def has_gap(self, key: Key) -> bool:
        """Whether a later piece of a response has come, but not the next one."""
        return bool(self._entries[key].early)

    def _append(self, entry: Entry, worker: str, piece: Piece) -> int:
        known = len(entry.tokens)
        overlap = min(known - piece.begin, len(piece.tokens))
        for i in range(overlap):
            at = piece.begin + i
            if entry.tokens[at] != piece.tokens[i] or entry.logprobs[at] != piece.logprobs[i]:
                self._differs(entry, entry.writer(at), worker, piece, at)
                return 0
        end = piece.begin + len(piece.tokens)
        if entry.ending is not None and (end > known or piece.ending not in (None, entry.ending)):
            self._differs(entry, entry.ended_by, worker, piece, known)
            return 0
        if piece.ending is not None and end < known:
            self._differs(entry, entry.writer(known - 1), worker, piece, end)
            return 0
        new = len(piece.tokens) - overlap
        if new:
            if not entry.writers or entry.writers[-1][1] != worker:
                entry.writers.append((known, worker))
            if not entry.versions or entry.versions[-1][1] != piece.version:
                entry.versions.append((known, piece.version))
            entry.tokens += piece.tokens[overlap:]
            entry.logprobs += piece.logprobs[overlap:]
            entry.answers += [answer for answer in piece.answers if answer[0] >= known]
            self.tokens += new
        if piece.ending is not None and entry.ending is None:
            entry.ending, entry.ended_by = piece.ending, worker
            entry.drafted, entry.accepted = piece.drafted, piece.accepted
        return new

    def _differs(self, entry: Entry, first: str, second: str, piece: Piece, position: int) -> None:
        self.differences += 1
        if not self.strict:
            return
        raise NumericsError(
            f"cluster: workers {first} and {second} sampled different bits of one response, at token"
            f" {position} of request {piece.key}: their numerics differ although their fingerprints agree;"
            " use one kind of processor for all workers"
        )
