"""The interface of rollout managers: before every pass, who drafts, how far, and how much of it is verified.

    ExpectedManager   `expected.py`, the default: what promises the most tokens per second, from the
                      acceptance of such drafts so far and from measured times
    FixedManager      `fixed.py`: one strategy, always; the baseline of the others

In `papers/`, for comparison: `BanditManager` (TLT), `RooflineManager` (EfficientRollout) and `LadderManager`
(SpecActor). A manager decides only how much work a forward pass does, never a token.
"""

from typing import Protocol

import numpy as np

from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.proposals import ActiveSlots


class Manager(Protocol):
    """Decides before every pass over a batch that may verify."""

    def begin(self, training: bool, step: int) -> None:
        """A rollout begins, with weights that may have moved.

        Args:
          training: False for evaluation, whose acceptance says nothing of training.
          step: the training step; with dynamic sampling a step may have several rollouts.
        """

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        """Drafts where that pays, and decides what to verify. Consumes `state`."""

    def record(self, record: PassRecord) -> None:
        """Learns what came of a choice."""

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content."""

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is this manager's, and returns the rest."""
