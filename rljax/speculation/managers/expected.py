"""The default manager: verifies what is expected to yield the most tokens per second.

Drafters on the host are asked before every pass, since that is nearly free. Drafters that take time first
estimate their tokens per second, from the acceptance of their drafts so far and from measured times, and
draft only where that is clearly more than the best choice so far. Then plain decoding and every compiled
number of rows are compared.
The idea is EfficientRollout's toggle (section 3.2, Eq. 3), with measured times in place of a fitted roofline.
"""

import dataclasses

import numpy as np

from rljax.config.speculation_keys import SpeculationKeys
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.draft_length import MARGIN
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.mixing import Mixer, check_one_tree
from rljax.speculation.pass_choice import Candidates, Choice, RowsChoice, best_rows
from rljax.speculation.proposals import ActiveSlots, Proposal


class ExpectedManager(Manager):
    """Chooses what is expected to yield the most tokens per second.

    Args:
      setup: drafters, sizes and times.
      config: the keys. With `mix`, the drafts of several drafters are also verified as one tree, where
        more than one has drafted.
      choose_rows: chooses the rows of a pass over candidates; None for `best_rows`.
    """

    def __init__(self, setup: Setup, config: SpeculationKeys, choose_rows: RowsChoice | None = None) -> None:
        proposers, buckets = setup.proposers, setup.buckets
        self._proposers, self._buckets, self._times = proposers, buckets, setup.times
        self._mixer = None
        if config.mix and len(proposers) > 1:
            check_one_tree(proposers)
            self._mixer = Mixer(proposers, buckets.max_drafts)
        self._choose_rows = choose_rows or best_rows

    def begin(self, training: bool, step: int) -> None:
        if self._mixer is not None:
            self._mixer.forget()

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        shape = (state.batch, state.cache.length)
        plain_rate = self._times.plain_rate(active.responses, state.batch, state.cache.length)
        best = plain = Choice.plain("nothing is expected to yield more than a plain step", plain_rate)
        proposals: list[Proposal] = []
        draft_seconds = 0.0
        rates = [(proposer.expected_rate(shape, active), proposer) for proposer in self._proposers]
        # The highest rate first: drafters that cost nothing, then those from which clearly more is expected.
        for expected, proposer in sorted(rates, key=lambda pair: -pair[0]):
            if expected <= (1.0 + MARGIN) * best.expected_rate:
                continue
            state, proposal = proposer.propose(state, active, statistics)
            proposals.append(proposal)
            draft_seconds += proposal.seconds
            # Compare the best passes over every tree so far; each pays for all drafting.
            trees = list(proposals)
            if self._mixer is not None and len(proposals) > 1:
                trees.append(self._mixer.mix(proposals, len(active.slots)))
            passes = [self._best_pass(tree, shape, active, draft_seconds, plain_rate) for tree in trees]
            paying = [choice for choice in passes if choice is not None]
            best = max(paying, key=lambda choice: choice.expected_rate, default=plain)
        return state, dataclasses.replace(best, draft_seconds=draft_seconds)

    def _best_pass(
        self,
        proposal: Proposal,
        shape: tuple[int, int],
        active: ActiveSlots,
        draft_seconds: float,
        plain_rate: float,
    ) -> Choice | None:
        """The best pass over a proposal; None where none pays."""
        candidates = Candidates.from_nodes(
            proposal.usable,
            proposal.probability,
            active.current,
            active.inactive,
            draft_seconds,
            active.ahead_weight,
        )
        rows = self._choose_rows(candidates, self._buckets, self._times, *shape)
        if not rows:
            return None
        nodes = dict(self._buckets.passes(shape[0]))[rows]
        rate = candidates.rate(rows, nodes, self._times.verify(*shape, rows))
        reason = f"{proposal.name} is expected to yield {rate:.4g} tokens/s from {rows} rows"
        return Choice.verify(proposal, candidates, rows, reason, expected_rate=rate, plain_rate=plain_rate)

    def state(self) -> dict[str, np.ndarray]:
        return {} if self._mixer is None else self._mixer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state if self._mixer is None else self._mixer.load_state(state)
