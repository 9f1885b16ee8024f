"""Draft trees from a drafter on the host."""

import numpy as np

from drafters.base import Queries
from drafters.validation import chains, usable_nodes
from rljax.engine.state import DecodeState
from rljax.errors import DrafterError
from rljax.requests import DecodeStatistics
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.proposals import ActiveSlots, Proposal, Proposer
from rljax.speculation.strategies import Strategy


class HostProposer(Proposer):
    """A `Proposer` for a drafter on the host, which compiles nothing and does not read the policy."""

    on_host = True

    def expected_rate(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        return float("inf")

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        # Ask for as many nodes as a pass verifies of one slot.
        width = self._engine.buckets.max_drafts
        budgets = np.full(len(active.slots), width, np.int32)
        queries = Queries(active.requests, active.positions, budgets, width)
        with drafter_call(self.name, "propose"):
            drafts = self.drafter.propose(queries)
        # Leave out invalid nodes, and count them.
        try:
            usable = usable_nodes(drafts, queries, self._engine.config.vocab_size)
        except ValueError as error:
            raise DrafterError(
                f"speculation.drafter {self.name}: propose returned no drafts: {error}"
            ) from error
        returned = np.arange(width) < np.minimum(drafts.counts, budgets)[:, None]
        statistics.unusable += int(returned.sum() - usable.sum())
        if self._engine.verification == "rejection":
            drafts, usable = chains(drafts, usable)
        return state, self._calibrated(drafts, usable)
