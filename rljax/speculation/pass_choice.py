"""The manager's decision before a pass (`Choice`): the draft nodes to verify, or a plain step.

Before each pass the expected tokens per second of plain decoding and of every compiled number of rows are
compared, from

- how likely each node is to be accepted: the drafter's estimate, corrected by how often such nodes were
  accepted so far (`acceptance.py`);
- how long passes of each shape took so far (`pass_times.py`).

The rows of a pass go to the most likely nodes of all slots: requests compete for them. So a drafter that is
wrong, or a batch that is too large for verification to pay, costs little more than the asking.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import Proposal
from rljax.speculation.strategies import Arm

_LEAST_WEIGHT = 1e-6  # nodes of requests that are only sampled ahead take the room that is left at least


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The nodes that n slots could verify in a pass, N each.

    Attributes:
      probability: float [n, N], the probability of being accepted; 0 for invalid nodes. It does not increase
        along a row.
      current: bool [n], False for slots whose requests are only sampled ahead.
      inactive: slots with a current request that this pass leaves out and a plain step would compute.
      draft_seconds: time that drafting took. A sunk cost for a plain step, a recurring cost between passes.
      ahead_weight: the value of a token that is sampled ahead, as a share of a current one's; see
        `IdleSlots.weight`.
    """

    probability: np.ndarray
    current: np.ndarray
    inactive: int = 0
    draft_seconds: float = 0.0
    ahead_weight: float = 0.0

    @classmethod
    def from_nodes(
        cls,
        usable: np.ndarray,
        probability: np.ndarray,
        current: np.ndarray,
        inactive: int = 0,
        draft_seconds: float = 0.0,
        ahead_weight: float = 0.0,
    ) -> Self:
        """Candidates from a drafter's nodes: usable bool [n, N], and their probability, float [n, N]."""
        # A node's ancestors stand before it, so it is never more likely than those.
        falling = np.minimum.accumulate(np.where(usable, probability, 1.0), axis=1)
        return cls(np.where(usable, falling, 0.0), current, inactive, draft_seconds, ahead_weight)

    def expected(self, rows: int, nodes: int) -> float:
        """Expected tokens of current requests from a pass of so many rows; 0 if no node fits.

        Args:
          rows: rows of the pass, the slots' last tokens included.
          nodes: draft nodes of a slot at most.
        """
        room = rows - len(self.current)
        if room < 1:
            return 0.0
        if self.ahead_weight and not self.current.all():  # some of the room may go to other nodes
            taken = self.take(rows, nodes)[self.current]
            accepted = self.probability[self.current][taken].sum()
            return float(self.current.sum() + accepted) if accepted > 0 else 0.0
        likely = self.probability[self.current, :nodes].ravel()
        accepted = likely.sum() if likely.size <= room else np.partition(likely, -room)[-room:].sum()
        return float(self.current.sum() + accepted) if accepted > 0 else 0.0

    def value(self, rows: int, nodes: int) -> float:
        """As `expected`, with the tokens that the pass samples ahead by their weight."""
        if not self.ahead_weight or self.current.all():
            return self.expected(rows, nodes)
        accepted = (self._weighted() * self.take(rows, nodes)).sum()
        return float(self.plain_value - self.inactive + accepted) if accepted > 0 else 0.0

    @property
    def plain_value(self) -> float:
        """Tokens from a plain step, inactive slots included; those sampled ahead count by their weight."""
        current = int(self.current.sum())
        return current + self.inactive + self.ahead_weight * (len(self.current) - current)

    def _weighted(self) -> np.ndarray:
        """Expected value of each node, float [n, N]."""
        return np.where(self.current[:, None], self.probability, self.ahead_weight * self.probability)

    def rate(self, rows: int, nodes: int, seconds: float) -> float:
        """Expected tokens per second of such a pass, which takes `seconds`, and of drafting."""
        return self.expected(rows, nodes) / (self.draft_seconds + seconds)

    def take(self, rows: int, nodes: int) -> np.ndarray:
        """The nodes that this pass verifies, bool [n, N]. Valid nodes before a taken one are taken, too."""
        room = rows - len(self.current)
        weight = np.maximum(self._weighted(), _LEAST_WEIGHT * self.probability)
        weight[:, nodes:] = 0.0
        # Of equally likely nodes, those nearer to the root come first.
        order = np.argsort(-weight.T.ravel(), kind="stable")[: max(room, 0)]
        taken = np.zeros(weight.T.size, bool)
        taken[order] = True
        return taken.reshape(weight.T.shape).T & (weight > 0)


RowsChoice = Callable[[Candidates, Buckets, PassTimes, int, int], int]
"""Chooses the rows of a pass, 0 for a plain step; arguments and result as of `best_rows`."""


def best_rows(candidates: Candidates, buckets: Buckets, times: PassTimes, batch: int, length: int) -> int:
    """Rows of the pass that is expected to yield the most tokens per second; 0 is a plain step.

    Tokens that are sampled ahead count by their weight.

    Between passes, the time of drafting counts: leaving out half of an expensive draft would waste it.
    Against a plain step it does not count: it is spent already. A plain step whose time is old is measured.

    Args:
      candidates: nodes that could be verified.
      batch, length: batch and cache length of the decode state.
    """
    if times.plain_is_old(batch, length):
        return 0
    best, best_rate = 0, 0.0
    plain = candidates.plain_value / times.plain(batch, length)
    for rows, nodes in buckets.passes(batch):
        seconds = times.verify(batch, length, rows)
        value = candidates.value(rows, nodes)
        rate = value / (candidates.draft_seconds + seconds)
        if value / seconds > plain and rate > best_rate:
            best, best_rate = rows, rate
    return best


@dataclasses.dataclass(frozen=True)
class Choice:
    """The manager's decision about the next step. Made by `plain` or `verify`.

    Attributes:
      proposal: the drafts to verify; None for a plain step.
      candidates: the proposal's nodes that may be verified; None for a plain step.
      rows: rows of the pass; 0 for a plain step.
      reason: a sentence for the log.
      expected_rate: tokens per second expected of this choice, drafting included; 0 where nothing is known.
      plain_rate: tokens per second expected of plain decoding; 0 where nothing is known.
      arm: the arm of the bandit; None for its plain step, and for other managers.
      draft_seconds: time that drafting took, whether the drafts are verified or not.
      events: sentences for the log on what begins or ends with this choice.
    """

    proposal: Proposal | None
    candidates: Candidates | None
    rows: int
    reason: str
    expected_rate: float
    plain_rate: float
    arm: Arm = None
    draft_seconds: float = 0.0
    events: Sequence[str] = ()

    @classmethod
    def plain(
        cls,
        reason: str,
        plain_rate: float,
        *,
        expected_rate: float | None = None,
        arm: Arm = None,
        draft_seconds: float = 0.0,
        events: Sequence[str] = (),
    ) -> Self:
        """A plain step. Expects `plain_rate`, unless the manager expects something else of its arm."""
        expected = plain_rate if expected_rate is None else expected_rate
        return cls(None, None, 0, reason, expected, plain_rate, arm, draft_seconds, events)

    @classmethod
    def verify(
        cls,
        proposal: Proposal,
        candidates: Candidates,
        rows: int,
        reason: str,
        *,
        expected_rate: float,
        plain_rate: float,
        arm: Arm = None,
        draft_seconds: float = 0.0,
        events: Sequence[str] = (),
    ) -> Self:
        """A pass of `rows` rows over the likeliest candidates of a proposal."""
        return cls(proposal, candidates, rows, reason, expected_rate, plain_rate, arm, draft_seconds, events)
