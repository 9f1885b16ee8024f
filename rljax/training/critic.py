"""The critic of PPO: a copy of the policy's trunk with a value head, trained beside the policy.

V[t] is the expected return of the rest of the response before token t. Like a logit, it is computed at the
position before the token (`PackedBatch`). The critic has a separate trunk, so that its loss cannot reach the
policy. The value head starts at 0, so all values do.

Ouyang et al., arXiv 2203.02155, section 3.5 and appendix C (there the critic starts from the reward model).
"""

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from rljax import processes, target
from rljax.algorithms.value_loss import value_loss
from rljax.config import TrainingConfig
from rljax.engine.executables import ExecutablePool
from rljax.learning.accumulation import Accumulation, Metrics, Sums, TrainState
from rljax.learning.packing import PackedBatch, empty_batches, microbatch_sizes
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.sharding import param_shardings
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sharding import batch_sharding, replicated_sharding, row_multiple
from rljax.training.scoring import packed_hidden
from rljax.training.weight_copies import weight_copies, with_copies


@flax.struct.dataclass
class ValueTargets:
    """Targets of the values of a packed batch; 0 outside its response mask.

    Attributes:
      returns: float32 [R, T], returns to regress on.
      old_values: float32 [R, T], values from which the advantages were estimated; `value_loss` clips around
        them.
    """

    returns: Array | np.ndarray
    old_values: Array | np.ndarray


def critic_params(policy_params: Params) -> Params:
    """Returns a critic's params: the policy's trunk (arrays shared, not copied) and a value head of zeros.

    `{"trunk": policy_params without the LM head, "head": {"weight": [d], "bias": []}}`
    """
    trunk = {name: leaf for name, leaf in policy_params.items() if name != "lm_head"}
    width = policy_params["final_norm"].shape[0]
    head = {"weight": jnp.zeros(width, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return {"trunk": trunk, "head": head}


def packed_values(
    params: Params,
    config: ModelConfig,
    batch: PackedBatch,
    rope: Array,
    numerics: Numerics,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Array:
    """Returns the values at every position of packed rows, float32 [R, T]. Arguments as in `score_packed`."""
    hidden = packed_hidden(params["trunk"], config, batch, rope, numerics, remat, mesh)
    head = params["head"]
    return jnp.einsum("rtd,d->rt", hidden.astype(jnp.float32), head["weight"]) + head["bias"]


def value_objective(
    values: Array, batch: PackedBatch, targets: ValueTargets, clip: float
) -> tuple[Array, Metrics]:
    """Returns `value_loss` of a micro-batch, and metrics to sum over micro-batches."""
    mask = batch.response_mask
    loss, metrics = value_loss(values, targets.old_values, targets.returns, mask, batch.weights, clip)
    return loss, {"loss": loss} | metrics


class Critic:
    """Compiled values and updates of one critic architecture.

        state = critic.init(policy_params)
        values = critic.values(state.params, batches)
        state, metrics = critic.update(state, batches, targets)

    Args:
      config: architecture of the policy and of the trunk.
      numerics: numerics of the trainer.
      training: pack_length, rows_per_microbatch and remat are read.
      value_clip: clip range; see `value_loss`.
      optimizer: optimizer of the critic, from `make_optimizer`.
      pool: pool of compiled programs; may be shared.
      mesh: devices to use; None for one.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        training: TrainingConfig,
        value_clip: float,
        optimizer: optax.GradientTransformation,
        pool: ExecutablePool,
        mesh: Mesh | None = None,
    ) -> None:
        self._pool = pool
        self._mesh = mesh
        self._pack_length = training.pack_length
        self._rows_per_microbatch = training.rows_per_microbatch
        self._row_multiple = row_multiple(mesh)
        self._values = functools.partial(
            packed_values, config=config, numerics=numerics, remat=training.remat, mesh=mesh
        )
        self._clip = value_clip
        settings = (training.remat, training.pack_length, training.cast_once)
        self._key = ("critic", config, numerics, settings, mesh, value_clip)
        self._rope = jnp.asarray(rope_table(config, training.pack_length))
        self._replicated = self._shardings = None
        if mesh is not None:
            self._replicated = replicated_sharding(mesh)
            trunk = {name: leaf for name, leaf in param_shardings(config, mesh).items() if name != "lm_head"}
            head = {"weight": self._replicated, "bias": self._replicated}
            self._shardings = {"trunk": trunk, "head": head}
            self._rope = target.put(self._rope, self._replicated)
        copies = lambda params: weight_copies(params["trunk"], numerics, training)  # noqa: E731
        arguments = (optimizer, pool, self._key, (), self._shardings, self._replicated)
        self._accumulation = Accumulation(*arguments, copies)

    def init(self, policy_params: Params) -> TrainState:
        """Returns the state before the first update. `policy_params` are copied, and stay valid."""
        params = critic_params(policy_params)
        if self._shardings is not None:
            params = target.put(params, self._shardings)
        return self._accumulation.init(params)

    def warm_up(self, state: TrainState, sizes: Sequence[int] | None = None) -> None:
        """Compiles every program that `values` and `update` need, without running any; `sizes` as in
        `Trainer.warm_up`.
        """
        every = microbatch_sizes(self._rows_per_microbatch, self._row_multiple)
        for batch in map(self._put, empty_batches(every if sizes is None else sizes, self._pack_length)):
            self._values_program((state.params, batch, self._rope))
            targets = ValueTargets(batch.advantages, batch.advantages)
            self._accumulation.compile(state, (batch, targets, self._rope), self._step, ("values",))

    def values(self, params: Params, batches: Sequence[PackedBatch]) -> list[np.ndarray]:
        """Returns values before each target, float32 [R, T] per batch; undefined outside `response_mask`."""
        args = [(params, self._put(batch), self._rope) for batch in batches]
        values = [self._values_program(inputs)(*inputs) for inputs in args]
        return [processes.to_host(array) for array in values]

    def update(
        self, state: TrainState, microbatches: Sequence[PackedBatch], targets: Sequence[ValueTargets]
    ) -> tuple[TrainState, dict[str, float]]:
        """One update on a mini-batch. Consumes `state`.

        Args:
          state: state from `init` or an earlier update.
          microbatches: micro-batches of the mini-batch, with the token weights of the policy's update.
          targets: targets of every micro-batch.

        Returns:
          The new state and metrics: `loss`, `clip_fraction`, `gradient_norm` before clipping.
        """
        inputs = [
            (self._put(batch), self._put(batch_targets), self._rope)
            for batch, batch_targets in zip(microbatches, targets, strict=True)
        ]
        state, metrics = self._accumulation.update(state, inputs, self._step, ("values",))
        return state, {name: float(value) for name, value in metrics.items()}

    def _put(self, tree):
        """Puts a batch or targets on the mesh, without the logprobs that only the policy's update reads."""
        if isinstance(tree, PackedBatch):
            tree = tree.replace(old_logprobs=None)
        return tree if self._mesh is None else target.put(tree, batch_sharding(self._mesh))

    def _values_program(self, args: tuple):
        return self._pool.get(("values", args[1].shapes, *self._key), self._scoring, args)

    # -- pure functions, compiled by the pool ----------------------------------------------------------------

    def _scoring(self, params: Params, batch: PackedBatch, rope: Array) -> Array:
        return self._values(params, batch=batch, rope=rope)

    def _step(
        self,
        params: Params,
        batch: PackedBatch,
        targets: ValueTargets,
        rope: Array,
        copies: Params | None = None,
    ) -> Sums:
        def loss(params: Params) -> tuple[Array, Metrics]:
            params = params | {"trunk": with_copies(params["trunk"], copies)}
            return value_objective(self._scoring(params, batch, rope), batch, targets, self._clip)

        return jax.grad(loss, has_aux=True)(params)
