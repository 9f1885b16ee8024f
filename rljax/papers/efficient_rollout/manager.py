"""EfficientRollout's manager: plain steps until a roofline predicts that drafting pays, then only that.

EfficientRollout, section 3.2 (the toggle, `toggle.py`) and section 3.3 (the draft length, from one training
step to the next, `draft_length_schedule.py`). The paper's drafter is the quantized policy. Others are gated
alike: the time of drafting is then what `PassTimes` measured, and nothing for drafters on the host.
Measured with the quantized drafter on two cores (docs/managers.md): 1.03 times plain decoding in the second
epoch, where the default manager reaches 1.01.
"""

from collections.abc import Callable

import numpy as np

from drafters.device import TrainedDrafter
from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.requests import DecodeStatistics
from rljax.speculation.acceptance import ChainAcceptance
from rljax.speculation.device_proposers import DeviceProposer, SelfProposer
from rljax.speculation.host_proposer import HostProposer
from rljax.speculation.managers.drafting import draft
from rljax.speculation.managers.papers.draft_length_schedule import DraftLengthSchedule, StepAcceptance
from rljax.speculation.managers.papers.toggle import Toggle
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposer
from rljax.speculation.strategies import Strategy


class RooflineManager:
    """Toggles between plain steps and the drafts of a drafter, at most once in a rollout.

    A drafter on the device drafts its tree whose depth is nearest to the draft length, of which as many nodes
    are verified as it has levels; one on the host drafts trees of as many nodes as the draft length.

    Args:
      proposer: the drafter's.
      buckets: sizes of passes.
      times: measured times of plain steps, for the promises in the log.
      toggle: predicts whether drafting pays.
      schedule: sets the draft length, by the acceptance of earlier training steps.
    """

    def __init__(
        self,
        proposer: Proposer,
        buckets: Buckets,
        times: PassTimes,
        toggle: Toggle,
        schedule: DraftLengthSchedule,
    ) -> None:
        self._proposer, self._buckets, self._times = proposer, buckets, times
        self._toggle, self._schedule = toggle, schedule
        self._training = False  # the last rollout was one of training
        self._step = -1  # the last training step
        self._step_acceptance = StepAcceptance()  # of the last training step
        self._length = schedule.length  # of the last drafts
        self._trained = proposer.drafter if isinstance(proposer.drafter, TrainedDrafter) else None
        self._on_host = isinstance(proposer, HostProposer)
        self._host_acceptance = ChainAcceptance()  # other proposers count it themselves

    def begin(self, training: bool, step: int) -> None:
        if training and step != self._step:
            self._schedule.update(self._step_acceptance.share(self._schedule.length))
            self._step_acceptance, self._step = StepAcceptance(), step
        self._training = training
        self._host_acceptance.forget()
        self._toggle.begin(chain=self._strategy(self._schedule.length).depth)

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        plain_rate = self._times.plain_rate(active.responses, state.batch, state.cache.length)
        if self._trained is not None and not self._trained.trained:
            return state, Choice.plain(f"{self._proposer.name} is not trained yet", plain_rate)
        # Ask the toggle.
        shape = (len(active.slots), state.cache.length, self._acceptance, active.standing_by)
        on, reason = self._toggle(*shape)
        if not on:
            return state, Choice.plain(reason, plain_rate)
        # Draft as far as the schedule says and some pass has room for.
        sizes = self._buckets.passes(state.batch)
        room = max((min(nodes, rows // len(active.slots) - 1) for rows, nodes in sizes), default=0)
        length = min(self._schedule.length, room)
        if length < 1:
            return state, Choice.plain("no pass has room for a draft", plain_rate)
        self._length, strategy = length, self._strategy(length)
        state, drafted = draft(self._proposer, strategy, state, active, statistics, self._buckets)
        rows = drafted.rows
        if isinstance(self._proposer, SelfProposer):
            # The smallest pass that holds whole chains.
            needed = len(active.slots) * (length + 1)
            rows = next(rows for rows, nodes in sizes if rows >= needed and nodes >= length)
        if not rows:
            self._host_acceptance.add(len(active.slots), 0)
            reason = f"{self._proposer.name} had nothing to verify ({reason})"
            return state, Choice.plain(reason, plain_rate, draft_seconds=drafted.seconds)
        return state, Choice.verify(
            drafted.proposal,
            drafted.candidates,
            rows,
            reason,
            expected_rate=self._toggle.predicted(*shape) * plain_rate,
            plain_rate=plain_rate,
            draft_seconds=drafted.seconds,
        )

    @property
    def _acceptance(self) -> float:
        """Probability that a draft is accepted, given that its predecessors are."""
        return self._host_acceptance.rate if self._on_host else self._proposer.acceptance

    def _strategy(self, length: int) -> Strategy:
        """The strategy of the drafter for a draft length."""
        name = self._proposer.name
        if isinstance(self._proposer, DeviceProposer):
            trees = self._proposer.drafter.strategies
            tree = min(trees, key=lambda tree: abs(tree.depth - length))
            return Strategy(tree.depth, tree.top_k, tree.depth, name)
        return Strategy(length, length if self._on_host else 1, length, name)

    def record(self, record: PassRecord) -> None:
        if record.nodes is None:
            return
        judged, accepted = judged_drafts(record)
        if self._training:
            self._step_acceptance.add(judged, accepted)
        if self._on_host:
            # A drafter on the host that knew nothing further brings no more tokens than if it had been wrong.
            offered = np.where(record.choice.candidates.probability > 0, record.choice.proposal.levels, 0)
            stopped = (accepted == offered.max(axis=1)) & (accepted < self._length) & (judged == accepted)
            self._host_acceptance.add(int((judged + stopped).sum()), int(accepted.sum()))

    def state(self) -> dict[str, np.ndarray]:
        step = {
            "toggle_step": np.asarray([self._step], np.int64),
            "toggle_acceptance": self._step_acceptance.state(),
        }
        if self._on_host:
            step["toggle_chains"] = self._host_acceptance.state()
        return self._schedule.state() | step

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._schedule.load_state(state)
        if "toggle_step" in state:
            self._step = int(state["toggle_step"][0])
        if "toggle_acceptance" in state:
            self._step_acceptance.load_state(state["toggle_acceptance"])
        if self._on_host and "toggle_chains" in state:
            self._host_acceptance.load_state(state["toggle_chains"])
        names = self.state().keys()
        return {name: array for name, array in state.items() if name not in names}


def judged_drafts(record: PassRecord) -> tuple[np.ndarray, np.ndarray]:
    """Levels of drafts of each slot that a verifying pass judged, and how many were right: int64 [n] each.

    A level is judged if the level above was right and the response went on behind that.
    """
    nodes = record.nodes
    kept = nodes.accepted.sum(axis=1)
    judged, taken = record.choice.proposal.judged(nodes.verified, nodes.correct)
    # Where a response ends with a right draft, its last token is not counted as accepted.
    return np.where(taken > kept, kept + 1, judged), np.minimum(taken, kept + 1)


def drafting_seconds(proposer: Proposer, times: PassTimes) -> Callable[[int, float, int], float] | None:
    """Seconds of drafting by batch, context and chain, as `Toggle` asks; None where the roofline has them."""
    if isinstance(proposer, SelfProposer):
        return None
    if not isinstance(proposer, DeviceProposer):
        return lambda batch, context, chain: 0.0  # drafting on the host costs next to nothing
    trees = proposer.drafter.strategies

    def seconds(batch: int, context: float, chain: int) -> float:
        tree = min(trees, key=lambda tree: abs(tree.depth - chain))
        return times.draft(batch, int(context), proposer.name, tree)

    return seconds
