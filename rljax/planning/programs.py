"""The run's engine and trainer with shapes in the place of arrays, and the programs that they compile.

Programs come from the methods that the run itself calls (`DecodeEngine.prefill`, `Trainer.warm_up`, ...).
Only their pool differs: it compiles and does not run. A plan can therefore not drift from the run.
"""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from drafters.base import Drafter
from drafters.quantized import QuantizedDrafter
from rljax.assembly.adapter import factor_template
from rljax.assembly.decoding import evaluation_sampling, sampling_params
from rljax.assembly.saved_policy import saved_architecture
from rljax.config import ExperimentConfig
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftTree, NodeRows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.kv_cache import KVCache
from rljax.engine.loop_choice import is_measured
from rljax.engine.placement import cache_shardings, decode_state_shardings
from rljax.engine.shapes import ProgramList, Shapes
from rljax.engine.state import DecodeState
from rljax.environments.registry import is_environment
from rljax.learning.accumulation import TrainState
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import PackedBatch, spans
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, Lora, matrices_of
from rljax.models.sharding import Weights, factor_shardings, param_shardings, shard_params
from rljax.models.transformer import Params, param_shapes
from rljax.numerics.rows import Numerics, cast_matrices
from rljax.planning.pool import PlanningPool, Program, Recording
from rljax.sharding import replicated_sharding
from rljax.training.learner import make_critic
from rljax.training.update import Recipe, Trainer


class PlannedEngine(DecodeEngine):
    """A decode engine that compiles, and runs nothing."""

    def verify_bytes(self, params: Params, state: DecodeState, tree: DraftTree, rows: NodeRows) -> int:
        """Compiles a verifying pass, and does not wait for what it needs."""
        self._verifying(params, state, tree, rows, None)
        return 0


@dataclasses.dataclass(frozen=True)
class PlannedDrafter:
    """Shapes of everything that a drafter holds on the devices.

    Attributes:
      weights: its weights to draft with.
      state: its caches for the largest decode state.
      begin: begins to compile the largest program of every kind that it needs in a run. Returns the pool that
        will have them, and knows how many smaller ones there are. Call it under `target.tracing_for`.
      training: weights and moments of a head that is trained.
      unread: bytes of a head's features on a device that wait to be read.
    """

    weights: Params
    state: Any
    begin: Callable[["PlannedRun"], PlanningPool]
    training: Any = None
    unread: int = 0


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Shapes of everything that a run holds, and its programs.

    Attributes:
      train_state: weights, moments and, with a critic, its state.
      reference: weights of the reference, or None; under LoRA they may be the base.
      decode_params: the engine's copy of the weights.
      draft_params: quantized copies of the weights, by the drafter's name.
      drafters: EAGLE heads and small models, by name.
      state: the largest decode state.
      skipped: number of programs that were only counted, by kind.
    """

    config: ExperimentConfig
    model: ModelConfig
    buckets: Buckets
    train_state: TrainState
    reference: Params | None
    decode_params: Params
    draft_params: dict[str, Params]
    state: DecodeState
    drafters: dict[str, PlannedDrafter] = dataclasses.field(default_factory=dict)
    programs: tuple[Program, ...] = ()
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Planning:
    """Everything that a run is planned from.

    Attributes:
      eos_token_ids: tokens that end a response.
      drafters: drafters by name.
      mesh: devices; None for one.
      device: the first device.
      several_processes: the run has them.
      hidden_layers: see `DecodeEngine`; of a policy that is planned with fewer layers, as many others.
      compilers: see `PlanningPool`; None where nothing is compiled.
    """

    config: ExperimentConfig
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    numerics: Numerics
    buckets: Buckets
    drafters: dict[str, Drafter]
    mesh: Mesh | None
    device: Any
    several_processes: bool
    hidden_layers: tuple[int, ...] | None = None
    compilers: Executor | None = None

    @property
    def _default(self) -> Any:
        return SingleDeviceSharding(self.device) if self.mesh is None else replicated_sharding(self.mesh)

    def place(self, tree: Any) -> Any:
        """Returns shapes with the shardings that the run's arrays have: those of decode states, caches and
        weights by their tables, everything else replicated.
        """

        def placed(part: Any) -> Any:
            if self.mesh is None or not _has_table(part):
                return jax.tree.map(lambda leaf: _placed(leaf, self._default), part)
            if isinstance(part, DecodeState):
                return jax.tree.map(_placed, part, decode_state_shardings(part, self.model, self.mesh))
            if isinstance(part, KVCache):
                return jax.tree.map(_placed, part, cache_shardings(part, self.model, self.mesh))
            return jax.tree.map(_placed, part, self._shardings_of(part))

        return jax.tree.map(placed, tree, is_leaf=_has_table)

    def _shardings_of(self, tree: Params) -> Params:
        """Shardings of params, of some of them, or of LoRA's factors."""
        names = tuple(tree["layers"][0])
        if any(isinstance(entry, dict) for entry in tree["layers"][0].values()):
            return factor_shardings(self.model, self.mesh, names)
        shardings = param_shardings(self.model, self.mesh)
        layers = [{name: layer[name] for name in names} for layer in shardings["layers"]]
        return {name: layers if name == "layers" else shardings[name] for name in tree}

    # -- the parts of a run ----------------------------------------------------------------------------------

    def pool(
        self, skips: Callable[[tuple], bool] = lambda args: False, drafter: str | None = None
    ) -> PlanningPool:
        """Returns a pool for the devices; arguments as of `PlanningPool`."""
        assert self.compilers is not None
        exact = bool(self.config.engine.row_invariant)
        return PlanningPool(self.compilers, exact, self.place, self._default, skips, drafter)

    def _params(self, dtype: str) -> Params:
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
            param_shapes(self.model),
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def decode_params(self, weights: Weights = "replicated") -> Params:
        """Returns shapes of the engine's copy of the weights, as from `DecodeEngine.load_params`."""
        cast = jax.eval_shape(
            lambda params: cast_matrices(params, self.numerics.dtype), self._params("float32")
        )
        if self.mesh is None:
            return self.place(cast)
        return shard_params(cast, self.model, self.mesh, decoding=True, split=weights == "fsdp")

    def engine(self, pool: ExecutablePool) -> PlannedEngine:
        """Returns the run's engine, with shapes in the place of arrays."""
        config, depth, read = self.config, self.model.num_layers, self.hidden_layers
        engine = PlannedEngine(
            self.model,
            self.numerics,
            sampling_params(config),
            self.buckets,
            self.eos_token_ids,
            config.engine.decode_steps_per_sync,
            pool,
            self.mesh,
            config.engine.verification,
            None if read is None else tuple(min(layer, depth) for layer in read),
            per_slot_sampling=evaluation_sampling(config) is not None,
            weights=config.engine.weights,
        )
        loop = config.engine.decode_loop
        may_be_fixed = loop == "fixed" or is_measured(loop, self.several_processes)
        engine.fixed_gain = math.inf if may_be_fixed else 0.0
        return engine

    def plain(self, engine: DecodeEngine, params: Params) -> ProgramList:
        """Returns what plain decoding of the run compiles."""
        config = self.config
        prompt_length = config.rollout.max_prompt_length
        shapes = Shapes(
            self.buckets,
            self.buckets.batch[-1],
            prompt_length,
            prompt_length + config.rollout.max_response_length,
            config.speculation.max_batch,
            late_inserts=bool(config.speculation.fills_idle_slots),
            appends=config.tools is not None or is_environment(config.task.name or ""),
        )
        return ProgramList(engine, params, shapes)

    def _trainer(self, pool: ExecutablePool) -> Trainer:
        config = self.config
        optimizer = make_optimizer(config.optimizer, config.training.updates)
        sampling = sampling_params(config)
        adapter = None
        if config.policy.lora is not None:
            lora = Lora.of(config.policy.lora, self.model)
            adapter = Adapter(lora, self.place(factor_template(self.model, lora)))
        recipe = Recipe(sampling, config.algorithm, config.training, optimizer)
        return Trainer(self.model, self.numerics, recipe, pool, self.mesh, adapter)

    def shapes(self) -> PlannedRun:
        """Returns the shapes of a run, without its programs. Call it under `target.tracing_for`."""
        return self._shapes(*self._trained(Recording()))

    def begin(self) -> tuple[PlannedRun, PlanningPool]:
        """Begins to compile the programs of a run. Returns its shapes, and the pool that will have the
        programs. Call it under `target.tracing_for`.
        """
        training = self.config.training
        rows, span = training.rows_per_microbatch, spans(training.pack_length)[-1]

        def is_small(arg: Any) -> bool:
            return isinstance(arg, PackedBatch) and (len(arg.tokens) < rows or arg.span != span)

        pool = self.pool(lambda args: any(map(is_small, args)))
        trainer, critic = self._trained(pool)
        run = self._shapes(trainer, critic)
        self._compile_training(run, trainer, critic)
        return dataclasses.replace(run, draft_params=self._compile_rollout(run, pool)), pool

    def _trained(self, pool: ExecutablePool) -> tuple[Trainer, Any]:
        """The run's trainer and its critic, None without one."""
        trainer = self._trainer(pool)
        return trainer, make_critic(self.config, trainer)

    def _shapes(self, trainer: Trainer, critic: Any) -> PlannedRun:
        state, buckets = self._train_state(trainer, critic), self.buckets
        return PlannedRun(
            config=self.config,
            model=self.model,
            buckets=buckets,
            train_state=state,
            reference=self._reference(state),
            decode_params=self.decode_params(self.config.engine.weights),
            draft_params={},
            state=self.engine(Recording()).state_shapes(buckets.batch[-1], buckets.cache[-1]),
        )

    @property
    def _teacher(self) -> "Planning | None":
        """The same experiment with the architecture of `algorithm.teacher`; None without one."""
        path = self.config.algorithm.teacher
        return None if path is None else dataclasses.replace(self, model=saved_architecture(path))

    def _reference(self, state: TrainState) -> Params | None:
        if self.config.algorithm.kl_coefficient == 0:
            return None
        teacher = self._teacher
        return state.params if teacher is None else teacher.place(teacher._params("float32"))

    def _train_state(self, trainer: Trainer, critic: Any) -> TrainState:
        params = trainer.place(self.place(self._params("float32")))
        adapter = trainer.adapter

        def init(params: Params) -> TrainState:
            count = jnp.zeros((), jnp.int32)
            critic_state = None
            if critic is not None:
                trunk = {name: leaf for name, leaf in params.items() if name != "lm_head"}
                head = {"weight": jnp.zeros(self.model.hidden_size), "bias": jnp.zeros(())}
                values = {"trunk": trunk, "head": head}
                critic_state = TrainState(values, trainer.optimizer.init(values), count)
            if adapter is not None:
                params, factors = cast_matrices(params, self.numerics.dtype), adapter.factors
                base = matrices_of(params, adapter.lora)
                return TrainState(
                    params, trainer.optimizer.init(factors), count, critic_state, factors=factors, base=base
                )
            return TrainState(params, trainer.optimizer.init(params), count, critic_state)

        return self.place(jax.eval_shape(init, params))

    def _compile_training(self, run: PlannedRun, trainer: Trainer, critic: Any) -> None:
        """As `Learner.warm_up`."""
        has_reference = run.reference is not None
        in_loss = has_reference and self.config.algorithm.kl_in == "loss"
        trainer.warm_up(run.train_state.replace(critic=None), in_loss)
        if has_reference:
            teacher = self._teacher
            scorer = trainer if teacher is None else trainer.of_architecture(teacher.model)
            scorer.warm_up_score(run.reference, unfiltered=True)
        if critic is not None:
            critic.warm_up(run.train_state.critic)

    def _compile_rollout(self, run: PlannedRun, pool: PlanningPool) -> dict[str, Params]:
        """Compiles the largest of every kind of program that `ProgramList` has, every size of a verifying
        pass over the largest batch that is verified, and drafting with quantized copies of the weights, which
        it returns. Heads and small models have programs of their own (`rljax/planning/drafters.py`).
        """
        recording, params, weights = Recording(), run.decode_params, {}
        engine = self.engine(recording)
        plain = self.plain(engine, params)
        for compile_program in plain.everything():
            compile_program()
        shapes = plain.shapes
        for name, drafter in self.drafters.items() if shapes.verified else ():
            if drafter.policy_weights is not None:
                drafter.attach(engine)
                weights[name] = self._quantized(drafter, params)
                for state in shapes.verified:
                    engine.compile_draft(weights[name], *state)
        recording.compile_largest(pool)
        verifying = self.engine(pool)
        for state in shapes.verified:
            passes = shapes.passes(state)
            if state != shapes.verified[-1]:
                pool.skip("verify", len(passes))
                continue
            for each in passes:
                verifying.compile_verify(params, *each)
        return weights

    def _quantized(self, drafter: QuantizedDrafter, params: Params) -> Params:
        """Returns shapes of the weights from `QuantizedPolicy.refresh`, placed as its program places them."""
        from drafters.quantized import PROJECTIONS

        projections = [{name: layer[name] for name in PROJECTIONS} for layer in params["layers"]]
        lowered = drafter.policy_weights._quantize_layer.lower(projections[0], None)
        shardings = lowered.compile().output_shardings
        results = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
        quantized = jax.tree.map(_placed, results, shardings)
        return params | {"layers": [layer | quantized for layer in params["layers"]]}


def _has_table(part: Any) -> bool:
    """Whether a table has the shardings of a part of a tree: a decode state, a cache, weights."""
    return isinstance(part, DecodeState | KVCache) or (isinstance(part, dict) and "layers" in part)


def _placed(leaf: Any, sharding: NamedSharding | SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def shard_size(leaf: Any) -> int:
    """Returns the number of elements of a placed shape on one device."""
    return math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))


def device_bytes(tree: Any) -> int:
    """Returns the bytes of placed shapes on one device, without a device's padding."""
    return sum(shard_size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shared_bytes(tree: Params, other: Params) -> int:
    """Returns the bytes on one device of leaves with the same type and sharding in both trees: arrays that
    `DecodeEngine.load_params` shares with the trainer.
    """
    return sum(
        device_bytes(a)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
        if a.dtype == b.dtype and a.sharding == b.sharding
    )
