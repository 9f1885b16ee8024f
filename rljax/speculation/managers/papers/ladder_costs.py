"""The draft ladder and predictions of passes, from measured times."""

from collections.abc import Mapping, Sequence

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.managers.papers.draft_ladder import Costs, DraftCost, Ladder, profile
from rljax.speculation.managers.papers.pass_plan import PassEstimate
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposer

_ACCEPTANCES = np.linspace(0.0, 1.0, 41)


class LadderCosts:
    """What drafting and passes take, as it was measured before a rollout.

    Args:
      proposers: the drafters, by name.
      buckets: sizes of passes.
      times: measured times.
      max_batch: the largest batch that verifies.
    """

    def __init__(
        self, proposers: Mapping[str, Proposer], buckets: Buckets, times: PassTimes, max_batch: int
    ) -> None:
        self._proposers, self._buckets, self._times, self._max_batch = proposers, buckets, times, max_batch
        self.begin()

    def begin(self) -> None:
        """A rollout begins: all is read from the measured times once more."""
        self._costs: dict[int, Costs] = {}  # by cache length
        self._ladders: dict[int, Ladder] = {}
        self._passes: dict[tuple[int, int], list[tuple[int, int, float]]] = {}  # by batch and cache length

    def ladder(self, length: int) -> Ladder:
        """The draft ladder for caches of a length."""
        if length not in self._ladders:
            self._ladders[length] = profile(self._costs_of(length), _ACCEPTANCES)
        return self._ladders[length]

    def estimate(self, batch: int, length: int, active: ActiveSlots) -> PassEstimate:
        """Predictions for the next pass over a state of this batch and cache length."""
        if (batch, length) not in self._passes:
            self._passes[batch, length] = [
                (rows, nodes, self._times.verify(batch, length, rows))
                for rows, nodes in self._buckets.passes(batch)
            ]
        costs = self._costs_of(length)
        drafting = {name: cost.seconds(batch) for name, cost in costs.drafters.items()}
        passes = self._passes[batch, length]
        return PassEstimate(costs.plain[batch], passes, drafting, active.current, active.standing_by)

    def remaining_speedup(self, length: int, active: ActiveSlots) -> float:
        """Share of a speed-up that is left where other slots stand by: a plain step serves all of them."""
        slots, both = len(active.slots), len(active.slots) + active.standing_by
        plain = [self._times.plain(self._buckets.batch_for(n), length) for n in (slots, both)]
        return slots / both * plain[1] / plain[0] if slots < both else 1.0

    def _costs_of(self, length: int) -> Costs:
        if length not in self._costs:
            batches = self._buckets.verified_batches(self._max_batch)
            verification: dict[int, float] = {}
            for batch in batches:
                for rows, _ in self._buckets.passes(batch):
                    seconds = self._times.verify(batch, length, rows)
                    verification[rows] = max(seconds, verification.get(rows, 0.0))
            plain = {batch: self._times.plain(batch, length) for batch in batches}
            drafters = {
                name: _draft_cost(proposer, self._times, length, batches)
                for name, proposer in self._proposers.items()
            }
            self._costs[length] = Costs(drafters, plain, verification, self._buckets.max_drafts)
        return self._costs[length]


def _draft_cost(proposer: Proposer, times: PassTimes, length: int, batches: Sequence[int]) -> DraftCost:
    """Seconds of drafting one token for every response: a line through the measured batches."""
    if isinstance(proposer, SelfProposer):
        seconds = [times.draft(batch, length, proposer.name) for batch in batches]
    elif isinstance(proposer, DeviceProposer):
        strategies = proposer.drafter.strategies
        seconds = [
            min(times.draft(batch, length, proposer.name, tree) / tree.depth for tree in strategies)
            for batch in batches
        ]
    else:  # drafting on the host costs next to nothing
        return DraftCost(0.0, 0.0)
    if len(seconds) == 1:
        return DraftCost(seconds[0], 0.0)
    slope, fixed = np.polyfit(batches, seconds, 1)
    slope = max(float(slope), 0.0)
    return DraftCost(max(float(fixed), 0.0) if slope else float(np.mean(seconds)), slope)
