"""EAGLE heads in a plan: what they hold, and their programs.

A head is one layer whatever the policy's depth, so it is planned once. Its programs are recorded by the
method that compiles them behind a rollout (`HeadSlots.compile`), and the largest of each kind is compiled.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.drafting import DrafterState
from drafters.eagle.model import head_shapes, shared_params
from drafters.eagle.placement import head_shardings
from drafters.eagle.slots import HeadSlots
from drafters.eagle.spot_trainer import BufferSettings, batch_shape, compiled_update, head_optimizer
from drafters.eagle.training import init_state
from rljax import target
from rljax.engine.executables import ExecutablePool
from rljax.learning.accumulation import TrainState
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.planning.programs import PlannedRun, Planning, PlanningPool, device_bytes
from rljax.planning.recording import Recording
from rljax.sharding import row_multiple


@dataclasses.dataclass(frozen=True)
class PlannedHead:
    """Shapes of everything that a head holds on the devices.

    Attributes:
      drafter: the drafter.
      weights: its weights to draft with.
      training: its weights and moments; None for one that is not trained.
      slots: its state for the largest decode state.
      unread: bytes of features on a device that wait to be read.
    """

    drafter: EagleDrafter
    weights: Params
    training: TrainState | None
    slots: DrafterState
    unread: int


def planned_heads(planning: Planning) -> dict[str, PlannedHead]:
    """Returns the heads among the drafters, by name. Call it under `target.tracing_for`."""
    found = {}
    engine = planning.engine(Recording())
    for name, drafter in planning.drafters.items():
        if not isinstance(drafter, EagleDrafter):
            continue
        drafter.attach(engine)
        shapes = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            head_shapes(drafter.config),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        arguments, training = drafter.arguments, None
        if arguments.train and arguments.slices:
            optimizer = head_optimizer(arguments.learning_rate)
            training = jax.eval_shape(lambda params: init_state(params, optimizer), shapes)  # noqa: B023
            training = _placed(training, drafter, planning, decoding=False)
        dtype = drafter.slots.numerics.dtype
        weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)  # noqa: B023
        unread = arguments.unread_bytes // row_multiple(planning.mesh)
        slots = drafter.slots.state_shapes(planning.buckets.batch[-1])
        if planning.mesh is None:
            slots = planning.place(slots)
        found[name] = PlannedHead(
            drafter, _placed(weights, drafter, planning, decoding=True), training, slots, unread
        )
    return found


def _placed(tree: Any, drafter: EagleDrafter, planning: Planning, decoding: bool) -> Any:
    if planning.mesh is None:
        return planning.place(tree)
    return target.put(tree, head_shardings(tree, drafter.config, planning.mesh, decoding))


def head_programs(planning: Planning, run: PlannedRun, name: str) -> PlanningPool:
    """Begins to compile the largest program of every kind that one of a run's heads needs. Returns the pool
    that will have them, and knows how many smaller ones there are. Call it under `target.tracing_for`.
    """
    head, recording = run.heads[name], Recording()
    drafter, engine = head.drafter, planning.engine(recording)
    drafter.attach(engine)
    shared = shared_params(run.decode_params, planning.model)
    drafter.slots.use(head.weights, shared)
    _record_slots(planning, drafter.slots, drafter)
    pool = planning.pool(drafter=name)
    recording.compile_largest(pool)
    if head.training is not None:
        _compile_update(planning, pool, head, shared)
    return pool


def _record_slots(planning: Planning, slots: HeadSlots, drafter: EagleDrafter) -> None:
    """Asks for all programs that a run warms up before its first rollout."""
    engine, buckets = planning.engine(Recording()), planning.buckets
    prefixes = [engine.prefix_shapes(*prefix) for prefix in planning.prefixes]
    verified = buckets.verified_batches(planning.config.speculation.max_batch)
    for batch in buckets.batch:
        trees = drafter.strategies if batch in verified else ()
        slots.compile(batch, buckets.batch[-1], buckets.cache, prefixes, trees, lambda: False)


def _compile_update(planning: Planning, pool: ExecutablePool, head: PlannedHead, shared: Params) -> None:
    """As `HeadTrainer.warm_up`."""
    arguments, config = head.drafter.arguments, head.drafter.config
    training = arguments.training
    table = rope_table(planning.model, arguments.pack_length + training.steps)
    rope = planning.place(jax.ShapeDtypeStruct(table.shape, table.dtype))
    dtype = np.dtype(BufferSettings().dtype)
    batch = batch_shape(config, arguments.rows, arguments.pack_length, dtype, planning.mesh)
    compiled_update(
        pool,
        config,
        training,
        head_optimizer(arguments.learning_rate),
        head.drafter.slots.numerics,
        (head.training, batch, shared, rope),
        planning.mesh,
    )


def heads_bytes(heads: dict[str, PlannedHead]) -> tuple[int, int, int]:
    """Returns the bytes on a device of the heads' weights to draft with, of their training, and of their
    slots with unread features.
    """
    return (
        sum(device_bytes(head.weights) for head in heads.values()),
        sum(device_bytes(head.training) for head in heads.values()),
        sum(device_bytes(head.slots) + head.unread for head in heads.values()),
    )
