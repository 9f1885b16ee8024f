"""Drafting by a given strategy, for managers that choose among strategies."""

import dataclasses
import itertools
import time
from typing import Self

import numpy as np

from rljax.config.speculation_keys import SpeculationKeys
from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.errors import ConfigError
from rljax.processes import agree
from rljax.requests import DecodeStatistics
from rljax.speculation.managers.manager import Setup
from rljax.speculation.pass_choice import Candidates, Choice
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposal, Proposer
from rljax.speculation.strategies import Strategy, parse_strategies


def strategies_of(setup: Setup, config: SpeculationKeys) -> tuple[Strategy, ...]:
    """The strategies of a config. Drafters on the host can draft all of them.

    Raises:
      ConfigError: they are invalid, or their drafters cannot draft them.
    """
    proposers, max_drafts = setup.proposers, setup.buckets.max_drafts
    strategies = parse_strategies(config.strategies, [proposer.name for proposer in proposers], max_drafts)
    for strategy, proposer in itertools.product(strategies, proposers):
        if proposer.name not in strategy.drafters:
            continue
        if proposer.only_chains and (strategy.depth > max_drafts or strategy.top_k > 1):
            raise ConfigError(
                f"speculation.strategies: {strategy}: {proposer.name} drafts chains, of up to"
                f" speculation.max_drafts {max_drafts} tokens; give it top_k 1 and no more depth"
            )
        if proposer.trees:
            offered = [(tree.depth, tree.top_k) for tree in proposer.trees]
            if (strategy.depth, strategy.top_k) not in offered:
                trees = ", ".join(f"{depth}/{top_k}" for depth, top_k in offered)
                raise ConfigError(
                    f"speculation.strategies: {strategy}: {proposer.name} is set up for trees of"
                    f" depth/top_k {trees}; see its arguments"
                )
    return strategies


def strategy_of(proposer: Proposer, window: int) -> Strategy:
    """The strategy that drafts about `window` tokens: a chain, a tree of any shape, or of the trees that the
    drafter has, the one whose depth is nearest.
    """
    if proposer.trees:
        tree = min(proposer.trees, key=lambda tree: abs(tree.depth - window))
        return Strategy(tree.depth, tree.top_k, min(tree.nodes, max(window, tree.depth)), proposer.name)
    return Strategy(window, 1 if proposer.only_chains else window, window, proposer.name)


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Drafts by a strategy.

    Attributes:
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
            usable, proposal.probability, active.current, active.inactive, seconds, active.ahead_weight
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
    """Drafts by a strategy, whatever that may yield. Consumes `state`."""
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
