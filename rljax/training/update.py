"""The update of the policy: an objective's gradients (`objectives.py`), summed over micro-batches; optimizer.

The policy gradients of `rljax/algorithms` and the supervised warm start share one implementation
(`rljax/learning/accumulation.py`).

Weights and optimizer state are float32; matrix products are computed in `Numerics.compute_dtype`. Under LoRA
only the factors are trained, and are float32 (`factor_updates.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from rljax import processes, target
from rljax.config import AlgorithmConfig, TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import ConfigError
from rljax.kernels.token_logprobs.base import chunk_tokens
from rljax.learning.accumulation import Accumulation, Sums, TrainState
from rljax.learning.packing import PackedBatch, empty_batches, microbatch_sizes
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, adapted
from rljax.models.rope import rope_table
from rljax.models.sharding import param_shardings, shard_params
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import batch_sharding, replicated_sharding, row_multiple
from rljax.training.factor_updates import FactorUpdates
from rljax.training.objectives import (
    TOKENS,
    WEIGHT,
    Objective,
    gradients,
    policy_objective,
    supervised_objective,
)
from rljax.training.scoring import score_packed
from rljax.training.weight_copies import weight_copies, with_copies

_TOKEN_SUMS = ("entropy", "mismatch/logprob_abs_mean")  # plain sums, divided by the tokens at the end
_MAXIMA = ("mismatch/logprob_abs_max",)  # maxima, at least 0; everything else is summed


class Recipe(NamedTuple):
    """What an update computes.

    Attributes:
      sampling: distribution that rollouts sample from. The supervised loss is unfiltered, at temperature 1.
      training: pack_length, rows_per_microbatch, remat, logprob_chunk and share_prompts are read.
      optimizer: from `make_optimizer`.
    """

    sampling: SamplingParams
    algorithm: AlgorithmConfig
    training: TrainingConfig
    optimizer: optax.GradientTransformation


class Trainer:
    """Compiled scoring and updates of one policy architecture.

        state = trainer.init(params)
        logprobs = trainer.score(state.params, batches)
        state, metrics = trainer.update(state, batches)

    An update consumes the state: its arrays are overwritten in place. Other holders of its params, such as a
    decode engine, must take those of the new state, or copy them before.

    Args:
      numerics: numerics of the engine.
      pool: pool of compiled programs; may be shared with engines and other trainers.
      mesh: devices to use; None for one.
      adapter: LoRA's settings and first factors; None trains all weights.

    Attributes:
      row_multiple: number that divides the rows of every batch; an argument of `Packing.microbatches`.
      share_prompts: `training.share_prompts`; "off" on a mesh.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        recipe: Recipe,
        pool: ExecutablePool,
        mesh: Mesh | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        sampling, algorithm, training, optimizer = recipe
        self.row_multiple = row_multiple(mesh)
        if training.rows_per_microbatch % self.row_multiple:
            raise ConfigError(
                f"training.rows_per_microbatch: {training.rows_per_microbatch} rows cannot be split evenly"
                f" over mesh.data * mesh.fsdp = {self.row_multiple} devices; use a multiple of"
                f" {self.row_multiple}"
            )
        if mesh is not None and training.share_prompts == "on":
            raise ConfigError(
                "training.share_prompts: on is not possible on a mesh of several devices; use auto or off,"
                " which compute every prompt there"
            )
        self._recipe = recipe
        self.share_prompts = "off" if mesh is not None else training.share_prompts
        self.config, self.numerics = config, numerics
        self.optimizer, self.pool, self.mesh = optimizer, pool, mesh
        static = {
            "config": config,
            "numerics": numerics,
            "remat": training.remat,
            "logprob_chunk": chunk_tokens(training.logprob_chunk, config.vocab_size),
            "mesh": mesh,
        }
        self._score = functools.partial(
            score_packed, sampling=sampling, entropy_gradient=algorithm.entropy_coefficient > 0, **static
        )
        unfiltered = dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        self._unfiltered_score = functools.partial(score_packed, sampling=unfiltered, **static)
        self._filters = sampling.filters(config.vocab_size)
        self._objective = functools.partial(policy_objective, algorithm=algorithm)
        self._policy_step = functools.partial(self._gradients, self._score, self._objective)
        supervised = functools.partial(score_packed, sampling=SamplingParams(), **static)
        self._supervised_step = functools.partial(self._gradients, supervised, supervised_objective)
        self._key = (*static.values(), sampling, algorithm, training.pack_length, training.cast_once)
        self._rope = jnp.asarray(rope_table(config, training.pack_length))
        replicated = shardings = None
        if mesh is not None:
            replicated = replicated_sharding(mesh)
            shardings = param_shardings(config, mesh)
            self._rope = target.put(self._rope, replicated)
        self.adapter = adapter
        self._accumulation: Accumulation | FactorUpdates
        if adapter is None:
            arguments = (optimizer, pool, self._key, _MAXIMA, shardings, replicated)
            copies = functools.partial(weight_copies, numerics=numerics, training=training)
            self._accumulation = Accumulation(*arguments, copies)
        else:
            arguments = (optimizer, pool, self._key, _MAXIMA, mesh)
            self._accumulation = FactorUpdates(adapter, config, numerics.dtype, *arguments)

    # -- calls of the loop -----------------------------------------------------------------------------------

    def place(self, params: Params) -> Params:
        """Puts params on the trainer's mesh; without a mesh, returns them unchanged."""
        return shard_params(params, self.config, self.mesh)

    def init(self, params: Params) -> TrainState:
        """Returns the state before the first update. `params` (any float dtype) stay valid: they are copied,
        or under LoRA shared, where no update changes them.
        """
        return self._accumulation.init(self.place(params))

    def merged(self, base: Params, trained: TrainState) -> TrainState:
        """Returns the state under LoRA from its base, which is shared, and what `trained_alone` returned of
        it.
        """
        return self._accumulation.merged(self.place(base), trained)

    def of_architecture(self, config: ModelConfig) -> "Trainer":
        """Returns a trainer of another architecture with the same settings, to score by its weights."""
        return Trainer(config, self.numerics, self._recipe, self.pool, self.mesh)

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows of micro-batches, `microbatch_sizes`."""
        return microbatch_sizes(self._recipe.training.rows_per_microbatch, self.row_multiple)

    def warm_up(self, state: TrainState, reference: bool = False, sizes: Sequence[int] | None = None) -> None:
        """Compiles every program that `update` needs, without running any. Nothing is compiled later, except
        for batches with shared prompts: their programs depend on how much is shared, and are compiled when a
        size first occurs.

        Args:
          state: state from `init`; not consumed.
          reference: whether updates have reference_logprobs.
          sizes: numbers of rows of micro-batches; None for all.
        """
        for batch in self._empty_batches(sizes):
            if self._recipe.algorithm.corrects_rollout:
                self._score_program((state.params, batch, self._rope))
                batch = batch.replace(old_logprobs=batch.rollout_logprobs)
            inputs = (batch, batch.rollout_logprobs if reference else None, self._rope)
            self._accumulation.compile(state, inputs, self._policy_step, _kind("policy", inputs))

    def warm_up_score(
        self, params: Params, sizes: Sequence[int] | None = None, unfiltered: bool = False
    ) -> None:
        """Compiles every program that `score` needs, as `warm_up` does those of updates."""
        for batch in self._empty_batches(sizes):
            self._score_program((params, batch, self._rope), unfiltered)

    def _empty_batches(self, sizes: Sequence[int] | None) -> Iterator[PackedBatch]:
        """Yields a batch of each size and span; none where prompts are shared, whose sizes come later."""
        if self.share_prompts == "on":
            return
        sizes = self.sizes if sizes is None else sizes
        yield from map(self._put, empty_batches(sizes, self._recipe.training.pack_length))

    def score(
        self, params: Params, batches: Sequence[PackedBatch], unfiltered: bool = False
    ) -> list[np.ndarray]:
        """Returns logprobs of the targets under the sampling distribution, float32 [R, T] per batch.

        Args:
          unfiltered: without top-k, top-p and min-p, as for a reference: its filter could exclude a token
            that the policy now samples, and the KL of a logprob of -inf is infinite.
        """
        args = [(params, self._put(batch.replace(old_logprobs=None)), self._rope) for batch in batches]
        logprobs = [self._score_program(inputs, unfiltered)(*inputs) for inputs in args]
        return [processes.to_host(array) for array in logprobs]

    def update(
        self,
        state: TrainState,
        microbatches: Sequence[PackedBatch],
        reference_logprobs: Sequence[ArrayLike] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One policy-gradient update on a mini-batch. Consumes `state`.

        Args:
          state: state from `init` or an earlier update.
          microbatches: micro-batches of the mini-batch. Token weights must sum to 1 over all of them, unless
            the algorithm's aggregation is "constant" or responses without advantage were left out.
          reference_logprobs: [R, T] per micro-batch, from `score`, unfiltered, with the reference's weights;
            None leaves out the KL term.

        Returns:
          The new state, and metrics of the mini-batch: `loss/policy`, `loss/kl` (with a reference),
          `loss/entropy` (with an entropy bonus), `update/weight` (if they do not sum to 1), `entropy` as
          the mean over response tokens, `mismatch/logprob_abs_mean` and `_max` (|policy - rollout logprob|),
          `policy/ratio_mean`, `policy/clip_fraction_low`, `policy/clip_fraction_high`, `policy/rollout_kl`,
          `gradient_norm` before clipping, `update/tokens`.
        """
        if reference_logprobs is not None and len(reference_logprobs) != len(microbatches):
            raise ValueError(
                f"reference_logprobs for {len(reference_logprobs)} of {len(microbatches)} micro-batches"
            )
        return self._update(state, microbatches, reference_logprobs, self._policy_step, "policy")

    def supervised_update(
        self, state: TrainState, microbatches: Sequence[PackedBatch]
    ) -> tuple[TrainState, dict[str, float]]:
        """One update of the warm start. Consumes `state`. Returns the new state, and the metrics
        `loss/supervised`, `entropy`, `gradient_norm` and `update/tokens`.
        """
        return self._update(state, microbatches, None, self._supervised_step, "supervised")

    # -- the host's part -------------------------------------------------------------------------------------

    def _put(self, batch: PackedBatch) -> PackedBatch:
        if self.mesh is None:
            return batch
        return target.put(batch, batch_sharding(self.mesh))

    def _update(
        self,
        state: TrainState,
        microbatches: Sequence[PackedBatch],
        reference_logprobs: Sequence[ArrayLike] | None,
        step: Callable[..., Sums],
        name: str,
    ) -> tuple[TrainState, dict[str, float]]:
        references = [None] * len(microbatches) if reference_logprobs is None else reference_logprobs
        inputs = [
            (
                self._put(batch),
                None if reference is None else self._put(np.asarray(reference, np.float32)),
                self._rope,
            )
            for batch, reference in zip(microbatches, references, strict=True)
        ]
        kind = _kind(name, inputs[0]) if inputs else (name,)
        state, metrics = self._accumulation.update(state, inputs, step, kind)
        return state, _finished(metrics)

    def _score_program(self, args: tuple, unfiltered: bool = False) -> Callable[..., Array]:
        params, batch, _ = args
        name, score = "score", self._score
        if unfiltered and self._filters:  # otherwise the program would be the same
            name, score = "score without filters", self._unfiltered_score

        def scoring(params: Params, batch: PackedBatch, rope: Array) -> Array:
            return score(params, batch=batch, rope=rope)[0]

        return self.pool.get((name, batch.shapes, str(params["embed"].dtype), *self._key), scoring, args)

    # -- pure functions, compiled by the pool ----------------------------------------------------------------

    def _gradients(
        self,
        score: Callable[..., tuple[Array, Array]],
        objective: Objective,
        trained: Params,
        batch: PackedBatch,
        reference: Array | None,
        rope: Array,
        computed: Params | None = None,
    ) -> Sums:
        """As `gradients`. `computed` is the merged policy where `trained` are factors, otherwise copies."""

        def score_trained(trained: Params, batch: PackedBatch) -> tuple[Array, Array]:
            if self.adapter is None:
                return score(with_copies(trained, computed), batch=batch, rope=rope)
            return score(adapted(computed, trained, self.adapter.lora), batch=batch, rope=rope)

        return gradients(trained, batch, reference, score_trained, objective)


def _kind(name: str, inputs: tuple) -> tuple:
    """Returns a key of a step function by name and by which optional inputs are present."""
    batch, reference, _ = inputs
    return name, reference is not None, batch.old_logprobs is not None


def _finished(metrics: dict[str, np.ndarray]) -> dict[str, float]:
    """Turns the metrics summed over a mini-batch into the numbers to report."""
    tokens, weight = max(float(metrics[TOKENS]), 1.0), float(metrics.get(WEIGHT, 1.0))

    def finished(name: str, value: float) -> float:
        if name in _TOKEN_SUMS:
            return value / tokens
        return value / weight if name.startswith("policy/") and weight > 0 else value

    return {name: finished(name, float(value)) for name, value in metrics.items()}
