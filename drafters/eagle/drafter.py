"""The head as a drafter: it drafts for the engine's slots (`slots.py`), and learns from their responses.

It is trained (`spot_trainer.py`) on the features that every forward pass of the engine hands out
(`collecting.py`), so it needs no forward pass of its own. Where other processes decode, their passes'
features stay there: the process that trains computes some of them again (`read`), and the others draft with
frozen copies of its head (`weights`). `HeadOnWorkers` is about training by workers.
"""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from drafters.base import Drafter, DraftRequest, Outcome, Sampled
from drafters.eagle.arguments import BlockArguments, EagleArguments
from drafters.eagle.checkpoint import load_head
from drafters.eagle.collecting import FeatureCollector
from drafters.eagle.drafting import DraftStrategy
from drafters.eagle.head_state import FrozenHead
from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig, init_head, shared_params
from drafters.eagle.objective import HeadTraining
from drafters.eagle.saving import AsyncHeadSaver
from drafters.eagle.slots import HeadSlots, head_numerics
from drafters.eagle.spot_trainer import BufferSettings, HeadSession, HeadTrainer, head_optimizer
from drafters.eagle.states import StateReader, States
from drafters.eagle.time_budget import TimeBudget
from drafters.training import SharedTraining, Training, TrainingLimits, WorkerTraining
from rljax.engine.draft_tree import most_nodes
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.errors import CheckpointError, ConfigError, DrafterError
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.numerics.rows import tree_cast
from rljax.processes import is_first, to_host


class EagleDrafter(Drafter, Training):
    """A head that drafts and learns beside the policy: it is its own `Training`, for others, too.

    Args:
      arguments: see `EagleArguments` and `BlockArguments`; with the latter it is a block head.

    Attributes:
      config: the head's shape, after `reads`.
      engine, slots: the decode engine and the head's state for its slots, after `attach`.
      trainer: trains the head; None before the first rollout.
      restored: a checkpoint's state, for the trainer when there is one.
      delegated: whether workers train the head.
      spot_metrics: of their last update that was taken over.
    """

    on_host = False

    def __init__(self, arguments: EagleArguments | BlockArguments) -> None:
        self.arguments, self.below = arguments, arguments.train_below
        self._loaded: Params | None = None
        self._saver: AsyncHeadSaver | None = None
        if arguments.save_dir is not None:
            stops = arguments.on_save_failure == "stop"
            self._saver = AsyncHeadSaver(arguments.save_dir, None if stops else _warn)
        self._shared: Params | None = None
        self._frozen = False
        self.trainer: HeadTrainer | FrozenHead | None = None
        self.restored: dict[str, np.ndarray] | None = None
        self.delegated = False
        self.spot_metrics: dict[str, float] = {}
        self._step = 0
        self._slices = 0  # slices of this rollout
        self._reads = False  # responses of other processes
        self._compiled = True  # whether the update is compiled, or compiled when it is first needed
        self._measured = True  # whether its time is, or need not be
        self._learned = False  # `learn` was called in this step; the next policy begins another step
        self._budget = TimeBudget(arguments.train_share)
        self._last_metrics: dict[str, float] = {}
        self.collector = FeatureCollector(arguments.buffer_bytes // 2)  # running ones have half of the buffer

    @property
    def training(self) -> Training:
        return self

    @property
    def shared(self) -> SharedTraining:
        return self

    @property
    def spot(self) -> WorkerTraining:
        return HeadOnWorkers(self)

    # -- what it drafts for ----------------------------------------------------------------------------------

    def reads(self, policy: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        arguments = self.arguments
        if arguments.path is None:
            self.config = _new_head(arguments, policy, tokenizer)
            return self.config.layers
        self.config, self._loaded = load_head(arguments.path, policy)
        # HASS is EAGLE's head, trained otherwise.
        kinds = {"eagle" if name == "hass" else name for name in (self.config.variant, arguments.variant)}
        if len(kinds) > 1:
            raise ConfigError(
                f"speculation.args.path: {arguments.path} is no head of variant {arguments.variant}"
            )
        if self.config.block is not None:
            for name, most in arguments.lengths.items():
                if most > self.config.block.size:
                    raise ConfigError(
                        f"speculation.args.{name}: {most} is more than the {self.config.block.size} positions"
                        f" of the head in {arguments.path}"
                    )
        return self.config.layers

    def attach(self, engine: DecodeEngine) -> HeadSlots:
        arguments, most = self.arguments, engine.buckets.max_drafts
        strategies = []
        for depth in sorted(set(arguments.depths)):
            nodes = min(arguments.nodes or most, most, most_nodes(depth, arguments.top_k))
            strategies.append(DraftStrategy(depth, arguments.top_k, nodes))
        self.engine = engine
        self.slots = HeadSlots(self.config, engine, tuple(strategies), self.collector, arguments.unread_bytes)
        return self.slots

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return self.engine.buckets.cache[-1]

    def refresh(self, params: Params) -> None:
        before, self._shared = self._shared, shared_params(params, self.engine.config)
        if self.trainer is None:
            head = self._loaded
            if head is None:
                head = init_head(self.config, params, self.arguments.seed)
            self.trainer = FrozenHead(head) if self._frozen else self.make_trainer(head)
            self.collector.trainer = self.trainer
            self.trainer.begin_step(self._step)
            if self.restored is not None:
                self.trainer.load_state(self.restored)
                self.restored = None  # it holds a whole buffer of features
        moved = before is None or before["embed"] is not self._shared["embed"]
        if self._learned and moved:  # the rollouts of a step (dynamic sampling) share a policy
            self._step, self._learned = self._step + 1, False
            self.trainer.begin_step(self._step)
        self.slots.use(tree_cast(self.trainer.params, self.slots.numerics.dtype), self._shared)

    def make_trainer(self, head: Params, pool: ExecutablePool | None = None) -> HeadTrainer:
        """Returns a trainer of a head, with this one's settings; arguments as of `HeadTrainer`."""
        arguments, training = self.arguments, self.objective
        return HeadTrainer(
            self.config,
            training,
            head_optimizer(arguments.learning_rate),
            rope_table(self.engine.config, arguments.pack_length + self.config.reach(training.steps)),
            head_numerics(self.engine, self.engine.mesh),
            BufferSettings(arguments.buffer_bytes, previous_share=arguments.previous_share),
            arguments.pack_length,
            arguments.rows,
            arguments.seed,
            head,
            pool,
            self.engine.mesh,
        )

    @property
    def objective(self) -> HeadTraining:
        """What the head learns for the engine that it drafts for."""
        return dataclasses.replace(self.arguments.training, sampling=self.engine.sampling)

    @functools.cached_property
    def reader(self) -> StateReader:
        """Computes the policy's features."""
        numerics = dataclasses.replace(self.engine.numerics, row_invariant=False)  # it decides no token
        return StateReader(self.config, numerics, self.longest, rows=1)

    # -- what a drafter hears --------------------------------------------------------------------------------

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._budget.resume()
        self.collector.begin(requests, self._trains)

    def observe(self, sampled: Sampled) -> None:
        self.collector.observe(sampled)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Ends a rollout: runs the slices that are left, as time allows; the policy's update waits for it."""
        if self.arguments.train and self.trainer is not None:
            while self.train():
                pass
            self._last_metrics = self.trainer.metrics() | self.spot_metrics
            if self._saver is not None:
                params = to_host(self.trainer.params)
                with _saving():
                    if is_first():
                        self._saver.save(self._step, params, self.config)
            self._slices, self._learned = 0, True

    def state(self) -> dict[str, np.ndarray]:
        if self._saver is not None:  # wait for the save in progress: the last step ends with a checkpoint
            with _saving():
                self._saver.wait()
        position = {"step": np.asarray(self._step, np.int64), "learned": np.asarray(self._learned)}
        position |= {name: np.asarray(total, np.int64) for name, total in self.collector.totals.items()}
        if self.trainer is None:  # no rollout yet
            return {} if self.restored is None else position | self.restored
        return position | self.trainer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        state, totals = dict(state), self.collector.totals
        self._step, self._learned = int(state.pop("step")), bool(state.pop("learned", False))
        totals |= {name: int(state.pop(name, 0)) for name in totals}
        if self.trainer is None:  # it needs the policy's weights, which come with `refresh`
            self.restored = state
        else:
            self.trainer.load_state(state)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `HeadTrainer.metrics` and `FeatureCollector.totals`, as `head/...`."""
        return {f"head/{name}": value for name, value in (self._last_metrics | self.collector.totals).items()}

    # -- training --------------------------------------------------------------------------------------------

    @property
    def trained(self) -> bool:
        return self._loaded is not None or (self.trainer is not None and self.trainer.updates > 0)

    @property
    def _trains(self) -> bool:
        return self.arguments.train and self.arguments.slices > 0

    def freeze(self) -> None:
        self.arguments = self.arguments.model_copy(update={"train": False})
        self._frozen = True

    def warm_up(self) -> None:
        if self._trains:
            self._budget.expect(self.trainer.warm_up(self._shared))

    def compile_later(self) -> Callable[[], None]:
        if not self._trains:
            return super().compile_later()
        self._compiled = self._measured = False
        return self._compile

    def _compile(self) -> None:
        self.trainer.compile(self._shared)
        self._compiled = True

    def train(self) -> bool:
        """Runs one slice; returns False when the slices, the data or the time of this step are used up."""
        if not self.arguments.train or self.delegated or self._slices >= self.arguments.slices:
            return False
        if not self._compiled or self._step % self.arguments.train_every:
            return False
        if not self._measured:
            self.warm_up()
            self._measured = True
        if self.below > 0 and not self._budget.allows():
            return False
        start = time.perf_counter()
        if self.trainer.slice(self._shared) is None:
            return False
        self._slices += 1
        self._budget.spend(time.perf_counter() - start)
        return True

    # -- responses of other processes ------------------------------------------------------------------------

    def read(
        self, params: Params, responses: Sequence[tuple[Sequence[int], np.ndarray]], seconds: float
    ) -> None:
        """Adds responses to the buffer, no more of them than the step's slices have room for, evenly spread:
        computing their features again takes a forward pass.
        """
        if not self._trains:
            return
        self.refresh(params)
        if self.delegated:
            return
        if not self._reads:
            self._reads = True
            self.warm_up()
        self._budget.earn(seconds)
        tokens = sum(len(prompt) + len(response) for prompt, response in responses)
        every = max(1, -(-tokens // self.spot.limits.tokens))
        self.trainer.add_read(self.reader.read(params, responses[::every]))

    def weights(self) -> dict[str, np.ndarray]:
        if self.trainer is not None:
            weights = self.trainer.weights()
        else:  # no rollout yet
            restored = self.restored or {}
            weights = {
                name: array
                for name, array in restored.items()
                if name.startswith("train.params.") or name == "train.updates"
            }
        return weights and weights | {"step": np.asarray(self._step, np.int64)}


class HeadOnWorkers:
    """The `WorkerTraining` of a drafter's head."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self._drafter = drafter

    @property
    def limits(self) -> TrainingLimits:
        arguments = self._drafter.arguments
        updates = arguments.slices if arguments.train else 0
        tokens = arguments.slices * arguments.rows * arguments.pack_length
        return TrainingLimits(updates, tokens, self._drafter.longest, arguments.train_every)

    def delegate(self) -> None:
        self._drafter.delegated = True

    def saved(self) -> dict[str, np.ndarray]:
        trainer, restored = self._drafter.trainer, self._drafter.restored or {}
        if trainer is None:
            return {name: array for name, array in restored.items() if name.startswith("train.")}
        return {name: np.array(leaf) for name, leaf in to_host(trainer.trained_leaves()).items()}

    def adopt(self, saved: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> None:
        self._drafter.trainer.load_trained(saved)
        self._drafter.spot_metrics = dict(metrics)

    def warm_up(self, params: Params) -> None:
        drafter = self._drafter
        self.prepare(params, [((0,), (0, 0))])
        head = init_head(drafter.config, params, drafter.arguments.seed)
        drafter.make_trainer(head, drafter.engine.pool).warm_up(shared_params(params, drafter.engine.config))

    def prepare(self, params: Params, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[States]:
        return list(self._drafter.reader.read(params, samples))

    def session(self, params: Params, saved: Mapping[str, np.ndarray] | None) -> HeadSession:
        trainer = self._drafter.make_trainer(self._drafter.trainer.params, self._drafter.engine.pool)
        return HeadSession(trainer, shared_params(params, self._drafter.engine.config), saved)


def _new_head(
    arguments: EagleArguments | BlockArguments, policy: ModelConfig, tokenizer: Tokenizer | None
) -> HeadConfig:
    """Returns the shape of a head that is not loaded."""
    block = vocabulary = None
    if isinstance(arguments, BlockArguments):
        block = BlockShape(arguments.block_size, arguments.block_depth, arguments.block_width)
    if arguments.draft_vocabulary is not None:
        size, ends = arguments.draft_vocabulary, () if tokenizer is None else tokenizer.eos_token_ids
        if size > policy.used_rows:
            raise ConfigError(
                f"speculation.args.draft_vocabulary: {size} is more than the {policy.used_rows} tokens of the"
                " policy"
            )
        vocabulary = DraftVocabulary.most_frequent(np.zeros(policy.used_rows), size, ends)
    try:
        return HeadConfig(arguments.variant, policy, vocabulary=vocabulary, block=block)
    except ValueError as error:
        raise ConfigError(f"speculation.args.draft_vocabulary: {error}") from error


def _warn(failure: CheckpointError) -> None:
    warnings.warn(f"{failure}; the run goes on, and the next one is tried as usual", stacklevel=2)


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    """Turns a failed save into a DrafterError, so that it is not taken for a failed checkpoint of the run."""
    try:
        yield
    except CheckpointError as error:
        raise DrafterError(f"speculation.args.save_dir: {error}") from error
