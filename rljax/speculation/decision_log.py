"""What the rollout manager decided, why, and what came of it: for the report of a run."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from rljax.speculation.choices import Choice

PLAIN = "plain"
MOST_DEPTHS = 32
"""That are told apart; what is deeper counts as the last of them."""


@dataclasses.dataclass
class Decision:
    """The same choice, several times in a row.

    Attributes:
      at: seconds from the beginning of the rollout to that of the first of them, drafting included.
      batch: slots of the state.
      responses: that decoded, at the first of them.
      drafter: whose drafts were verified; "plain" for plain steps.
      rows: of the pass; 0 for plain steps.
      reason: of the first.
      visits: how often in a row.
      turns: of responses: how many decoded, summed over the visits.
      tokens: that came of it.
      seconds: that it took, drafting included.
      expected: tokens that were promised for that time; 0 where nothing was.
      plain: tokens that plain decoding promised for that time; 0 where nothing is known of it.
      verified: draft nodes that were verified, by depth from 1 on.
      accepted: those of them that a token came from.
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


class DecisionLog:
    """The decisions of one step's rollouts."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []
        self._last: tuple[Any, ...] = ()  # what the newest decision and the next one must share to be one
        self.begin()

    def begin(self) -> None:
        """A rollout begins."""
        self._began, self._at, self._last = time.perf_counter(), 0.0, ()

    def add(
        self,
        choice: Choice,
        batch: int,
        responses: int,
        tokens: int,
        seconds: float,
        verified: Sequence[int] = (),
        accepted: Sequence[int] = (),
    ) -> None:
        """A choice was just carried out.

        Args:
          choice: it.
          batch: slots of the state.
          responses: that decoded.
          tokens: that came of it.
          seconds: of its passes alone.
          verified, accepted: nodes of each depth from 1 on.
        """
        drafter = PLAIN if choice.proposal is None else choice.proposal.name
        seconds += choice.seconds
        # Sums of promises mean something only where each of them is one.
        shared = (batch, drafter, choice.rows, choice.expected > 0, choice.plain > 0)
        if shared != self._last:
            # The time of a pass may be an estimate; what comes later begins later all the same.
            self._at = max(time.perf_counter() - self._began - seconds, self._at)
            self._decisions.append(Decision(self._at, batch, responses, drafter, choice.rows, choice.reason))
            self._last = shared
        last = self._decisions[-1]
        last.visits += 1
        last.turns += responses
        last.tokens += tokens
        last.seconds += seconds
        last.expected += choice.expected * seconds
        last.plain += choice.plain * seconds
        _add_depths(last.verified, verified)
        _add_depths(last.accepted, accepted)

    def take(self) -> list[dict[str, Any]]:
        """What was decided since the last time, in order, as JSON can hold it."""
        taken, self._decisions, self._last = self._decisions, [], ()
        return [dataclasses.asdict(decision) for decision in taken]


def _add_depths(into: list[int], counts: Sequence[int]) -> None:
    into.extend([0] * (min(len(counts), MOST_DEPTHS) - len(into)))
    for depth, count in enumerate(counts):
        into[min(depth, MOST_DEPTHS - 1)] += count
