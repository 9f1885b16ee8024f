"""The interface of rollout managers: before every pass, who drafts, how far, and how much of it is verified.

    ExpectedManager   `expected.py`, the default: what is expected to yield most tokens per second, from the
                      acceptance of such drafts so far and from measured times
    FixedManager      `fixed.py`: one strategy, always; the baseline of the others

Further ones, for comparison, are in `rljax/papers`. A manager decides only how much work a forward pass does,
never a token. `POLICIES` in `rljax/config/speculation.py` names all of them; a class is made as
`manager(setup, keys)`, with the config's keys of speculation.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposer

if TYPE_CHECKING:
    from rljax.engine.engine import DecodeEngine


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every manager is made from, besides the config's keys.

    Attributes:
      times: measured times of passes and of drafting.
      max_batch: larger batches decode plainly.
      engine: the decode engine; None where nothing is read of it.
    """

    proposers: Sequence[Proposer]
    buckets: Buckets
    times: PassTimes
    max_batch: int
    seed: int = 0
    engine: "DecodeEngine | None" = None


class Manager(Protocol):
    """Decides before every pass over a batch that may verify. Only `choose` has to be written."""

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
        return {}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restores the part of `state` that is this manager's, and returns the rest."""
        return state
