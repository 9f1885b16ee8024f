"""Draft lengths, where drafting takes time.

The length is chosen before anything is known of the tokens: the one with the most expected tokens per second,
from the share of drafts accepted so far and from the times of drafting and of passes. Where that is less than
plain decoding yields, nothing is drafted: EfficientRollout's toggle (section 3.2).
"""

import time
from collections.abc import Sequence

from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftStrategy
from rljax.processes import agree
from rljax.speculation.pass_times import PassTimes

MARGIN = 0.05
"""EfficientRollout's epsilon: by how much drafting must be expected to be faster."""


def expected_tokens(acceptance: float, chain: int) -> float:
    """Expected tokens of a slot from a pass over a chain, the token behind it included: the paper's tau
    (Leviathan et al., arXiv 2211.17192, equation 1).

    Args:
      acceptance: probability that a draft is accepted, given that its predecessors are.
      chain: draft tokens.
    """
    return sum(acceptance**depth for depth in range(chain + 1))


def expected_tokens_decoupled(acceptance: float, window: int) -> float:
    """As `expected_tokens`, where the next window is drafted while this one is verified: a rejection wastes
    that one, too, hence the half, and verification adds no token (SpecActor, section 4.1: tau_w).
    """
    partial = sum(acceptance**a * (1.0 - acceptance) * (a + 1) / 2 for a in range(window))
    return partial + window * acceptance**window


def window_tokens(acceptance: float, window: int, decoupled: bool) -> float:
    """Returns `expected_tokens`, or `expected_tokens_decoupled`."""
    return (expected_tokens_decoupled if decoupled else expected_tokens)(acceptance, window)


def window_seconds(drafting: float, verifying: float, decoupled: bool) -> float:
    """Returns the seconds of a window, from those of drafting and of verifying it: one after the other, or
    both at once, the next window and this one.
    """
    return max(drafting, verifying) if decoupled else drafting + verifying


class WorthStarting:
    """Whether to begin drafting in a rollout, where beginning takes time: once it would have saved as much.

    Nobody knows how long a rollout goes on. This is the ski rental problem: who buys skis when the rents have
    come to their price never pays more than twice the least that was possible.
    """

    def __init__(self) -> None:
        self._saved = self._saving = 0.0
        self._since = time.perf_counter()

    def allows(self, seconds: float, saving: float) -> bool:
        """Whether to begin now.

        Args:
          seconds: time that beginning takes.
          saving: share of the time from now on that drafting is expected to save.
        """
        now = time.perf_counter()
        passed, seconds = agree(now - self._since, seconds)
        self._saved += self._saving * passed
        self._saving, self._since = saving, now
        return self._saved >= seconds


def best_length(
    name: str,
    acceptance: float,
    slots: int,
    current: int,
    buckets: Buckets,
    times: PassTimes,
    batch: int,
    length: int,
) -> tuple[int, float]:
    """Draft steps before the next pass, and the tokens per second that they may yield; (0, 0.0) if none fit.

    Args:
      acceptance: probability that a draft is accepted, given that its predecessors are.
      slots: slots that decode.
      current: slots among them whose requests are not only sampled ahead.
      times: measured times of passes and of draft steps.
      batch, length: batch and cache length of the decode state.
    """
    best, best_rate = 0, 0.0
    for rows, nodes in buckets.passes(batch):
        for chain in range(1, min(nodes, rows // slots - 1) + 1):
            seconds = chain * times.draft(batch, length, name) + times.verify(batch, length, rows)
            rate = current * expected_tokens(acceptance, chain) / seconds
            if rate > best_rate:
                best, best_rate = chain, rate
    return best, best_rate


def best_strategy(
    name: str,
    strategies: Sequence[DraftStrategy],
    acceptance: float,
    slots: int,
    current: int,
    buckets: Buckets,
    times: PassTimes,
    batch: int,
    length: int,
) -> tuple[DraftStrategy, float]:
    """The tree of a drafter with the most expected tokens per second, and that rate.

    Two assumptions: a level is right as often as levels were so far, given that the level above is; and the
    pass has rows for the best nodes of as many levels as fit, one a level on average.

    Args:
      strategies: the trees that it can draft.
      acceptance, slots, current, buckets, times, batch, length: see `best_length`.
    """
    best, best_rate = strategies[0], 0.0
    for strategy in strategies:
        drafting = times.draft(batch, length, name, strategy)
        for rows, nodes in buckets.passes(batch):
            depth = min(strategy.depth, nodes, rows // slots - 1)
            tokens = current * expected_tokens(acceptance, depth)
            rate = tokens / (drafting + times.verify(batch, length, rows))
            if depth > 0 and rate > best_rate:
                best, best_rate = strategy, rate
    return best, best_rate
