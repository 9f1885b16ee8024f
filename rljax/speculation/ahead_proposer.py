"""Drafts of a drafter on devices of its own, which are ready when a pass begins, or nearly."""

import time

import numpy as np

from drafters.base import Drafts
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.device_proposers import DeviceProposer
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.proposals import ActiveSlots, Proposal, no_proposal
from rljax.speculation.strategies import Strategy


class AheadProposer(DeviceProposer):
    """A `Proposer` for chains that are drafted ahead (`AheadDrafting`).

    Its time of drafting is what the host waited for it. What a token takes, for the choice of the window, is
    measured where the host waited until drafts were there.
    """

    keeps_choice = True

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        shape, width = (state.batch, state.cache.length), self._engine.buckets.max_drafts
        if not self.is_ready(shape):
            return state, no_proposal(self, len(active.slots), width)
        start = time.perf_counter()
        ahead = self.slots.ahead
        with drafter_call(self.name, "take_drafts"):
            tokens, scores = ahead.take_drafts(active.slots, state.cache.length, width)
        seconds = time.perf_counter() - start
        tree = self.trees[-1]
        for each in ahead.step_seconds():
            self._add_draft(*shape, each * tree.depth, tree)
        statistics.draft_seconds += seconds
        usable = tokens >= 0
        parents = np.broadcast_to(np.arange(-1, width - 1, dtype=np.int32), tokens.shape)
        drafts = Drafts(np.maximum(tokens, 0), parents, scores, usable.sum(axis=1))
        return state, self._calibrated(drafts, usable, seconds)
