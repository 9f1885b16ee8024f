"""What a manager decides before every step, and what the speculator expects of it."""

import dataclasses
from typing import Protocol

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.rollout.pass_choice import Candidates
from rljax.rollout.proposers import ActiveSlots, Proposal
from rljax.rollout.records import DecodeStatistics
from rljax.rollout.strategies import Arm


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

    def begin(self) -> None:
        """A rollout begins, with weights that have moved."""

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        """Drafts where that pays. Consumes `state`."""

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        """What came of a choice in a state of `batch`: tokens of so many responses, and its passes' time."""

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes up its own part of what `state` returned, and returns the rest."""


def smallest_pass(buckets: Buckets, batch: int, wanted: int) -> int:
    """Rows of the smallest pass over a batch that has room for so many nodes, or of the largest."""
    sizes = [rows for rows, _ in buckets.passes(batch)]
    return next((rows for rows in sizes if rows >= wanted), sizes[-1])
