"""What a manager decides before every step, and what the speculator expects of it."""

import dataclasses
import time
from typing import Protocol

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.rollout.records import DecodeStatistics
from rljax.speculation.pass_choice import Candidates, PassTimes, candidates, plain_rate
from rljax.speculation.proposers import ActiveSlots, Proposal, Proposer
from rljax.speculation.strategies import Arm, Strategy


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the next step does.

    Attributes:
      proposal: whose drafts are verified; None for a plain step.
      found: its nodes as candidates.
      rows: of the pass; 0 for a plain step.
      reason: why, for the log.
      expected: tokens per second that it promises, drafting included; 0 where nothing is promised.
      plain: that plain decoding promises.
      arm: of the bandit.
      seconds: that drafting took on the device, whether it is used or not.
    """

    proposal: Proposal | None
    found: Candidates | None
    rows: int
    reason: str
    expected: float
    plain: float
    arm: Arm = None
    seconds: float = 0.0


class Manager(Protocol):
    """Decides what the next step does."""

    def begin(self, training: bool, step: int) -> None:
        """A rollout begins, with weights that may have moved.

        Args:
          training: False where it is none of training, so that what is accepted in it says nothing of that.
          step: of training; with dynamic sampling a step may have several rollouts.
        """

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        """Drafts where that pays. Consumes `state`."""

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        """What came of a choice in a state of `batch`: tokens, and its passes' time, for which so many
        responses decoded or waited.
        """

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes up its own part of what `state` returned, and returns the rest."""


def plain_promise(times: PassTimes, state: DecodeState, active: ActiveSlots) -> float:
    """Wanted tokens per second of plain steps of a state, also of slots that this pass leaves out."""
    return plain_rate(int(active.wanted.sum()) + active.standing_by, times, state.batch, state.cache.length)


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What came of drafting by a strategy.

    Attributes:
      proposal: the drafts.
      found: those that the strategy verifies, as candidates.
      rows: of the smallest pass that has room for them, or of the largest; 0 if there is nothing to verify.
      seconds: that drafting took, on the host or on the device.
    """

    proposal: Proposal
    found: Candidates
    rows: int
    seconds: float


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
    found = candidates(usable, proposal.probability, active.wanted, active.standing_by)
    rows = 0
    if usable.any():
        wanted = len(active.slots) + int(usable.sum())
        sizes = [rows for rows, _ in buckets.passes(state.batch)]
        rows = next((rows for rows in sizes if rows >= wanted), sizes[-1])
    return state, Drafted(proposal, found, rows, time.perf_counter() - start)
