"""EfficientRollout's toggle: speculation is off until the roofline predicts that it pays.

EfficientRollout, section 3.2 (Eq. 3) and Algorithm 1 (appendix E.1). With the seconds of a plain step, of a
draft step and of a verifying pass, speculation with chains of gamma drafts is predicted to be

    speed-up = tau * T_p / (gamma * T_q + T_V)

times as fast, where tau is the tokens that a slot gets from a pass. Large batches saturate the arithmetic,
and verifying is expensive; as responses end, it gets cheap.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from rljax.engine.buckets import Buckets
from rljax.speculation.draft_length import MARGIN
from rljax.speculation.managers.papers.roofline import Roofline


class Verdict(NamedTuple):
    """Whether to speculate, and a sentence for the log that says why."""

    on: bool
    reason: str


class Toggle:
    """Speculation off until it is predicted to pay, then on until the rollout ends (Eq. 3, Algorithm 1).

    The active batch shrinks towards where speculation pays, so there is one moment to wait for, and no going
    back and forth where predictions are close.

    Args:
      roofline: predicts.
      chain: draft tokens of a slot, gamma.
      margin: by how much speculation must be predicted to be faster, epsilon.
      buckets: the engine's, to which batch, context and rows are rounded up. None does not round.
      drafting: seconds of drafting chains, by batch, context and chain, for drafters other than the quantized
        self-drafter. None for the roofline's prediction of that one.
    """

    def __init__(
        self,
        roofline: Roofline,
        chain: int,
        margin: float = MARGIN,
        buckets: Buckets | None = None,
        drafting: Callable[[int, float, int], float] | None = None,
    ) -> None:
        self.roofline, self.chain, self.margin = roofline, chain, margin
        self.buckets, self.drafting = buckets, drafting
        self.begin()

    def begin(self, chain: int | None = None) -> None:
        """A rollout begins, with speculation off.

        Args:
          chain: draft tokens of a slot from now on; None for as many as before.
        """
        self._since: str | None = None
        if chain is not None:
            self.chain = chain

    def __call__(self, batch: int, mean_context: float, acceptance: float, standing_by: int = 0) -> Verdict:
        """Whether to speculate now.

        Args:
          batch: active slots.
          mean_context: positions in their caches; with buckets, any number in the right bucket.
          acceptance: measured probability that a draft is accepted, given that its predecessors are.
          standing_by: further active slots, which a plain step computes and this pass leaves out.
        """
        if self._since is not None:
            return Verdict(True, self._since)
        speedup = self.predicted(batch, mean_context, acceptance, standing_by)
        where = f"{batch + standing_by} active at {mean_context:.0f} positions, acceptance {acceptance:.2f}"
        needed = f"predicted {speedup:.2f} times plain decoding, needed {1 + self.margin:.2f}"
        if speedup < 1.0 + self.margin:
            return Verdict(False, f"off: {where}: {needed}")
        self._since = f"on since {where}: {needed}"
        return Verdict(True, self._since)

    def predicted(self, batch: int, mean_context: float, acceptance: float, standing_by: int = 0) -> float:
        """The predicted speed-up; 0 where no compiled pass has room for a draft. Arguments as above."""
        share = batch / (batch + standing_by)  # the others get their tokens in another pass
        if self.buckets is None:
            slots = batch + standing_by
            rows = batch * (self.chain + 1)
            drafting = self._drafting(slots, mean_context, self.chain)
            shape = (slots, mean_context, self.chain)
            return share * self.roofline.speedup(*shape, acceptance, rows, drafting=drafting)
        slots = self.buckets.batch_for(batch + standing_by)
        context = self.buckets.cache_for(math.ceil(mean_context))
        chain, rows, attended = 0, 0, 0
        # The smallest pass with room for the chain, else the one with the most room.
        for size, nodes in self.buckets.passes(slots):
            room = min(nodes, size // batch - 1, self.chain)
            if room > chain:
                chain, rows, attended = room, size, slots * (nodes + 1)
        if not chain:
            return 0.0
        drafting = self._drafting(slots, context, chain)
        return share * self.roofline.speedup(slots, context, chain, acceptance, rows, attended, drafting)

    def _drafting(self, batch: int, context: float, chain: int) -> float | None:
        """Seconds of drafting; None where the roofline predicts them."""
        return None if self.drafting is None else self.drafting(batch, context, chain)
