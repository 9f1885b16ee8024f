"""Draft trees from a drafter on the host."""

import numpy as np

from drafters.base import Drafter, Queries
from drafters.validation import chains, usable_nodes
from rljax.engine.engine import DecodeEngine
from rljax.engine.state import DecodeState
from rljax.errors import DrafterError
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics
from rljax.speculation.acceptance import NodeCalibration
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.proposals import (
    ActiveSlots,
    CompilationPlan,
    Proposal,
    bins_of,
    calibrated_proposal,
    restore,
)
from rljax.speculation.strategies import Strategy


class HostProposer:
    """A `Proposer` for a drafter on the host."""

    on_host, trees, only_chains = True, (), False

    def __init__(self, name: str, drafter: Drafter, engine: DecodeEngine) -> None:
        self.name, self.drafter, self._engine = name, drafter, engine
        self._calibration = NodeCalibration()

    def refresh(self, params: Params) -> None:
        """Does nothing: the drafter does not read the policy."""

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        """Does nothing: there is nothing to compile."""

    def compile_in_background(self, params: Params, plan: CompilationPlan) -> None:
        """Does nothing, as `warm_up`."""

    def is_ready(self, shape: tuple[int, int]) -> bool:
        return True

    def forget(self) -> None:
        self._calibration.forget()

    def expected_rate(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        return float("inf")

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        # Ask for as many nodes as a pass verifies of one slot.
        width = self._engine.buckets.max_drafts
        budgets = np.full(len(active.slots), width, np.int32)
        queries = Queries(active.requests, active.positions, budgets, width)
        with drafter_call(self.name, "propose"):
            drafts = self.drafter.propose(queries)
        # Leave out invalid nodes, and count them.
        try:
            usable = usable_nodes(drafts, queries, self._engine.config.vocab_size)
        except ValueError as error:
            raise DrafterError(
                f"speculation.drafter {self.name}: propose returned no drafts: {error}"
            ) from error
        returned = np.arange(width) < np.minimum(drafts.counts, budgets)[:, None]
        statistics.unusable += int(returned.sum() - usable.sum())
        if self._engine.verification == "rejection":
            drafts, usable = chains(drafts, usable)
        return state, calibrated_proposal(self, drafts, usable, self._calibration)

    def record_outcome(self, proposal: Proposal, verified: np.ndarray, correct: np.ndarray) -> None:
        self._calibration.add(bins_of(proposal, verified), correct[verified])

    def state(self) -> dict[str, np.ndarray]:
        return {f"calibration_of_{self.name}": self._calibration.state()}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return restore(state, {f"calibration_of_{self.name}": self._calibration.load_state})
