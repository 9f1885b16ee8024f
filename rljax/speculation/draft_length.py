"""How far to draft before verifying, where drafting takes time.

Its length is chosen before anything is known of the tokens: the one that promises the most tokens per second,
from the share of drafts that were accepted so far and from what drafting and passes take. Where that is less
than plain decoding yields, nothing is drafted: EfficientRollout's toggle (section 3.2).
"""

import time
from collections.abc import Sequence

import numpy as np

from drafters.eagle.drafting import DraftStrategy
from rljax.engine.buckets import Buckets
from rljax.speculation.managers.papers.roofline import expected_tokens
from rljax.speculation.pass_choice import PassTimes

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

    def state(self) -> np.ndarray:
        """What a checkpoint keeps: float64 [2], drafts judged and accepted."""
        return np.asarray([self._judged, self._accepted], np.float64)

    def load_state(self, state: np.ndarray) -> None:
        """Takes up what `state` returned."""
        self._judged, self._accepted = map(float, state)


class WorthStarting:
    """Whether to begin drafting in a rollout, where that takes time: once it would have saved as much.

    Nobody knows how long a rollout goes on. So it is as with skis that can be rented or bought: who buys when
    the rents have come to the price never pays more than twice what was best.
    """

    def __init__(self) -> None:
        self._saved = self._saving = 0.0
        self._since = time.perf_counter()

    def allows(self, seconds: float, saving: float) -> bool:
        """Whether to begin now.

        Args:
          seconds: that beginning takes.
          saving: share of the time from now on that drafting is expected to save.
        """
        now = time.perf_counter()
        self._saved += self._saving * (now - self._since)
        self._saving, self._since = saving, now
        return self._saved >= seconds


def best_length(
    acceptance: float, slots: int, wanted: int, buckets: Buckets, times: PassTimes, batch: int, length: int
) -> tuple[int, float]:
    """Draft steps before the next pass, and the tokens per second that they promise; (0, 0) if none fit.

    Args:
      acceptance: of a draft whose predecessors were accepted.
      slots: that decode.
      wanted: of them, those whose tokens count.
      buckets: sizes of passes.
      times: what passes and draft steps take.
      batch, length: the shape of the state.
    """
    best, best_rate = 0, 0.0
    for rows, nodes in buckets.passes(batch):
        for chain in range(1, min(nodes, rows // slots - 1) + 1):
            seconds = chain * times[batch, length, DRAFT_STEP] + times[batch, length, rows]
            rate = wanted * expected_tokens(acceptance, chain) / seconds
            if rate > best_rate:
                best, best_rate = chain, rate
    return best, best_rate


def best_strategy(
    name: str,
    strategies: Sequence[DraftStrategy],
    acceptance: float,
    slots: int,
    wanted: int,
    buckets: Buckets,
    times: PassTimes,
    batch: int,
    length: int,
) -> tuple[DraftStrategy, float]:
    """Of a drafter's trees, the one that promises the most tokens per second, and how many.

    A tree of depth D is taken to be right at each level as often as such trees were so far, if it was above;
    the pass to have rows for the nodes of a level's best on the average, as many as it has levels.
    """
    best, best_rate = strategies[0], 0.0
    for strategy in strategies:
        drafting = times[batch, length, (name, strategy)]
        for rows, nodes in buckets.passes(batch):
            depth = min(strategy.depth, nodes, rows // slots - 1)
            rate = wanted * expected_tokens(acceptance, depth) / (drafting + times[batch, length, rows])
            if depth > 0 and rate > best_rate:
                best, best_rate = strategy, rate
    return best, best_rate
