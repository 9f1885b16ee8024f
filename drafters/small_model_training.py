"""Trains a small model that drafts, on what the policy has sampled (TLT, section 6.6 and Table 8, "Trained").

Supervised fine-tuning: the loss is the cross-entropy of the policy's responses under the small model at the
sampling temperature. Over responses that the policy has sampled its mean is KL(policy || small model) plus a
constant, so no features and no forward pass of the policy are needed, only tokens:

    trainer.add([(prompt_ids, response_ids), ...])
    metrics = trainer.update()                     # stop after any of them; None without data
    params = trainer.params                        # for the next rollout

Behind every rollout the small model is updated on all of its responses, or workers without requests do so
meanwhile (`cluster.spot`). It drafts with the new weights from the next rollout on, since the keys and values
in its cache are those of the weights that it had when they were computed.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from drafters.base import Outcome
from drafters.eagle.head_state import TrainerState, nested_leaves
from drafters.eagle.spot_trainer import finite_or_unchanged, head_optimizer
from drafters.eagle.training import init_state
from drafters.training import SharedTraining, Training, TrainingLimits, WorkerTraining
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.errors import ConfigError
from rljax.kernels.token_logprobs import token_logprobs
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.learning.packing import PackedBatch, Packing, TrainingSequence, build_batch, pack_sequences
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

Sample = tuple[Sequence[int], Sequence[int]]
"""Prompt and response ids."""
_PARAMS = "train.params."
_LOGIT_CHUNK = 1024  # tokens whose logits exist at once


@dataclasses.dataclass
class _Round:
    """Samples in packed rows, each of which is trained on once.

    Attributes:
      samples, packing: the samples, and where they lie.
      rows: those that are left, in the order of training.
    """

    samples: list[TrainingSequence]
    packing: Packing
    rows: list[int]


class SmallModelTrainer(TrainerState):
    """A small model in training, with its optimizer: a `TrainingSession`.

    Args:
      config: its architecture.
      params: its weights; copied.
      numerics: see `Numerics`.
      sampling: that of the policy, of which the temperature counts: a filter would exclude what was sampled.
      length: tokens of a packed row, at least those of the longest sample.
      rows: packed rows in an update. Every update has this shape, and is compiled once.
      learning_rate: constant; the optimizer is that of heads (`head_optimizer`).
      pool: compiled programs.
    """

    saved_with = "the small model"

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        numerics: Numerics,
        sampling: SamplingParams,
        length: int,
        rows: int,
        learning_rate: float,
        pool: ExecutablePool,
    ) -> None:
        self._length, self._rows, self._pool = length, rows, pool
        self._static = {
            "config": config,
            "numerics": numerics,
            "sampling": SamplingParams(sampling.temperature or 1.0),
            "optimizer": head_optimizer(learning_rate),
        }
        self._rope = jnp.asarray(rope_table(config, length))
        self._state = init_state(params, self._static["optimizer"])
        self._samples: list[TrainingSequence] = []
        self._new: list[TrainingSequence] = []  # of these, those that no round has had yet
        self._round: _Round | None = None

    def add(self, prepared: Sequence[Sample]) -> None:
        """Takes samples."""
        self._new += [TrainingSequence(*sample, None, 0.0, 0.0) for sample in prepared if len(sample[1])]

    def forget(self) -> None:
        """Drops the samples."""
        self._samples, self._new, self._round = [], [], None

    def compile(self) -> None:
        """Compiles the update, in any thread."""
        self._compiled(self._batch([], pack_sequences([], self._length), range(self._rows)))

    def update(self) -> dict[str, float] | None:
        """Updates once on the next packed rows. An update with a result that is not finite changes nothing.

        Returns:
          `loss`, nats a token before the update; `gradient_norm`; `tokens` of responses that it is of; and
          `skipped`, 1 if it changed nothing. None without samples.
        """
        batch = self._next_batch()
        if batch is None:
            return None
        self._state, metrics = self._compiled(batch)(self._state, batch, self._rope)
        return {name: float(value) for name, value in jax.device_get(metrics).items()}

    def _next_batch(self) -> PackedBatch | None:
        """The next rows of the round; then a round of what is new, or of all samples again."""
        if self._round is None or not self._round.rows:
            self._samples += self._new
            samples, self._new = self._new or self._samples, []
            if not samples:
                return None
            packing = pack_sequences([sample.length for sample in samples], self._length)
            order = np.random.default_rng(self.updates).permutation(packing.num_rows)
            self._round = _Round(samples, packing, order.tolist())
        rows, self._round.rows = self._round.rows[: self._rows], self._round.rows[self._rows :]
        rows += [self._round.packing.num_rows] * (self._rows - len(rows))  # empty ones
        return self._batch(self._round.samples, self._round.packing, rows)

    @staticmethod
    def _batch(samples: Sequence[TrainingSequence], packing: Packing, rows: Sequence[int]) -> PackedBatch:
        """As `build_batch`; one program computes sequences of every span."""
        return build_batch(samples, packing, rows).replace(span=None)

    def _compiled(self, batch: PackedBatch) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
        return self._pool.get(
            ("small_model_update", *self._static.values(), self._rows, self._length),
            functools.partial(_update, **self._static),
            (self._state, batch, self._rope),
            donate_argnums=(0,),
        )


def _update(
    state: TrainState,
    batch: PackedBatch,
    rope: Array,
    *,
    config: ModelConfig,
    numerics: Numerics,
    sampling: SamplingParams,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Array]]:
    """One update: (state, R packed rows) -> (state, metrics). Pure."""
    counted = batch.response_mask & (batch.targets < config.used_rows)  # the policy may have more tokens
    targets = jnp.minimum(batch.targets, config.used_rows - 1)
    tokens = jnp.sum(counted.astype(jnp.float32))

    def cross_entropy(params: Params) -> Array:
        attention = PackedAttention(batch.segment_ids, numerics)
        hidden, _ = transformer.forward(
            params, config, batch.tokens, batch.positions, attention, rope, numerics, remat=True
        )
        logprobs, _ = token_logprobs(
            hidden,
            transformer.lm_head(params, config),
            targets,
            sampling,
            numerics,
            _LOGIT_CHUNK,
            implementation=numerics.kernels.token_logprobs,
            used_rows=config.used_rows,
        )
        return -jnp.sum(jnp.where(counted, logprobs, 0.0)) / jnp.maximum(tokens, 1.0)

    loss, gradients = jax.value_and_grad(cross_entropy)(state.params)
    changed, norm = apply_gradients(state, gradients, optimizer)
    state, skipped = finite_or_unchanged(changed, state, loss)
    return state, {"loss": loss, "gradient_norm": norm, "tokens": tokens, "skipped": skipped}


class SmallModelTraining(Training):
    """The training of a small model behind rollouts; for others and by workers, too.

    Args:
      load: loads the checkpoint's weights in a dtype.
      draft_with: takes the weights to draft with from the next rollout on.
      slices: updates behind a rollout, at most.
      rows, learning_rate: see `SmallModelTrainer`.

    Attributes:
      metrics: of the last update.
    """

    def __init__(
        self,
        load: Callable[[str], Params],
        draft_with: Callable[[Params], None],
        slices: int,
        rows: int,
        learning_rate: float,
    ) -> None:
        self.slices, self.rows = slices, rows
        self._load, self._draft_with, self._learning_rate = load, draft_with, learning_rate
        self._trainer: SmallModelTrainer | None = None  # before the first update
        self._saved: dict[str, np.ndarray] = {}  # what it begins with, by names of `trained_leaves`
        self._trains = True  # not in other processes, nor where workers do
        self.metrics: dict[str, float] = {}

    @property
    def shared(self) -> SharedTraining:
        return self

    @property
    def spot(self) -> WorkerTraining:
        return SmallModelOnWorkers(self)

    def attach(self, engine: DecodeEngine, config: ModelConfig, numerics: Numerics) -> None:
        """Sets the engine whose responses it learns, and the small model's architecture and numerics; raises
        a ConfigError on a mesh.
        """
        if engine.mesh is not None:
            raise ConfigError(
                "speculation.args.slices: a small model is trained on one device; set 0 on a mesh of several"
            )
        self._engine, self._config, self._numerics = engine, config, numerics

    @property
    def length(self) -> int:
        """Tokens of a packed row, those of the longest sequence."""
        return self._engine.buckets.cache[-1]

    def make_trainer(self, saved: Mapping[str, np.ndarray]) -> SmallModelTrainer:
        """Returns a trainer that goes on from `saved`, or without any from the checkpoint."""
        trainer = SmallModelTrainer(
            self._config,
            self._load("float32"),
            self._numerics,
            self._engine.sampling,
            self.length,
            self.rows,
            self._learning_rate,
            self._engine.pool,
        )
        if saved:
            trainer.load_trained(saved)
        return trainer

    def _own_trainer(self) -> SmallModelTrainer:
        if self._trainer is None:
            self._trainer, self._saved = self.make_trainer(self._saved), {}
        return self._trainer

    # -- behind rollouts -------------------------------------------------------------------------------------

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Updates on the responses of a rollout; the policy's update waits for it."""
        if not self._trains:
            return
        trainer = self._own_trainer()
        trainer.add([(outcome.prompt_ids, outcome.response_ids) for outcome in outcomes])
        for _ in range(self.slices):
            self.metrics = trainer.update() or self.metrics
        trainer.forget()
        self._draft_with(trainer.params)

    def train(self) -> bool:
        """Does nothing: `learn` trains."""
        return False

    def freeze(self) -> None:
        self._trains = False

    def warm_up(self) -> None:
        if self._trains:
            self._own_trainer().compile()

    def compile_later(self) -> Callable[[], None]:
        return self._compile if self._trains else super().compile_later()

    def _compile(self) -> None:
        self.make_trainer({}).compile()  # not its own: `learn` may make that meanwhile

    # -- a checkpoint, and other processes -------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """Returns weights and optimizer state; nothing before the first update."""
        return {name: np.array(leaf) for name, leaf in self._leaves().items()}

    def _leaves(self) -> Mapping[str, Array | np.ndarray]:
        if self._trainer is None or not self._trainer.updates:
            return self._saved
        return self._trainer.trained_leaves()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `state` or `weights` returned."""
        self._saved, self._trainer = dict(state), None
        self._draft_with(trained_params(state))

    def read(self, params: Any, responses: Sequence[Sample], seconds: float) -> None:
        """Does nothing: `learn`, which follows, has the responses."""

    def weights(self) -> dict[str, np.ndarray]:
        return {name: np.array(leaf) for name, leaf in self._leaves().items() if name.startswith(_PARAMS)}


class SmallModelOnWorkers:
    """The `WorkerTraining` of a small model: samples are all that it needs."""

    def __init__(self, training: SmallModelTraining) -> None:
        self._training = training

    @property
    def limits(self) -> TrainingLimits:
        training = self._training
        tokens = training.slices * training.rows * training.length
        return TrainingLimits(training.slices, tokens, training.length)

    def delegate(self) -> None:
        self._training.freeze()

    def saved(self) -> dict[str, np.ndarray]:
        return self._training.state()

    def adopt(self, saved: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> None:
        self._training.load_state(saved)
        self._training.metrics = dict(metrics)

    def warm_up(self, params: Any) -> None:
        self._training.make_trainer({}).compile()

    def prepare(self, params: Any, samples: Sequence[Sample]) -> list[Sample]:
        return list(samples)

    def session(self, params: Any, saved: Mapping[str, np.ndarray] | None) -> SmallModelTrainer:
        return self._training.make_trainer(saved or {})


def trained_params(saved: Mapping[str, np.ndarray]) -> Params:
    """Returns the weights among arrays by the names of `SmallModelTrainer.trained_leaves`."""
    params = nested_leaves(
        {name.removeprefix(_PARAMS): leaf for name, leaf in saved.items() if name.startswith(_PARAMS)}
    )
    layers = params["layers"]  # a list of layers, by their numbers
    return params | {"layers": [layers[str(number)] for number in range(len(layers))]}
