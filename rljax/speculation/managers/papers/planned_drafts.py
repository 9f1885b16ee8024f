"""Drafting by a plan that gives every slot its own drafters (`pass_plan.py`)."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.processes import agree
from rljax.requests import DecodeStatistics
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.managers.drafting import Drafted
from rljax.speculation.managers.papers.pass_plan import Entries
from rljax.speculation.mixing import Mixer
from rljax.speculation.proposals import ActiveSlots, Proposer
from rljax.speculation.strategies import Strategy


def draft_plan(
    plan: Sequence[Entries],
    proposers: Mapping[str, Proposer],
    mixer: Mixer,
    state: DecodeState,
    active: ActiveSlots,
    statistics: DecodeStatistics,
    buckets: Buckets,
) -> tuple[DecodeState, Drafted, dict[str, np.ndarray]]:
    """Asks the drafters of a plan, and no others. Consumes `state`.

    Drafts of several drafters for a slot are branches of one tree.

    Args:
      plan: drafters and windows of every active slot; at least one slot has a drafter.
      proposers: the drafters, by name.
      mixer: made for them.
      state: the decode state.
      active: the slots.
      statistics: the rollout's, to which the time of drafting is added.
      buckets: sizes of passes.

    Returns:
      The state, the drafts, and by drafter the slots that it had something for: bool [n].
    """
    start, proposals = time.perf_counter(), []
    for name, proposer in proposers.items():
        windows = np.asarray([_window(entries, name) for entries in plan])
        if windows.any():
            strategy = strategy_of(proposer, int(windows.max()))
            state, proposal = proposer.propose(state, active, statistics, strategy)
            kept = proposal.within(strategy)
            kept &= np.cumsum(kept, axis=1) <= windows[:, None]
            proposals.append(dataclasses.replace(proposal, usable=kept))
    proposal = proposals[0] if len(proposals) == 1 else mixer.mix(proposals, len(plan))
    (seconds,) = agree(time.perf_counter() - start)
    drafted = Drafted.of(proposal, proposal.usable, seconds, state.batch, active, buckets)
    return state, drafted, {each.name: each.usable.any(axis=1) for each in proposals}


def strategy_of(proposer: Proposer, window: int) -> Strategy:
    """The strategy that drafts about `window` tokens: a chain, a tree of any shape, or of the trees that the
    drafter has, the one whose depth is nearest.
    """
    if isinstance(proposer, DeviceProposer):
        tree = min(proposer.drafter.strategies, key=lambda tree: abs(tree.depth - window))
        return Strategy(tree.depth, tree.top_k, min(tree.nodes, max(window, tree.depth)), proposer.name)
    top_k = 1 if isinstance(proposer, SelfProposer) else window
    return Strategy(window, top_k, window, proposer.name)


def _window(entries: Entries, drafter: str) -> int:
    return sum(entry.window for entry in entries if entry.drafter == drafter)
