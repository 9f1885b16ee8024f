"""Updates of LoRA's factors: gradients of factors, moments of factors, and merged matrices after each
update.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax import target
from rljax.engine.executables import ExecutablePool
from rljax.learning.accumulation import Accumulation, Step, TrainState
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, Factors, Matrices, matrices_of, merge, with_matrices
from rljax.models.sharding import factor_shardings, param_shardings
from rljax.models.transformer import Params
from rljax.numerics.rows import cast_matrices
from rljax.sharding import constrain, replicated_sharding


class FactorUpdates:
    """Compiled updates of the factors of one policy, with the interface of `Accumulation`. Its step functions
    have the factors as their first argument, and the merged params as their last.

    Args:
      compute_dtype: type of base and merged matrices.
      optimizer, pool, key, maxima: see `Accumulation`.
      mesh: devices to use; None for one.
    """

    def __init__(
        self,
        adapter: Adapter,
        config: ModelConfig,
        compute_dtype: jnp.dtype,
        optimizer: optax.GradientTransformation,
        pool: ExecutablePool,
        key: tuple[Hashable, ...],
        maxima: Sequence[str] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self._adapter, self._lora = adapter, adapter.lora
        self._dtype = compute_dtype
        self._pool = pool
        self._key = (*key, adapter.lora)
        self._shardings = self._factor_shardings = replicated = None
        if mesh is not None:
            self._shardings = matrices_of(param_shardings(config, mesh), adapter.lora)
            self._factor_shardings = factor_shardings(config, mesh, adapter.lora.names)
            replicated = replicated_sharding(mesh)
        self._accumulation = Accumulation(
            optimizer, pool, self._key, maxima, self._factor_shardings, replicated
        )

    def init(self, params: Params) -> TrainState:
        """Returns the state before the first update, whose params are `params` with the adapter merged in.
        Shares the arrays of the others, which no update changes.
        """
        params, factors = cast_matrices(params, self._dtype), self._adapter.factors
        if self._factor_shardings is not None:
            factors = target.put(factors, self._factor_shardings)
        inner = self._accumulation.init(factors)
        trained = TrainState(None, inner.optimizer_state, inner.updates, factors=inner.params)
        return self.merged(params, trained)

    def merged(self, base: Params, trained: TrainState) -> TrainState:
        """Returns the state with this base and these factors; shares all arrays but the merged matrices."""
        args = (matrices_of(base, self._lora), trained.factors)
        params = with_matrices(base, self._merge_program(args)(*args))
        return trained.replace(params=params, base=args[0])

    def compile(self, state: TrainState, inputs: tuple, step: Step, kind: tuple[Hashable, ...]) -> None:
        """Compiles every program that an `update` with such inputs needs, without running any."""
        self._accumulation.compile(_inner(state), (*inputs, state.params), step, kind)
        self._merge_program((state.base, state.factors))

    def update(
        self, state: TrainState, micro_batches: Sequence[tuple], step: Step, kind: tuple[Hashable, ...]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Runs one update. Consumes `state`: its merged matrices are deleted. See `Accumulation.update`."""
        inputs = [(*each, state.params) for each in micro_batches]
        inner, metrics = self._accumulation.update(_inner(state), inputs, step, kind)
        # Before others are made, so that there is never a third copy beside base and merged matrices.
        for matrix in jax.tree.leaves(matrices_of(state.params, self._lora)):
            matrix.delete()
        trained = state.replace(
            optimizer_state=inner.optimizer_state, updates=inner.updates, factors=inner.params
        )
        return self.merged(base_params(state), trained), metrics

    def _merge_program(self, args: tuple) -> Callable[..., Matrices]:
        return self._pool.get(("merge", *self._key), self._merge, args)

    def _merge(self, base: Matrices, factors: Factors) -> Matrices:
        return constrain(merge(base, factors, self._lora), self._shardings)


def _inner(state: TrainState) -> TrainState:
    """The state of the factors as that of an `Accumulation`."""
    return TrainState(state.factors, state.optimizer_state, state.updates)


def trained_alone(state: TrainState) -> TrainState:
    """Returns what a checkpoint keeps of a state: under LoRA, neither the base nor what is merged from it."""
    return state if state.factors is None else state.replace(params=None, base=None)


def base_params(state: TrainState) -> Params:
    """Returns the policy without its adapter; arrays are shared."""
    return with_matrices(state.params, state.base)
