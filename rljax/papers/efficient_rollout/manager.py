"""EfficientRollout's manager: plain steps until a roofline predicts that drafting pays, then only that.

EfficientRollout, section 3.2 (Eq. 3, the toggle) and section 3.3 (the draft length, from one training step to
the next, `draft_length.py`). With the seconds of a plain step, of a draft step and of a verifying pass,
speculation with chains of gamma drafts is predicted to be

    speed-up = tau * T_p / (gamma * T_q + T_V)

times as fast, where tau is the tokens that a slot gets from a pass. Large batches saturate the arithmetic,
and verifying is expensive; as responses end, it gets cheap.

The paper's drafter is the quantized policy. Others are gated alike: the time of drafting is then what
`PassTimes` measured, and nothing for drafters on the host. Measured with the quantized drafter on two cores
(docs/benchmarks.md): 1.03 times plain decoding in the second epoch, where the default manager reaches 1.01.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.papers.efficient_rollout import EfficientRolloutKeys
from rljax.papers.efficient_rollout.calibration import roofline_of
from rljax.papers.efficient_rollout.draft_length import DraftLengthSchedule, StepAcceptance
from rljax.papers.efficient_rollout.roofline import Roofline
from rljax.requests import DecodeStatistics
from rljax.speculation.acceptance import ChainAcceptance
from rljax.speculation.draft_length import MARGIN
from rljax.speculation.managers.drafting import draft, strategy_of
from rljax.speculation.managers.manager import Manager, Setup
from rljax.speculation.pass_choice import Choice
from rljax.speculation.pass_record import PassRecord
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.strategies import Strategy


class Verdict(NamedTuple):
    """Whether to speculate, and a sentence for the log that says why."""

    on: bool
    reason: str


class Toggle:
    """Speculation off until it is predicted to pay, then on until the rollout ends (Eq. 3, Algorithm 1).

    The active batch shrinks towards where speculation pays, so there is one moment to wait for, and no going
    back and forth where predictions are close.

    Args:
      roofline: predicts.
      buckets: the engine's, to which batch, context and rows are rounded up.
      chain: draft tokens of a slot, gamma.
      margin: by how much speculation must be predicted to be faster, epsilon.
      drafting: seconds of drafting chains, by batch, context and chain; None where the roofline predicts
      them.
    """

    def __init__(
        self,
        roofline: Roofline,
        buckets: Buckets,
        chain: int,
        margin: float = MARGIN,
        drafting: Callable[[int, int, int], float | None] = lambda *_: None,
    ) -> None:
        self.roofline, self.buckets, self.margin, self.drafting = roofline, buckets, margin, drafting
        self.begin(chain)

    def begin(self, chain: int) -> None:
        """A rollout begins, with speculation off and so many draft tokens of a slot."""
        self.chain = chain
        self._since: str | None = None

    def __call__(self, batch: int, mean_context: float, acceptance: float, inactive: int = 0) -> Verdict:
        """Whether to speculate now.

        Args:
          batch: active slots.
          mean_context: positions in their caches, any number in the right bucket.
          acceptance: measured probability that a draft is accepted, given that its predecessors are.
          inactive: further active slots, which a plain step computes and this pass leaves out.
        """
        if self._since is not None:
            return Verdict(True, self._since)
        speedup = self.predicted(batch, mean_context, acceptance, inactive)
        where = f"{batch + inactive} active at {mean_context:.0f} positions, acceptance {acceptance:.2f}"
        needed = f"predicted {speedup:.2f} times plain decoding, needed {1 + self.margin:.2f}"
        if speedup < 1.0 + self.margin:
            return Verdict(False, f"off: {where}: {needed}")
        self._since = f"on since {where}: {needed}"
        return Verdict(True, self._since)

    def predicted(self, batch: int, mean_context: float, acceptance: float, inactive: int = 0) -> float:
        """The predicted speed-up; 0 where no compiled pass has room for a draft. Arguments as above."""
        share = batch / (batch + inactive)  # the others get their tokens in another pass
        slots = self.buckets.batch_for(batch + inactive)
        context = self.buckets.cache_for(math.ceil(mean_context))
        chain, rows, attended = 0, 0, 0
        # The smallest pass with room for the chain, else the one with the most room.
        for size, nodes in self.buckets.passes(slots):
            room = min(nodes, size // batch - 1, self.chain)
            if room > chain:
                chain, rows, attended = room, size, slots * (nodes + 1)
        if not chain:
            return 0.0
        drafting = self.drafting(slots, context, chain)
        return share * self.roofline.speedup(slots, context, chain, acceptance, rows, attended, drafting)


class RooflineManager(Manager):
    """Toggles between plain steps and the drafts of a drafter, at most once in a rollout.

    A drafter on the device drafts its tree whose depth is nearest to the draft length, of which as many nodes
    are verified as it has levels; one on the host drafts trees of as many nodes as the draft length.

    Args:
      setup: the drafter, sizes and times; these for the promises in the log.
      config: the keys.
      roofline: predicts; None for the one that `scripts/calibrate.py` has fitted.

    Raises:
      ConfigError: nothing was fitted for this policy and device.
    """

    def __init__(self, setup: Setup, config: EfficientRolloutKeys, roofline: Roofline | None = None) -> None:
        (proposer,) = setup.proposers
        self._proposer, self._buckets, self._times = proposer, setup.buckets, setup.times
        self._schedule = DraftLengthSchedule(config.toggle, setup.buckets.max_drafts)
        if roofline is None:
            roofline = roofline_of(setup.engine, proposer.drafter, config.calibration_dir)
        length, margin = self._schedule.length, config.toggle.margin
        self._toggle = Toggle(roofline, setup.buckets, length, margin, self._drafting)
        self._training = False  # the last rollout was one of training
        self._step = -1  # the last training step
        self._step_acceptance = StepAcceptance()  # of the last training step
        self._length = self._schedule.length  # of the last drafts
        self._drafter_training = proposer.drafter.training
        self._host_acceptance = ChainAcceptance()  # other proposers count it themselves

    def begin(self, training: bool, step: int) -> None:
        if training and step != self._step:
            self._schedule.update(self._step_acceptance.share(self._schedule.length))
            self._step_acceptance, self._step = StepAcceptance(), step
        self._training = training
        self._host_acceptance.forget()
        self._toggle.begin(self._strategy(self._schedule.length).depth)

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        plain_rate = self._times.plain_rate(active.responses, state.batch, state.cache.length)
        if self._drafter_training is not None and not self._drafter_training.trained:
            return state, Choice.plain(f"{self._proposer.name} is not trained yet", plain_rate)
        # Ask the toggle.
        shape = (len(active.slots), state.cache.length, self._acceptance, active.inactive)
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
        if self._proposer.only_chains:
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
        return self._host_acceptance.rate if self._proposer.on_host else self._proposer.acceptance

    def _strategy(self, length: int) -> Strategy:
        """The strategy of the drafter for a draft length: as many nodes as levels."""
        strategy = strategy_of(self._proposer, length)
        return dataclasses.replace(strategy, nodes=strategy.depth)

    def _drafting(self, batch: int, context: int, chain: int) -> float | None:
        """Seconds of drafting chains; None for those of the self-drafter, which the roofline predicts."""
        if self._proposer.only_chains:
            return None
        if self._proposer.on_host:
            return 0.0  # drafting on the host costs next to nothing
        tree = min(self._proposer.trees, key=lambda tree: abs(tree.depth - chain))
        return self._times.draft(batch, context, self._proposer.name, tree)

    def record(self, record: PassRecord) -> None:
        if record.nodes is None:
            return
        # A level is scored if the level above was right and the response went on behind that. Where a
        # response ends with a right draft, its last token is not counted as accepted.
        kept = record.nodes.accepted.sum(axis=1)
        scored, taken = record.choice.proposal.scored(record.nodes.verified, record.nodes.correct)
        scored, accepted = np.where(taken > kept, kept + 1, scored), np.minimum(taken, kept + 1)
        if self._training:
            self._step_acceptance.add(scored, accepted)
        if self._proposer.on_host:
            # A drafter on the host that knew nothing further brings no more tokens than if it had been wrong.
            offered = np.where(record.choice.candidates.probability > 0, record.choice.proposal.levels, 0)
            stopped = (accepted == offered.max(axis=1)) & (accepted < self._length) & (scored == accepted)
            self._host_acceptance.add(int((scored + stopped).sum()), int(accepted.sum()))

    def state(self) -> dict[str, np.ndarray]:
        step = {
            "toggle_step": np.asarray([self._step], np.int64),
            "toggle_acceptance": self._step_acceptance.state(),
        }
        if self._proposer.on_host:
            step["toggle_chains"] = self._host_acceptance.state()
        return self._schedule.state() | step

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._schedule.load_state(state)
        if "toggle_step" in state:
            self._step = int(state["toggle_step"][0])
        if "toggle_acceptance" in state:
            self._step_acceptance.load_state(state["toggle_acceptance"])
        if self._proposer.on_host and "toggle_chains" in state:
            self._host_acceptance.load_state(state["toggle_chains"])
        names = self.state().keys()
        return {name: array for name, array in state.items() if name not in names}
