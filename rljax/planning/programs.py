"""The run's engine and trainer with shapes in the place of arrays, and the programs that they compile.

Programs come from the methods that the run itself calls (`DecodeEngine.prefill`, `Trainer.warm_up`, ...).
Only their pool differs: it compiles and does not run. A plan can therefore not drift from the run.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from drafters.base import Drafter
from drafters.quantized import QuantizedDrafter
from rljax.config import ExperimentConfig
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftTree, NodeRows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.kv_cache import KVCache
from rljax.engine.placement import cache_shardings, decode_state_shardings
from rljax.engine.state import DecodeState, Prefix
from rljax.learning.accumulation import TrainState
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import PackedBatch
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, Lora, matrices_of
from rljax.models.transformer import Params, param_shapes
from rljax.numerics.rows import Numerics, cast_matrices
from rljax.sharding import (
    Weights,
    factor_shardings,
    param_shardings,
    replicated_sharding,
    shard_params,
)
from rljax.training.adapter import factor_template
from rljax.training.assembly import evaluation_sampling, sampling_params
from rljax.training.learner import make_critic
from rljax.training.saved_policy import saved_architecture
from rljax.training.update import Trainer

if TYPE_CHECKING:
    from rljax.planning.heads import PlannedHead
    from rljax.planning.small_models import PlannedSmallModel


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program; all figures are of one device.

    Attributes:
      name: what it computes, such as "verify", with its sizes.
      kind: "prefill", "insert", "generate", "verify", "draft", "grow", "compact", "score", "gradients",
        "apply" or another name of the pool; of a drafter with its name in front.
      drafter: the head or the small model whose program it is; None for those of the policy.
      arguments: bytes of its arguments.
      outputs: bytes of its results that take the place of no argument.
      temporaries: bytes that it needs beside these.
      seconds: time to trace, lower and compile it.
      flops: FLOPs that XLA counts, each loop's body once.
      accessed: bytes that XLA counts, each loop's body once.
    """

    name: str
    kind: str
    drafter: str | None
    arguments: int
    outputs: int
    temporaries: int
    seconds: float
    flops: float
    accessed: float

    @property
    def total(self) -> int:
        """Bytes on the device while it runs, without arrays that are none of its arguments."""
        return self.arguments + self.outputs + self.temporaries


class _Planned:
    """Stands for a compiled program in the run's code: a call returns the shapes of its results."""

    def __init__(self, results: Any) -> None:
        self.out_info = results

    def __call__(self, *args: Any) -> Any:
        del args
        return self.out_info


class PlanningPool(ExecutablePool):
    """A pool that compiles programs for the shapes of their arguments and runs none.

    Programs are traced by the thread that asks for them, and may be compiled by others meanwhile.

    Args:
      compilers: threads that compile; None for the one that asks.
      row_invariant: see `ExecutablePool`.
      place: gives a result's shapes the shardings that the run's arrays have.
      default: the sharding of arguments that have none.
      skips: whether a program with these arguments is only counted.
      drafter: whose programs they are; None for the policy's.

    Attributes:
      skipped: number of programs that were only counted, by kind.
    """

    def __init__(
        self,
        compilers: Executor | None,
        row_invariant: bool,
        place: Callable[[Any], Any],
        default: Any,
        skips: Callable[[tuple], bool],
        drafter: str | None = None,
    ) -> None:
        super().__init__(row_invariant)
        self._compilers = compilers
        self._place = place
        self._default = default
        self._skips = skips
        self._drafter = drafter
        self._by_key: dict[Hashable, _Planned] = {}
        self._under_way: list[Future[Program]] = []
        self.skipped: dict[str, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def skip(self, kind: str, count: int) -> None:
        """Counts programs of a kind that are not compiled."""
        kind = self._named(kind)
        self.skipped[kind] = self.skipped.get(kind, 0) + count

    def _named(self, kind: str) -> str:
        return kind if self._drafter is None else f"{self._drafter} {kind}"

    def get(
        self,
        key: Hashable,
        function: Callable[..., Any],
        args: tuple,
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        """Begins to compile the program of `key`; see `ExecutablePool.get`. A skipped one has no results."""
        if key in self._by_key:
            return self._by_key[key]
        if self._skips(args):
            self.skip(key[0], 1)
            return None
        start = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*jax.tree.map(self._abstract, args))
        tracing = time.perf_counter() - start
        self._under_way.append(self._submit(key, lowered, tracing))
        results = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
        self._by_key[key] = _Planned(self._place(results))
        return self._by_key[key]

    def _submit(self, key: Any, lowered: Any, tracing: float) -> Future[Program]:
        if self._compilers is not None:
            return self._compilers.submit(self._compiled, key, lowered, tracing)
        compiled: Future[Program] = Future()
        compiled.set_result(self._compiled(key, lowered, tracing))
        return compiled

    def programs(self) -> Iterator[Program]:
        """Yields the programs, in the order in which they were asked for; waits for each."""
        for program in self._under_way:
            yield program.result()

    def _compiled(self, key: Any, lowered: Any, tracing: float) -> Program:
        """Compiles a program, of which tracing took so many seconds, and returns its figures."""
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=self._options)
        seconds = tracing + time.perf_counter() - start
        memory = compiled.memory_analysis()
        cost = compiled.cost_analysis() or {}
        cost = cost[0] if isinstance(cost, list) else cost
        return Program(
            name=self._named(program_name(key)),
            kind=self._named(key[0]),
            drafter=self._drafter,
            arguments=int(memory.argument_size_in_bytes),
            outputs=int(memory.output_size_in_bytes - memory.alias_size_in_bytes),
            temporaries=int(memory.temp_size_in_bytes),
            seconds=seconds,
            flops=float(cost.get("flops", 0.0)),
            accessed=float(cost.get("bytes accessed", 0.0)),
        )

    def _abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._default if sharding is None else sharding)


def program_name(key: Any) -> str:
    """Returns the name of a program from its key in the pool: its kind, and the sizes that follow it."""
    sizes = []
    for part in key[1:]:
        if isinstance(part, str):
            sizes.append(part)
        elif isinstance(part, int) and not isinstance(part, bool):
            sizes.append(str(part))
        elif isinstance(part, tuple) and part and all(isinstance(size, int) for size in part):
            sizes.append("x".join(map(str, part)))
        elif not isinstance(part, bool):
            break
    return " ".join([key[0], *(size for size in sizes if len(size) < 40)])


class PlannedEngine(DecodeEngine):
    """A decode engine whose states are shapes."""

    def init_state(self, slots: int, length: int) -> DecodeState:
        """Returns the shapes of `DecodeEngine.init_state`."""
        return self.state_shapes(self.buckets.batch_for(slots), self.buckets.cache_for(length))

    def verify_bytes(self, params: Params, state: DecodeState, tree: DraftTree, rows: NodeRows) -> int:
        """Compiles a verifying pass, and does not wait for what it needs."""
        self._verifying(params, state, tree, rows, None)
        return 0

    def compile_generate(self, params: Params, state: DecodeState) -> None:
        """Compiles plain decoding of a state."""
        self._generating(params, state, 0, 0)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Shapes of everything that a run holds, and its programs.

    Attributes:
      config: the experiment.
      model: architecture of the policy.
      buckets: shapes of decoding.
      train_state: weights, moments and, with a critic, its state.
      reference: weights of the reference, or None; under LoRA they may be the base.
      decode_params: the engine's copy of the weights.
      draft_params: quantized copies of the weights, by the drafter's name.
      heads: EAGLE heads, by name.
      small_models: small models that draft, by name.
      prefill_state: the decode state that prompts are first inserted into.
      state: the largest decode state.
      programs: compiled programs.
      skipped: number of programs that were only counted, by kind.
      notes: sentences for the user on what is not planned.
    """

    config: ExperimentConfig
    model: ModelConfig
    buckets: Buckets
    train_state: TrainState
    reference: Params | None
    decode_params: Params
    draft_params: dict[str, Params]
    prefill_state: DecodeState
    state: DecodeState
    heads: dict[str, "PlannedHead"] = dataclasses.field(default_factory=dict)
    small_models: dict[str, "PlannedSmallModel"] = dataclasses.field(default_factory=dict)
    programs: tuple[Program, ...] = ()
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _Parts(NamedTuple):
    """What compiles the programs of a run."""

    pool: PlanningPool
    engine: PlannedEngine
    trainer: Trainer
    critic: Any


@dataclasses.dataclass(frozen=True)
class Planning:
    """Everything that a run is planned from.

    Attributes:
      config: the experiment.
      model: architecture of the policy.
      eos_token_ids: tokens that end a response.
      numerics: see `Numerics`.
      buckets: shapes of decoding.
      drafters: drafters by name.
      mesh: devices; None for one.
      device: the first device.
      hidden_layers: see `DecodeEngine`.
      compilers: see `PlanningPool`.
    """

    config: ExperimentConfig
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    numerics: Numerics
    buckets: Buckets
    drafters: dict[str, Drafter]
    mesh: Mesh | None
    device: Any
    hidden_layers: tuple[int, ...] | None = None
    compilers: Executor | None = None

    @property
    def _default(self) -> Any:
        return SingleDeviceSharding(self.device) if self.mesh is None else replicated_sharding(self.mesh)

    def place(self, tree: Any) -> Any:
        """Returns shapes with the shardings that the run's arrays have: those of decode states, caches and
        weights by their tables, everything else replicated.
        """
        mesh, model = self.mesh, self.model
        if mesh is None or tree is None:
            return jax.tree.map(lambda leaf: _placed(leaf, self._default), tree)
        if isinstance(tree, DecodeState):
            return jax.tree.map(_placed, tree, decode_state_shardings(tree, model, mesh))
        if isinstance(tree, KVCache):
            return jax.tree.map(_placed, tree, cache_shardings(tree, model, mesh))
        if isinstance(tree, Prefix):
            rest = jax.tree.map(lambda leaf: _placed(leaf, self._default), tree.replace(cache=None))
            return rest.replace(cache=self.place(tree.cache))
        if isinstance(tree, TrainState):
            return dataclasses.replace(
                tree,
                params=self.place(tree.params),
                optimizer_state=self.place(tree.optimizer_state),
                updates=self.place(tree.updates),
                critic=self.place(tree.critic),
                factors=self.place(tree.factors),
                base=self.place(tree.base),
            )
        if isinstance(tree, dict) and "layers" in tree:
            return jax.tree.map(_placed, tree, self._shardings_of(tree))
        if isinstance(tree, dict):
            return {name: self.place(value) for name, value in tree.items()}
        if isinstance(tree, tuple):
            parts = map(self.place, tree)
            return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        return jax.tree.map(lambda leaf: _placed(leaf, self._default), tree)

    @property
    def prefixes(self) -> list[tuple[int, int]]:
        """Number of prompts and padded length of every prefill of the run."""
        rows, lengths = self.buckets.prefill()
        longest = next(size for size in lengths if size >= self.config.rollout.max_prompt_length)
        return [(count, length) for count in rows for length in lengths if length <= longest]

    @property
    def _layers_read(self) -> tuple[int, ...] | None:
        """The layers whose features the drafters read; of a policy that is planned with fewer layers, as many
        layers.
        """
        depth = self.model.num_layers
        return None if self.hidden_layers is None else tuple(min(n, depth) for n in self.hidden_layers)

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
        exact = bool(self.config.engine.row_invariant)
        return PlanningPool(self.compilers, exact, self.place, self._default, skips, drafter)

    def _params(self, dtype: str) -> Params:
        shapes = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
            param_shapes(self.model),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        return jax.eval_shape(lambda params: params, shapes)

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
        config = self.config
        return PlannedEngine(
            self.model,
            self.numerics,
            sampling_params(config),
            self.buckets,
            self.eos_token_ids,
            config.engine.decode_steps_per_sync,
            pool,
            self.mesh,
            config.engine.verification,
            self._layers_read,
            per_slot_sampling=evaluation_sampling(config) is not None,
            weights=config.engine.weights,
        )

    def _trainer(self, pool: ExecutablePool) -> Trainer:
        config = self.config
        updates = (
            config.training.steps * config.training.minibatches_per_step * config.training.epochs_per_step
        )
        optimizer = make_optimizer(**config.optimizer.model_dump(), total_updates=updates)
        sampling = sampling_params(config)
        adapter = None
        if config.policy.lora is not None:
            lora = Lora.of(config.policy.lora, self.model)
            adapter = Adapter(lora, self.place(factor_template(self.model, lora)))
        arguments = (config.algorithm, config.training, optimizer, pool, self.mesh, adapter)
        return Trainer(self.model, self.numerics, sampling, *arguments)

    def shapes(self) -> PlannedRun:
        """Returns the shapes of a run, without its programs. Call it under `target.tracing_for`."""
        return self._shapes(self._parts())

    def begin(self) -> tuple[PlannedRun, PlanningPool]:
        """Begins to compile the programs of a run. Returns its shapes, and the pool that will have the
        programs. Call it under `target.tracing_for`.
        """
        parts = self._parts()
        run = self._shapes(parts)
        self._compile_training(run, parts.trainer, parts.critic)
        self._compile_decoding(run, parts.engine)
        return dataclasses.replace(run, draft_params=self._compile_drafting(run, parts.engine)), parts.pool

    def _parts(self) -> _Parts:
        pool = self.pool(self._is_smaller_microbatch)
        critic = make_critic(self.config, self.model, self.numerics, pool, self.mesh)
        return _Parts(pool, self.engine(pool), self._trainer(pool), critic)

    def _shapes(self, parts: _Parts) -> PlannedRun:
        config, buckets, engine = self.config, self.buckets, parts.engine
        state = self._train_state(parts.trainer, parts.critic)
        batch, longest = buckets.batch[-1], buckets.cache[-1]
        prefill_length = engine.prefill_length(config.rollout.max_prompt_length)
        return PlannedRun(
            config=config,
            model=self.model,
            buckets=buckets,
            train_state=state,
            reference=self._reference(state),
            decode_params=self.decode_params(config.engine.weights),
            draft_params={},
            prefill_state=engine.init_state(batch, buckets.cache_for(prefill_length)),
            state=engine.init_state(batch, longest),
        )

    def _is_smaller_microbatch(self, args: tuple) -> bool:
        rows = self.config.training.rows_per_microbatch
        return any(isinstance(arg, PackedBatch) and arg.tokens.shape[0] < rows for arg in args)

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
            scorer.warm_up_reference(run.reference)
        if critic is not None:
            critic.warm_up(run.train_state.critic)

    def _compile_decoding(self, run: PlannedRun, engine: PlannedEngine) -> None:
        """Compiles the largest shape of every program of `PlainShapes`, and every verifying pass over the
        largest batch that is verified.
        """
        params, state, buckets = run.decode_params, run.state, self.buckets
        prefill_length = engine.prefill_length(self.config.rollout.max_prompt_length)
        prompts = [[0] * prefill_length] * engine.prefill_rows[-1]
        prefix = engine.prefill(params, prompts)
        engine.bulk_insert(prefix, run.prefill_state, [])
        engine.compile_generate(params, state)
        if len(buckets.cache) > 1:
            engine.grow(engine.init_state(state.batch, buckets.cache[-2]))
        if len(buckets.batch) > 1:
            engine.compact(state, list(range(buckets.batch[-2])))
        batches = buckets.verified_batches(self.config.speculation.max_batch)
        for rows, nodes in buckets.passes(batches[-1]) if batches else []:
            engine.compile_verify(params, batches[-1], buckets.cache[-1], rows, nodes)

    def _compile_drafting(self, run: PlannedRun, engine: PlannedEngine) -> dict[str, Params]:
        """Compiles drafting with quantized copies of the weights, and returns these. Heads and small models
        have programs of their own (`rljax/planning/heads.py`, `small_models.py`).
        """
        buckets, weights = self.buckets, {}
        batches = buckets.verified_batches(self.config.speculation.max_batch)
        for name, drafter in self.drafters.items() if batches else ():
            if isinstance(drafter, QuantizedDrafter):
                drafter.attach(engine)
                weights[name] = self._quantized(drafter, run.decode_params)
                engine.draft(weights[name], engine.init_state(batches[-1], buckets.cache[-1]), 1)
        return weights

    def _quantized(self, drafter: QuantizedDrafter, params: Params) -> Params:
        """Returns shapes of the weights from `QuantizedPolicy.refresh`, placed as its program places them."""
        from drafters.quantized import PROJECTIONS

        projections = [{name: layer[name] for name in PROJECTIONS} for layer in params["layers"]]
        lowered = drafter._policy._quantize_layer.lower(projections[0], None)
        shardings = lowered.compile().output_shardings
        results = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
        quantized = jax.tree.map(_placed, results, shardings)
        return params | {"layers": [layer | quantized for layer in params["layers"]]}


def _placed(leaf: Any, sharding: NamedSharding | SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def device_bytes(tree: Any) -> int:
    """Returns the bytes of placed shapes on one device, without a device's padding."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += int(np.prod(shape)) * leaf.dtype.itemsize
    return total


def shared_bytes(tree: Params, other: Params) -> int:
    """Returns the bytes on one device of leaves with the same type and sharding in both trees: arrays that
    `DecodeEngine.load_params` shares with the trainer.
    """
    return sum(
        device_bytes(a)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
        if a.dtype == b.dtype and a.sharding == b.sharding
    )
