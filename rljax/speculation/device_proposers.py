"""Drafts that are made on the device and so take its time.

SelfProposer      the policy drafts chains for itself, with other weights and on its own KV cache
DeviceProposer    a drafter that follows the slots on the device drafts trees
"""

import itertools
import time
from collections.abc import Callable

import numpy as np

from drafters.base import Drafter, Drafts
from drafters.validation import chains
from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape
from rljax.engine.draft_tree import DraftStrategy
from rljax.engine.engine import DecodeEngine
from rljax.engine.self_drafting import margin_log_probability
from rljax.engine.shapes import Shapes
from rljax.engine.state import DecodeState
from rljax.models.transformer import Params
from rljax.processes import agree
from rljax.requests import DecodeStatistics
from rljax.speculation.acceptance import ChainAcceptance
from rljax.speculation.draft_length import WorthStarting, best_length, best_strategy
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.drafter_slots import DrafterSlots
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.proposals import ActiveSlots, Proposal, Proposer, bins_of, no_proposal, restore
from rljax.speculation.strategies import Strategy
from rljax.speculation.warm_up import time_drafts, time_trees

_DRAFT_DELAY = 2  # in buckets: drafting is compiled after the verifying passes of the same shape


class _OnDevice(Proposer):
    """What both proposers share; `times`, those measured of passes and of drafting, are added to."""

    def __init__(self, name: str, drafter: Drafter, engine: DecodeEngine, times: PassTimes) -> None:
        super().__init__(name, drafter, engine)
        self._times = times
        self._acceptance = ChainAcceptance()
        self._compiler: BackgroundCompiler | None = None
        self._used: set[tuple] = set()  # what has been drafted since programs are compiled in the background

    def _add_draft(self, batch: int, length: int, seconds: float, tree: DraftStrategy | None = None) -> None:
        """Drafting was measured. The first run of a program does not count: it takes longer."""
        if self._compiler is None or (batch, length, tree) in self._used:
            self._times.add_draft(batch, length, self.name, seconds, tree)
        self._used.add((batch, length, tree))

    @property
    def acceptance(self) -> float:
        """Probability that a draft is accepted, given that its predecessors are."""
        return self._acceptance.rate

    def refresh(self, params: Params) -> None:
        with drafter_call(self.name, "refresh"):
            self.drafter.refresh(params)

    def forget(self) -> None:
        super().forget()
        self._acceptance.forget()

    def state(self) -> dict[str, np.ndarray]:
        return super().state() | {f"chains_of_{self.name}": self._acceptance.state()}

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return restore(super().load_state(state), {f"chains_of_{self.name}": self._acceptance.load_state})


class SelfProposer(_OnDevice):
    """A `Proposer` for chains that the policy drafts for itself, with other weights."""

    only_chains = True

    def __init__(self, name: str, drafter: Drafter, engine: DecodeEngine, times: PassTimes) -> None:
        super().__init__(name, drafter, engine, times)
        self._length = 0  # length of the chains that were chosen last
        self._start = WorthStarting()

    def refresh(self, params: Params) -> None:
        super().refresh(params)
        self._start = WorthStarting()

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        with drafter_call(self.name, "weights"):
            draft_params = self.drafter.policy_weights.weights()
        for seconds in time_drafts(self._engine, draft_params, batch, length, repeats):
            self._times.add_draft(batch, length, self.name, seconds)

    def compile_in_background(self, params: Params, shapes: Shapes, thread: CompilerThread) -> None:
        param_shapes = self._engine.param_shapes(params)

        def compile_shape(shape: Shape, should_stop: Callable[[], bool]) -> None:
            with drafter_call(self.name, "compile"):
                draft_params = self.drafter.policy_weights.compile(param_shapes)
            if not should_stop():
                self._engine.compile_draft(draft_params, *shape)

        self._compiler = BackgroundCompiler(
            compile_shape,
            self._engine.buckets,
            itertools.product(shapes.batches, shapes.foreseen),
            shapes.first,
            False,
            thread,
            _DRAFT_DELAY,
            failure=f"are not drafted for by {self.name}, which cannot be compiled",
        )

    def is_ready(self, shape: tuple[int, int]) -> bool:
        return self._compiler is None or self._compiler.is_ready(shape, near=False)

    def expected_rate(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        if not self.is_ready(shape):
            return 0.0
        current = int(active.current.sum())
        self._length, rate = self.choose_length(shape, len(active.slots), current)
        plain = self._times.plain_rate(current + active.inactive, *shape)
        saving = 1.0 - plain / rate if rate > plain else 0.0
        return rate if self._start.allows(self.drafter.policy_weights.pending_seconds, saving) else 0.0

    def choose_length(self, shape: tuple[int, int], slots: int, current: int) -> tuple[int, float]:
        """Draft steps before the next pass, and the tokens per second that they may yield."""
        buckets, acceptance = self._engine.buckets, self._acceptance.rate
        return best_length(self.name, acceptance, slots, current, buckets, self._times, *shape)

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        if not self.is_ready((state.batch, state.cache.length)):
            return state, no_proposal(self, len(active.slots), self._engine.buckets.max_drafts)
        # Draft, and measure: all of it counts as drafting, only the steps as what steps take.
        start = time.perf_counter()
        length = self._length if strategy is None else strategy.depth
        with drafter_call(self.name, "weights"):
            params = self.drafter.policy_weights.weights()
        ready = time.perf_counter()
        state, drafted = self._engine.draft(params, state, length)
        tokens, margins = (np.asarray(x)[active.slots] for x in (drafted.tokens, drafted.margins))
        end = time.perf_counter()
        seconds, steps = agree(end - start, end - ready)
        self._add_draft(state.batch, state.cache.length, steps / length)
        statistics.draft_seconds += seconds
        # A margin tells how likely its token is, given the tokens before; along a chain these multiply.
        usable = tokens >= 0
        bins = self._calibration.bins(margin_log_probability(margins))
        probability = np.cumprod(np.where(usable, self._calibration.rates[bins], 1.0), axis=1)
        parents = np.broadcast_to(np.arange(-1, tokens.shape[1] - 1, dtype=np.int32), tokens.shape)
        return state, Proposal(self, tokens, parents, usable, probability, bins, seconds)

    def record_outcome(self, proposal: Proposal, verified: np.ndarray, correct: np.ndarray) -> None:
        # A margin says something of its own token only: drafts behind the first refused one were not scored.
        taken = correct.sum(axis=1)
        scored = verified & (np.arange(verified.shape[1]) <= taken[:, None])
        self._acceptance.add(int(scored.sum()), int(taken.sum()))
        self._calibration.add(bins_of(proposal, scored), correct[scored])


class DeviceProposer(_OnDevice):
    """A `Proposer` for trees from what drafts for the slots on the device.

    Args:
      name, drafter, engine, times: see `_OnDevice`.
    """

    def __init__(
        self, name: str, drafter: Drafter, engine: DecodeEngine, times: PassTimes, group: DrafterSlots
    ) -> None:
        super().__init__(name, drafter, engine, times)
        self._group, self.slots = group, group.on_device[name]
        self.trees = self.slots.strategies
        self._strategy = self.trees[0]  # the tree that was chosen last

    def warm_up(self, params: Params, batch: int, length: int, repeats: int) -> None:
        for strategy in self.trees:
            for seconds in time_trees(self._engine, self.slots, strategy, batch, length, repeats):
                self._times.add_draft(batch, length, self.name, seconds, strategy)

    def compile_in_background(self, params: Params, shapes: Shapes, thread: CompilerThread) -> None:
        batches, longest = shapes.batches, shapes.lengths[-1]
        training = self.drafter.training
        compile_update = None if training is None else training.compile_later()

        def compile_batch(shape: Shape, should_stop: Callable[[], bool]) -> None:
            self.slots.compile(shapes, shape[0], shapes.foreseen, should_stop)
            if compile_update is not None and not should_stop():
                compile_update()

        def distance(shape: Shape) -> int:
            low, high = sorted((shape[0], thread.near[0]))
            return sum(low < batch <= high for batch in batches)

        compiler = BackgroundCompiler(
            compile_batch,
            self._engine.buckets,
            [(batch, longest) for batch in batches],
            shapes.first,
            False,
            thread,
            _DRAFT_DELAY,
            distance,
            f"are not drafted for by {self.name}, which cannot be compiled",
        )
        self._compiler = compiler
        self._group.is_compiled[self.name] = lambda batch: compiler.is_ready((batch, longest), near=False)

    def is_ready(self, shape: tuple[int, int]) -> bool:
        return self.name in self._group.active

    def expected_rate(self, shape: tuple[int, int], active: ActiveSlots) -> float:
        if not self.is_ready(shape):
            return 0.0
        self._strategy, rate = best_strategy(
            self.name,
            self.trees,
            self._acceptance.rate,
            len(active.slots),
            int(active.current.sum()),
            self._engine.buckets,
            self._times,
            *shape,
        )
        return rate

    def propose(
        self,
        state: DecodeState,
        active: ActiveSlots,
        statistics: DecodeStatistics,
        strategy: Strategy | None = None,
    ) -> tuple[DecodeState, Proposal]:
        if not self.is_ready((state.batch, state.cache.length)):
            return state, no_proposal(self, len(active.slots), self._engine.buckets.max_drafts)
        # Draft one of the drafter's trees, and measure.
        start, tree = time.perf_counter(), self._strategy
        if strategy is not None:
            shape = (strategy.depth, strategy.top_k)
            tree = next(tree for tree in self.trees if (tree.depth, tree.top_k) == shape)
        with drafter_call(self.name, "draft"):
            drafted = self.slots.draft(state, tree)
        arrays = (drafted.tree.tokens, drafted.tree.parents, drafted.tree.valid, drafted.log_probability)
        tokens, parents, usable, scores = (np.asarray(x)[active.slots] for x in arrays)
        (seconds,) = agree(time.perf_counter() - start)
        self._add_draft(state.batch, state.cache.length, seconds, tree)
        statistics.draft_seconds += seconds
        # Pad to the widest pass, as trees from the host are.
        padding = [(0, 0), (0, self._engine.buckets.max_drafts - tokens.shape[1])]
        drafts = Drafts(
            np.pad(tokens, padding),
            np.pad(parents, padding, constant_values=-1),
            np.pad(scores, padding, constant_values=-np.inf),
            usable.sum(axis=1),
        )
        usable = np.pad(usable, padding)
        if self._engine.verification == "rejection":
            drafts, usable = chains(drafts, usable)
        return state, self._calibrated(drafts, usable, seconds)

    def record_outcome(self, proposal: Proposal, verified: np.ndarray, correct: np.ndarray) -> None:
        scored, taken = proposal.scored(verified, correct)
        self._acceptance.add(int(scored.sum()), int(taken.sum()))
        super().record_outcome(proposal, verified, correct)
