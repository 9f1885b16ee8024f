"""EfficientRollout's manager: plain steps until a roofline predicts that self-drafting pays, then only that.

EfficientRollout, section 3.2 (the toggle, `toggle.py`) and section 3.3 (the draft length, from one training
step to the next, `draft_length_schedule.py`). Measured with the quantized drafter on two cores
(docs/managers.md): 1.03 times plain decoding in the second epoch, where the default manager reaches 1.01.
"""

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.device_proposers import SelfProposer
from rljax.speculation.managers.papers.draft_length_schedule import DraftLengthSchedule
from rljax.speculation.managers.papers.toggle import Toggle
from rljax.speculation.pass_choice import Candidates, Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.strategies import Strategy


class RooflineManager:
    """Toggles between plain steps and chains of the self-drafter, at most once in a rollout.

    Args:
      proposer: the self-drafter's.
      buckets: sizes of passes.
      times: measured times of plain steps, for the promises in the log.
      toggle: predicts whether drafting pays.
      schedule: sets the draft length, by the acceptance of earlier training steps.
    """

    def __init__(
        self,
        proposer: SelfProposer,
        buckets: Buckets,
        times: PassTimes,
        toggle: Toggle,
        schedule: DraftLengthSchedule,
    ) -> None:
        self._proposer, self._buckets, self._times = proposer, buckets, times
        self._toggle, self._schedule = toggle, schedule
        self._training = False  # the last rollout was one of training
        self._step = -1  # the last training step
        self._counted = proposer.verified.copy()  # drafts verified and accepted, up to the last rollout
        self._step_drafts = np.zeros(2, np.int64)  # drafts verified and accepted in the last training step

    def begin(self, training: bool, step: int) -> None:
        self._count()
        if training and step != self._step:
            drafted, accepted = self._step_drafts.tolist()
            self._schedule.update(accepted / drafted if drafted else None)
            self._step_drafts, self._step = np.zeros(2, np.int64), step
        self._training = training
        self._toggle.begin(chain=self._schedule.length)

    def _count(self) -> None:
        """Adds the drafts of the rollout that is over to its step, if it was one of training."""
        if self._training:
            self._step_drafts = self._step_drafts + self._proposer.verified - self._counted
        self._counted = self._proposer.verified.copy()

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        # Ask the toggle.
        shape = (len(active.slots), state.cache.length, self._proposer.acceptance, active.standing_by)
        plain_rate = self._times.plain_rate(active.responses, state.batch, state.cache.length)
        on, reason = self._toggle(*shape)
        if not on:
            return state, Choice.plain(reason, plain_rate)
        # Draft as far as the schedule says and some pass has room for.
        sizes = self._buckets.passes(state.batch)
        room = max(min(nodes, rows // len(active.slots) - 1) for rows, nodes in sizes)
        length = min(self._schedule.length, room)
        if length < 1:
            return state, Choice.plain("no pass has room for a draft", plain_rate)
        strategy = Strategy(length, 1, length, self._proposer.name)
        state, proposal = self._proposer.propose(state, active, statistics, strategy)
        # Verify all of it, in the smallest pass that holds whole chains.
        candidates = Candidates.from_nodes(
            proposal.usable,
            proposal.probability,
            active.current,
            active.standing_by,
            ahead_weight=active.ahead_weight,
        )
        needed = len(active.slots) * (length + 1)
        rows = next(rows for rows, nodes in sizes if rows >= needed and nodes >= length)
        return state, Choice.verify(
            proposal,
            candidates,
            rows,
            reason,
            expected_rate=self._toggle.predicted(*shape) * plain_rate,
            plain_rate=plain_rate,
            draft_seconds=proposal.seconds,
        )

    def record(self, record: PassRecord) -> None:
        """Does nothing: the proposer counts what was accepted."""

    def state(self) -> dict[str, np.ndarray]:
        self._count()  # checkpoints are made between rollouts
        drafts = np.asarray([self._step, *self._step_drafts], np.int64)
        return self._schedule.state() | {"toggle_step": drafts}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._schedule.load_state(state)
        if "toggle_step" in state:
            self._step, *step_drafts = state["toggle_step"].tolist()
            self._step_drafts = np.asarray(step_drafts, np.int64)
        names = self.state().keys()
        return {name: array for name, array in state.items() if name not in names}
