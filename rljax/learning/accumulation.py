"""Updates of params by gradients summed over micro-batches, for policy, critic and EAGLE heads.

A step function returns the gradients and metrics of one micro-batch. Every token has its weight in the whole
mini-batch, so sums over micro-batches are those of the mini-batch.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.engine.background import compile_all
from rljax.engine.executables import ExecutablePool
from rljax.models.transformer import Params
from rljax.sharding import constrain

Metrics = dict[str, Array]
Sums = tuple[Params, Metrics]
"""Gradients and metrics, added up over micro-batches."""
Step = Callable[..., Sums]
"""(params, *inputs of a micro-batch, *copies) -> its gradients and metrics."""


@struct.dataclass
class TrainState:
    """State that an update changes and a checkpoint keeps.

    Attributes:
      params: float32 weights; under LoRA the merged policy, its matrices in the compute dtype.
      optimizer_state: state of the Optax optimizer; under LoRA that of the factors.
      updates: int32 [], updates so far.
      critic: the state of the critic; None if the algorithm trains none.
      factors, base: under LoRA the trained factors and the matrices that they are merged with
        (`rljax/models/lora.py`); else None.
    """

    params: Params
    optimizer_state: optax.OptState
    updates: Array
    critic: Optional["TrainState"] = None
    factors: Any = None
    base: Any = None


def apply_gradients(
    state: TrainState, gradients: Params, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Array]:
    """Applies one update; returns the new state, and the norm of the gradients before clipping, []."""
    changes, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params)
    params = optax.apply_updates(state.params, changes)
    norm = optax.tree.norm(gradients)
    return TrainState(params, optimizer_state, state.updates + 1), norm


class Accumulation:
    """Compiled updates of one tree of params.

    Args:
      optimizer: from `make_optimizer`.
      key: everything that the programs depend on, except their arguments.
      maxima: metrics that are combined by their maximum, at least 0; all others are added up.
      shardings: shardings of params on a mesh; None without one.
      replicated: the sharding of replicated arrays; None without a mesh.
      copies: computes of params what every step of an update would compute again.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        pool: ExecutablePool,
        key: tuple[Hashable, ...],
        maxima: Sequence[str] = (),
        shardings: Any = None,
        replicated: Any = None,
        copies: Callable[[Params], tuple] = lambda params: (),
    ) -> None:
        self._optimizer, self._pool, self._key = optimizer, pool, key
        self._maxima, self._copies = maxima, copies
        self._shardings, self._replicated = shardings, replicated

    def init(self, params: Params) -> TrainState:
        """Returns the state before the first update. Copies `params` (any float dtype), which stay valid."""
        dtype = str(jax.tree.leaves(params)[0].dtype)
        key = ("train_init", dtype, self._optimizer, *self._key)
        return self._pool.get(key, self._init, (params,))(params)

    def compile(self, state: TrainState, inputs: tuple, step: Step, kind: tuple[Hashable, ...]) -> None:
        """Compiles every program that an `update` with such inputs needs, without running any: the sums of
        gradients take memory that a rollout may need, which decodes meanwhile.
        """
        step = jax.jit(step, inline=True)  # traced once for all programs
        args = (state.params, *inputs)
        copies, sums = jax.tree.map(self._shape, self._begin_program(args, step, kind).out_info)
        self._gradient_program((*args, *copies, *sums), step, kind)
        self._apply_program((state, sums[0]))

    def update(
        self, state: TrainState, micro_batches: Sequence[tuple], step: Step, kind: tuple[Hashable, ...]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Runs one update. Consumes `state`.

        Args:
          state: state from `init` or an earlier update.
          micro_batches: inputs of every micro-batch, its `PackedBatch` first.
          kind: key of the step function, and of the inputs that are not None.

        Returns:
          The new state; the metrics of the mini-batch on the host, with `gradient_norm` before clipping.
        """
        if not micro_batches:
            raise ValueError("an update needs at least one micro-batch")
        step = jax.jit(step, inline=True)  # traced once for all programs
        begin = self._begin_program((state.params, *micro_batches[0]), step, kind)
        copies, sums = begin(state.params)
        sizes = {inputs[0].shapes: (state.params, *inputs, *copies, *sums) for inputs in micro_batches}
        # Side by side, where they are not compiled yet: usually two, of half and of whole micro-batches.
        if len(sizes) > 1:
            compile_all(
                functools.partial(self._gradient_program, args, step, kind) for args in sizes.values()
            )
        for inputs in micro_batches:
            args = (state.params, *inputs, *copies, *sums)
            sums = self._gradient_program(args, step, kind)(*args)
        for copy in jax.tree.leaves(copies):
            copy.delete()  # before the optimizer needs memory
        total, metrics = sums
        state, norm = self._apply_program((state, total))(state, total)
        return state, jax.device_get(metrics | {"gradient_norm": norm})

    # -- compiled programs -----------------------------------------------------------------------------------

    def _gradient_program(self, args: tuple, step: Step, kind: tuple[Hashable, ...]) -> Callable[..., Sums]:
        def accumulate(*args: Any) -> Sums:
            return self._accumulate(step, *args)

        return self._pool.get(
            ("gradients", *kind, args[1].shapes, *self._key),
            accumulate,
            args,
            donate_argnums=(len(args) - 2, len(args) - 1),
        )

    def _apply_program(self, args: tuple) -> Callable[..., tuple[TrainState, Array]]:
        return self._pool.get(("apply", self._optimizer, *self._key), self._apply, args, donate_argnums=(0,))

    def _begin_program(self, args: tuple, step: Step, kind: tuple[Hashable, ...]) -> Any:
        """Returns the program of copies, and of zeros in the form of the result of `step(*args, *copies)`."""
        key = ("begin", *kind, *self._key)

        def begin(params: Params) -> tuple[tuple, Sums]:
            copies = self._copies(params)
            # Traces the step for its shapes, unless the program is stored.
            shapes = jax.eval_shape(step, *args, *copies)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return copies, self._constrain_sums(zeros)

        return self._pool.get(key, begin, args[:1])

    def _shape(self, result: Any) -> jax.ShapeDtypeStruct:
        sharding = None if self._shardings is None else result.sharding
        return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding)

    # -- pure functions, compiled by the pool ----------------------------------------------------------------

    def _init(self, params: Params) -> TrainState:
        # A copy even where the dtype is right: an update overwrites the state, not the caller's params.
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
        state = TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))
        return self._constrain_state(state)

    def _accumulate(self, step: Step, *args: Any) -> Sums:
        *args, total, metrics = args
        more, more_metrics = step(*args)
        metrics = {
            name: (jnp.maximum if name in self._maxima else jnp.add)(metrics[name], value)
            for name, value in more_metrics.items()
        }
        return self._constrain_sums((jax.tree.map(jnp.add, total, more), metrics))

    def _apply(self, state: TrainState, total: Params) -> tuple[TrainState, Array]:
        state, norm = apply_gradients(state, total, self._optimizer)
        return self._constrain_state(state), constrain(norm, self._replicated)

    # -- shardings on the mesh -------------------------------------------------------------------------------

    def _constrain_sums(self, sums: Sums) -> Sums:
        if self._shardings is None:
            return sums
        total, metrics = sums
        return constrain(total, self._shardings), constrain(metrics, self._replicated)

    def _constrain_state(self, state: TrainState) -> TrainState:
        """Shards optimizer moments as their weights."""
        if self._shardings is None:
            return state
        optimizer_state = optax.tree_map_params(
            self._optimizer,
            constrain,
            state.optimizer_state,
            self._shardings,
            transform_non_params=lambda leaf: constrain(leaf, self._replicated),
        )
        return TrainState(
            constrain(state.params, self._shardings),
            optimizer_state,
            constrain(state.updates, self._replicated),
        )
