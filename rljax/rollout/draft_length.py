"""How long a chain the policy's self-drafter drafts before it is verified.

Every step of drafting costs time, so its length is chosen before anything is known of the tokens: the one
that promises the most tokens per second, from the share of drafts that were accepted so far and from what
draft steps and passes take. At length 0 decoding goes on plainly: EfficientRollout's toggle (section 3.2).
"""

from rljax.engine.buckets import Buckets
from rljax.rollout.pass_choice import PassTimes

DRAFT_STEP = -1
"""In the place of rows in the shape of a pass: a step of drafting."""

_PRIOR_ACCEPTANCE, _PRIOR_DRAFTS = 0.8, 16.0
_FORGET = 0.5


class ChainAcceptance:
    """How likely a draft is accepted whose predecessors are."""

    def __init__(self) -> None:
        self._judged = self._accepted = 0.0

    def forget(self) -> None:
        """Old counts weigh less: the policy has moved."""
        self._judged *= _FORGET
        self._accepted *= _FORGET

    def add(self, judged: int, accepted: int) -> None:
        """Drafts whose predecessors were accepted, and how many of them were, too."""
        self._judged += judged
        self._accepted += accepted

    @property
    def rate(self) -> float:
        return (self._accepted + _PRIOR_ACCEPTANCE * _PRIOR_DRAFTS) / (self._judged + _PRIOR_DRAFTS)


def best_length(
    acceptance: float, slots: int, wanted: int, buckets: Buckets, times: PassTimes, batch: int, length: int
) -> int:
    """Draft steps before the next pass; 0 for plain decoding.

    Args:
      acceptance: of a draft whose predecessors were accepted.
      slots: that decode.
      wanted: of them, those whose tokens count.
      buckets: sizes of passes.
      times: what passes and draft steps take.
      batch, length: the shape of the state.
    """
    best, best_rate = 0, wanted / times[batch, length, 0]
    for rows, nodes in buckets.passes(batch):
        steps = min(nodes, rows // slots - 1)
        if steps < 1:
            continue
        for chain in range(1, steps + 1):
            tokens = wanted * sum(acceptance**depth for depth in range(chain + 1))
            rate = tokens / (chain * times[batch, length, DRAFT_STEP] + times[batch, length, rows])
            if rate > best_rate:
                best, best_rate = chain, rate
    return best
