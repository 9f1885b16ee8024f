"""The adaptive rollout manager: before every pass, who drafts, how far, and how much of it is verified.

    Expected    what promises the most tokens per second, from how often such drafts were accepted and what
                drafting and passes took
    Bandit      TLT's BEG-MAB: the strategy that brought most when it was used (`papers/bandit.py`)
    Toggled     EfficientRollout's: the policy drafts for itself from where a roofline predicts that it pays
                (`papers/roofline.py`), as far as acceptance over steps says
                (`papers/draft_length_schedule.py`)
    Fixed       nothing to decide: one strategy, always; what the others are measured against
    Laddered    SpecActor's: the drafter that the draft ladder ranks first, others for stragglers
                (`papers/laddered.py`)

All decide only how much work a forward pass does, never a token.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from drafters.device import TrainedDrafter
from rljax.config.decoding import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.engine.state import DecodeState
from rljax.errors import ConfigError
from rljax.rollout.records import DecodeStatistics
from rljax.speculation.choices import Choice, Manager, draft, plain_promise
from rljax.speculation.managers.papers.bandit import BegMab
from rljax.speculation.managers.papers.draft_length_schedule import PatienceLadder
from rljax.speculation.managers.papers.laddered import Laddered
from rljax.speculation.managers.papers.roofline import MARGIN, Roofline, Toggle
from rljax.speculation.mixing import Mixer, pairs, proposer_of
from rljax.speculation.pass_choice import Candidates, PassTimes, candidates
from rljax.speculation.proposers import ActiveSlots, DeviceProposer, Proposal, Proposer, SelfProposer
from rljax.speculation.strategies import Strategy, arms_by_batch, parse_strategies, room_per_slot

_LADDER = (5, 7, 9, 11)  # EfficientRollout's draft lengths (section 4.1)


RowsChoice = Callable[[tuple[int, int], Candidates], int]
"""(batch and cache length, candidates) -> rows of the pass, 0 for a plain step."""


class Expected:
    """Chooses what promises the most tokens per second.

    Args:
      proposers: who can draft.
      buckets: sizes of passes.
      times: what passes and drafting take.
      mix: verify the drafts of several drafters as one tree, where more than one has drafted.
      rows: chooses the rows of a pass.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        buckets: Buckets,
        times: PassTimes,
        mix: bool,
        rows: RowsChoice,
    ) -> None:
        self._proposers, self._buckets, self._times = proposers, buckets, times
        self._mixer = Mixer(proposers, buckets.max_drafts) if mix and len(proposers) > 1 else None
        self._choose_rows = rows

    def begin(self, training: bool, step: int) -> None:
        if self._mixer is not None:
            self._mixer.forget()

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        shape = (state.batch, state.cache.length)
        plain = plain_promise(self._times, state, active)
        best = nothing = Choice(None, None, 0, "nothing promises more than a plain step", plain, plain)
        offered: list[Proposal] = []
        spent = 0.0
        promises = [(proposer.promise(shape, active), proposer) for proposer in self._proposers]
        # Those who cost nothing come first; who takes time is asked where clearly more is expected.
        for promise, proposer in sorted(promises, key=lambda each: -each[0]):
            if promise <= (1.0 + MARGIN) * best.expected:
                continue
            state, proposal = proposer.propose(state, active, statistics)
            offered.append(proposal)
            spent += proposal.seconds
            trees = list(offered)
            if self._mixer is not None and len(offered) > 1:
                trees.append(self._mixer.mix(offered, len(active.slots)))
            passes = [self._verifying(tree, shape, active, spent, plain) for tree in trees]
            worth = [each for each in passes if each is not None]
            best = max(worth, key=lambda each: each.expected, default=nothing)
        return state, dataclasses.replace(best, seconds=spent)

    def _verifying(
        self, proposal: Proposal, shape: tuple[int, int], active: ActiveSlots, spent: float, plain: float
    ) -> Choice | None:
        """The best pass over a proposal, with the time of all drafting; None where none pays."""
        found = candidates(proposal.usable, proposal.probability, active.wanted, active.standing_by, spent)
        rows = self._choose_rows(shape, found)
        if not rows:
            return None
        nodes = dict(self._buckets.passes(shape[0]))[rows]
        rate = found.expected(rows, nodes) / (spent + self._times[(*shape, rows)])
        reason = f"{proposal.name} promises {rate:.4g} tokens/s from {rows} rows"
        return Choice(proposal, found, rows, reason, rate, plain)

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        """Proposers are credited with what was accepted; there is nothing else to learn."""

    def state(self) -> dict[str, np.ndarray]:
        return {} if self._mixer is None else self._mixer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state if self._mixer is None else self._mixer.load_state(state)


class Bandit:
    """Chooses the strategy that has brought the most tokens per second of late.

    Args:
      proposers: who can draft.
      buckets: sizes of passes.
      strategies: what comes into question, of single drafters or of several whose trees are mixed; empty for
        `default_strategies`.
      mix: those of mixed trees, too.
      max_batch: larger batches decode plainly.
      epsilon, window, seed: see `BegMab`.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        buckets: Buckets,
        strategies: Sequence[Strategy],
        max_batch: int,
        epsilon: float,
        window: int,
        seed: int,
        mix: bool = False,
    ) -> None:
        self._buckets = buckets
        self._mixer = Mixer(proposers, buckets.max_drafts)
        if not strategies:
            room = room_per_slot(buckets, buckets.batch[0])
            each_way = [*proposers, *(pairs(proposers, self._mixer) if mix else ())]
            own = [proposer.default_strategies(room) for proposer in each_way] if room else []
            strategies = [*itertools.chain.from_iterable(own)]
        self._proposers = {each.drafter: proposer_of(each, proposers, self._mixer) for each in strategies}
        self._bandit = BegMab(arms_by_batch(strategies, buckets, max_batch), epsilon, window, seed)
        self._trained = [each for each in proposers if isinstance(each.drafter, TrainedDrafter)]

    def begin(self, training: bool, step: int) -> None:
        self._mixer.forget()  # the bandit's window forgets by itself

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        responses = len(active.slots) + active.standing_by  # they wait for this pass, too
        for proposer in self._trained:
            self._bandit.set_available(proposer.name, proposer.drafter.trained)
        arm = self._bandit.choose(state.batch, responses)
        _, reason, medians = self._bandit.explain(state.batch)
        promised, plain = medians.get(arm, 0.0), medians.get(None, 0.0)
        nothing = Choice(None, None, 0, reason, promised, plain, arm)
        if arm is None:
            return state, nothing
        proposer = self._proposers[arm.drafter]
        state, drafted = draft(proposer, arm, state, active, statistics, self._buckets)
        if not drafted.rows:
            reason = f"{arm.drafter} had nothing to verify ({reason})"
            return state, dataclasses.replace(nothing, reason=reason, seconds=drafted.seconds)
        choice = Choice(drafted.proposal, drafted.found, drafted.rows, reason, promised, plain, arm)
        return state, dataclasses.replace(choice, seconds=drafted.seconds)

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        self._bandit.record(batch, choice.arm, tokens, choice.seconds + seconds, responses)

    def state(self) -> dict[str, np.ndarray]:
        return self._bandit.state() | self._mixer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._mixer.load_state(self._bandit.load_state(state))


class Fixed:
    """One strategy, whether it pays or not.

    Args:
      proposers: who can draft.
      buckets: sizes of passes.
      times: what passes take, for what is promised.
      strategy: what is done before every pass.
    """

    def __init__(
        self, proposers: Sequence[Proposer], buckets: Buckets, times: PassTimes, strategy: Strategy
    ) -> None:
        self._proposer = proposer_of(strategy, proposers, Mixer(proposers, buckets.max_drafts))
        self._buckets, self._times, self._strategy = buckets, times, strategy

    def begin(self, training: bool, step: int) -> None:
        """Nothing is learned."""

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        state, drafted = draft(self._proposer, self._strategy, state, active, statistics, self._buckets)
        reason, plain = f"always {self._strategy}", plain_promise(self._times, state, active)
        if not drafted.rows:
            reason = f"{self._proposer.name} had nothing to verify ({reason})"
            return state, Choice(None, None, 0, reason, plain, plain, seconds=drafted.seconds)
        nodes = dict(self._buckets.passes(state.batch))[drafted.rows]
        seconds = drafted.seconds + self._times[(state.batch, state.cache.length, drafted.rows)]
        promised = drafted.found.expected(drafted.rows, nodes) / seconds
        choice = Choice(drafted.proposal, drafted.found, drafted.rows, reason, promised, plain)
        return state, dataclasses.replace(choice, seconds=drafted.seconds)

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        """There is nothing to choose."""

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state


class Toggled:
    """Plain steps until chains of the self-drafter are predicted to pay, then nothing but those.

    Args:
      proposer: of the self-drafter.
      buckets: sizes of passes.
      times: what plain steps take, for what is promised.
      toggle: predicts.
      ladder: how far is drafted, by the acceptance of the training steps before.
    """

    def __init__(
        self,
        proposer: SelfProposer,
        buckets: Buckets,
        times: PassTimes,
        toggle: Toggle,
        ladder: PatienceLadder,
    ) -> None:
        self._proposer, self._buckets, self._times = proposer, buckets, times
        self._toggle, self._ladder = toggle, ladder
        self._training, self._step = False, -1  # of the last rollout, of the last training step
        self._counted = proposer.verified.copy()  # drafts verified and accepted, up to the last rollout
        self._of_step = np.zeros(2, np.int64)  # those of the last training step

    def begin(self, training: bool, step: int) -> None:
        self._count()
        if training and step != self._step:
            drafted, accepted = self._of_step.tolist()
            self._ladder.update(accepted / drafted if drafted else None)
            self._of_step, self._step = np.zeros(2, np.int64), step
        self._training = training
        self._toggle.begin(chain=self._ladder.length)

    def _count(self) -> None:
        """What was drafted in the rollout that is over belongs to its step, if it was one of training."""
        if self._training:
            self._of_step = self._of_step + self._proposer.verified - self._counted
        self._counted = self._proposer.verified.copy()

    def choose(
        self, state: DecodeState, active: ActiveSlots, statistics: DecodeStatistics
    ) -> tuple[DecodeState, Choice]:
        acceptance = self._proposer.acceptance
        shape = (len(active.slots), state.cache.length, acceptance, active.standing_by)
        plain = plain_promise(self._times, state, active)
        on, reason = self._toggle(*shape)
        if not on:
            return state, Choice(None, None, 0, reason, plain, plain)
        sizes = self._buckets.passes(state.batch)
        room = max(min(nodes, rows // len(active.slots) - 1) for rows, nodes in sizes)
        length = min(self._ladder.length, room)
        if length < 1:
            return state, Choice(None, None, 0, "no pass has room for a draft", plain, plain)
        strategy = Strategy(self._proposer.name, length, 1, length)
        state, proposal = self._proposer.propose(state, active, statistics, strategy)
        found = candidates(proposal.usable, proposal.probability, active.wanted, active.standing_by)
        wanted = len(active.slots) * (length + 1)
        rows = next(rows for rows, nodes in sizes if rows >= wanted and nodes >= length)
        promised = self._toggle.predicted(*shape) * plain
        return state, Choice(proposal, found, rows, reason, promised, plain, seconds=proposal.seconds)

    def record(self, choice: Choice, batch: int, responses: int, tokens: int, seconds: float) -> None:
        """The proposer is credited with what was accepted."""

    def state(self) -> dict[str, np.ndarray]:
        self._count()  # checkpoints are made between rollouts
        return self._ladder.state() | {"toggle_step": np.asarray([self._step, *self._of_step], np.int64)}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._ladder.load_state(state)
        if "toggle_step" in state:
            self._step, *of_step = state["toggle_step"].tolist()
            self._of_step = np.asarray(of_step, np.int64)
        own = self.state().keys()
        return {name: array for name, array in state.items() if name not in own}


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """How a run's manager chooses.

    Attributes:
      by: "expected", "bandit", "roofline", "ladder" or "fixed".
      mix: see `Expected` and `Bandit`.
      strategies: see `Bandit`; the one of `Fixed`.
      epsilon, window, seed: see `Bandit`.
      roofline: of `Toggled`.
    """

    by: Literal["expected", "bandit", "roofline", "ladder", "fixed"] = "expected"
    mix: bool = False
    strategies: tuple[Strategy, ...] = ()
    epsilon: float = 0.1
    window: int = 32
    seed: int = 0
    roofline: Roofline | None = None

    def manager(
        self,
        proposers: Sequence[Proposer],
        buckets: Buckets,
        times: PassTimes,
        max_batch: int,
        rows: RowsChoice,
    ) -> Manager:
        """The manager of these drafters; raises a ConfigError for strategies that none of them can draft."""
        _check_offered(self.strategies, proposers, buckets.max_drafts)
        if self.by == "expected":
            return Expected(proposers, buckets, times, self.mix, rows)
        if self.by == "roofline":
            (proposer,) = proposers
            lengths = [length for length in _LADDER if length <= buckets.max_drafts]
            ladder = PatienceLadder(lengths or [buckets.max_drafts])
            toggle = Toggle(self.roofline, ladder.length, buckets=buckets)
            return Toggled(proposer, buckets, times, toggle, ladder)
        if self.by == "fixed":
            (strategy,) = self.strategies
            return Fixed(proposers, buckets, times, strategy)
        if self.by == "ladder":
            return Laddered(proposers, buckets, times, max_batch)
        chances = (self.epsilon, self.window, self.seed)
        return Bandit(proposers, buckets, self.strategies, max_batch, *chances, mix=self.mix)


def _check_offered(strategies: Sequence[Strategy], proposers: Sequence[Proposer], max_drafts: int) -> None:
    for proposer in proposers:
        if isinstance(proposer, SelfProposer):
            for strategy in strategies:
                if proposer.name in strategy.drafters and (strategy.depth > max_drafts or strategy.top_k > 1):
                    raise ConfigError(
                        f"speculation.strategies: {strategy}: {proposer.name} drafts chains, of up to"
                        f" speculation.max_drafts {max_drafts} tokens; give it top_k 1 and no more depth"
                    )
        if not isinstance(proposer, DeviceProposer):
            continue  # any number of nodes
        offered = [(tree.depth, tree.top_k) for tree in proposer.drafter.strategies]
        for strategy in strategies:
            if proposer.name in strategy.drafters and (strategy.depth, strategy.top_k) not in offered:
                trees = ", ".join(f"{depth}/{top_k}" for depth, top_k in offered)
                raise ConfigError(
                    f"speculation.strategies: {strategy}: {proposer.name} is set up for trees of depth/top_k"
                    f" {trees}; see its arguments"
                )


EXPECTED = StrategyChoice()


def strategy_choice(config: SpeculationConfig, seed: int, roofline: Roofline | None = None) -> StrategyChoice:
    """As the config says; raises a ConfigError for strategies that cannot be."""
    strategies = parse_strategies(config.strategies, config.drafters, config.max_drafts)
    return StrategyChoice(
        config.choice, config.mix, strategies, config.epsilon, config.window, seed, roofline
    )
