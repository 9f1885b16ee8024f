"""Drafting by a given strategy, for managers that choose among strategies."""

import dataclasses
import time
from typing import Self

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.processes import agree
from rljax.requests import DecodeStatistics
from rljax.speculation.pass_choice import Candidates, Choice
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposal, Proposer
from rljax.speculation.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Drafts by a strategy.

    Attributes:
      proposal: the drafts.
      candidates: the nodes that the strategy verifies.
      rows: rows of the smallest pass that has room for them, or of the largest; 0 if there are none.
      seconds: time that drafting took, on the host or on the device.
    """

    proposal: Proposal
    candidates: Candidates
    rows: int
    seconds: float

    @classmethod
    def of(
        cls,
        proposal: Proposal,
        usable: np.ndarray,
        seconds: float,
        batch: int,
        active: ActiveSlots,
        buckets: Buckets,
    ) -> Self:
        """Drafts of which the nodes `usable`, bool [n, N], are to be verified; `batch` is the state's."""
        candidates = Candidates.from_nodes(
            usable, proposal.probability, active.current, active.standing_by, seconds, active.ahead_weight
        )
        rows = 0
        if usable.any():
            needed = len(active.slots) + int(usable.sum())
            sizes = [rows for rows, _ in buckets.passes(batch)]
            rows = next((rows for rows in sizes if rows >= needed), sizes[-1])
        return cls(proposal, candidates, rows, seconds)


def draft(
    proposer: Proposer,
    strategy: Strategy,
    state: DecodeState,
    active: ActiveSlots,
    statistics: DecodeStatistics,
    buckets: Buckets,
) -> tuple[DecodeState, Drafted]:
    """Drafts by a strategy, whatever that promises. Consumes `state`."""
    start = time.perf_counter()
    state, proposal = proposer.propose(state, active, statistics, strategy)
    usable = proposal.within(strategy)
    (seconds,) = agree(time.perf_counter() - start)
    return state, Drafted.of(proposal, usable, seconds, state.batch, active, buckets)


def verify_all(
    drafted: Drafted, state: DecodeState, buckets: Buckets, times: PassTimes, reason: str, plain_rate: float
) -> Choice:
    """Returns the choice to verify what was drafted, whether it pays or not; there must be drafts."""
    nodes = dict(buckets.passes(state.batch))[drafted.rows]
    seconds = times.verify(state.batch, state.cache.length, drafted.rows)
    return Choice.verify(
        drafted.proposal,
        drafted.candidates,
        drafted.rows,
        reason,
        expected_rate=drafted.candidates.rate(drafted.rows, nodes, seconds),
        plain_rate=plain_rate,
        draft_seconds=drafted.seconds,
    )
