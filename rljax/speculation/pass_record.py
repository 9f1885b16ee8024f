"""The outcome of a choice (`PassRecord`), and the log of what was decided, why, and what came of it."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from rljax.engine.draft_tree import DraftTree
from rljax.engine.host_sync import DecodeResult
from rljax.speculation.pass_choice import Choice

PLAIN = "plain"
MOST_DEPTHS = 32
"""Depths that are counted apart; deeper nodes count as the last of them."""


@dataclasses.dataclass(frozen=True)
class VerifiedNodes:
    """The fate of the draft nodes of n slots in a pass: bool [n, N] each.

    Attributes:
      accepted: those of them that a token of the response came from.
      correct: those of them that were sampled. One more than accepted where a response ends: its last token
        is counted as the pass's own, yet the node that foretold it was right.
    """

    verified: np.ndarray
    accepted: np.ndarray
    correct: np.ndarray

    @classmethod
    def from_result(cls, result: DecodeResult, tree: DraftTree, slots: np.ndarray) -> Self:
        """Reads them off a pass over `tree`, for `slots`, int32 [n]."""
        path = result.path[slots]  # [n, N + 1], nodes along the accepted path; node 0 is the last token
        counts = (result.tokens[slots] >= 0).sum(axis=1, keepdims=True)
        accepted = _on_path(path, np.arange(1, tree.nodes + 2) <= counts)
        return cls(tree.valid[slots], accepted, _on_path(path, path >= 0))

    def by_depth(self, levels: np.ndarray) -> tuple[list[int], list[int]]:
        """Numbers of verified and of accepted nodes, by depth from 1 on. Levels as `Proposal.levels`."""
        levels = levels[:, : self.verified.shape[1]]
        verified, accepted = np.bincount(levels[self.verified]), np.bincount(levels[self.accepted])
        return verified.tolist()[1:], accepted.tolist()[1:]


def _on_path(path: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Draft nodes in the selected columns of paths: bool [n, N]; both arguments are [n, N + 1]."""
    nodes = np.zeros(path.shape, bool)
    np.put_along_axis(nodes, np.where(columns, path, 0), True, axis=1)
    return nodes[:, 1:]  # node 0 is the last token, not a draft


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """The outcome of a choice: one verifying pass, or a few plain steps in a row.

    Attributes:
      batch: slots of the decode state.
      responses: responses that decoded.
      tokens: tokens that they got.
      seconds: time of the forward passes, without drafting.
      inactive: further responses that waited for a verifying pass over half of the slots.
      requests: int32 [n], the request in each row of `nodes`; None for plain steps.
      nodes: the fate of the drafts; None for plain steps.
      verified_by_depth, accepted_by_depth: numbers of draft nodes, by depth from 1 on.
    """

    choice: Choice
    batch: int
    responses: int
    tokens: int
    seconds: float
    inactive: int = 0
    requests: np.ndarray | None = None
    nodes: VerifiedNodes | None = None
    verified_by_depth: Sequence[int] = ()
    accepted_by_depth: Sequence[int] = ()

    @property
    def waiting(self) -> int:
        """Responses that the passes held up: those that decoded, and inactive ones."""
        return self.responses + self.inactive


@dataclasses.dataclass
class Decision:
    """The same choice, several times in a row.

    Attributes:
      at: seconds from the beginning of the rollout to that of the first choice, drafting included.
      batch: slots of the decode state.
      responses: responses that decoded, at the first choice.
      drafter: the drafter whose drafts were verified; "plain" for plain steps.
      rows: rows of the pass; 0 for plain steps.
      reason: the reason of the first choice.
      visits: choices in a row; each is one verifying pass, or a few plain steps.
      turns: responses that decoded, summed over the visits.
      tokens: tokens sampled and kept.
      seconds: time taken, drafting included.
      expected: tokens that were expected in that time; 0 where nothing was.
      plain: tokens that plain decoding was expected to yield in that time; 0 where nothing is known of it.
      verified: draft nodes that were verified, by depth from 1 on.
      accepted: draft nodes among them that a token came from.
      events: sentences on what began or ended meanwhile: the ladder's races.
    """

    at: float
    batch: int
    responses: int
    drafter: str
    rows: int
    reason: str
    visits: int = 0
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    expected: float = 0.0
    plain: float = 0.0
    verified: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    events: list[str] = dataclasses.field(default_factory=list)


class DecisionLog:
    """The decisions of one step's rollouts."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []
        self._last: tuple[Any, ...] = ()  # a choice with the same values joins the newest decision
        self.begin()

    def begin(self) -> None:
        """A rollout begins."""
        self._began, self._at, self._last = time.perf_counter(), 0.0, ()

    def add(self, record: PassRecord) -> None:
        """A choice was carried out."""
        choice, batch, responses = record.choice, record.batch, record.responses
        drafter = PLAIN if choice.proposal is None else choice.proposal.name
        seconds = record.seconds + choice.draft_seconds
        # Promises are summed, which means something only if there is one in every summand.
        key = (batch, drafter, choice.rows, choice.expected_rate > 0, choice.plain_rate > 0)
        if key != self._last:
            # The time of a pass may be an estimate; yet a later decision never begins earlier.
            self._at = max(time.perf_counter() - self._began - seconds, self._at)
            self._decisions.append(Decision(self._at, batch, responses, drafter, choice.rows, choice.reason))
            self._last = key
        last = self._decisions[-1]
        last.visits += 1
        last.turns += responses
        last.tokens += record.tokens
        last.seconds += seconds
        last.expected += choice.expected_rate * seconds
        last.plain += choice.plain_rate * seconds
        last.events += choice.events
        _add_depths(last.verified, record.verified_by_depth)
        _add_depths(last.accepted, record.accepted_by_depth)

    def take(self) -> list[dict[str, Any]]:
        """The decisions since the last call, in order, as JSON can hold them."""
        taken, self._decisions, self._last = self._decisions, [], ()
        return [dataclasses.asdict(decision) for decision in taken]


def _add_depths(into: list[int], counts: Sequence[int]) -> None:
    """Adds numbers of nodes by depth, those beyond `MOST_DEPTHS` together."""
    into.extend([0] * (min(len(counts), MOST_DEPTHS) - len(into)))
    for depth, count in enumerate(counts):
        into[min(depth, MOST_DEPTHS - 1)] += count
