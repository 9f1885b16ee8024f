"""Drafters with weights of their own in a plan: what they hold, and their programs.

EAGLE heads and small models keep their depth whatever the policy's, so they are planned once. Their programs
are recorded by the methods that compile them during a rollout (`HeadSlots.compile`,
`CompanionEngine.programs`), and the largest of each kind is compiled.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.model import head_structs, shared_params
from drafters.eagle.placement import head_shardings
from drafters.eagle.spot_trainer import BufferSettings, HeadUpdate, batch_shape, head_optimizer
from drafters.eagle.training import init_state
from drafters.small_model import SmallModelDrafter
from rljax import target
from rljax.engine.companion import CompanionEngine
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.planning.pool import PlanningPool, Recording
from rljax.planning.programs import PlannedDrafter, PlannedRun, Planning
from rljax.sharding import row_multiple


def planned_drafters(planning: Planning) -> dict[str, PlannedDrafter]:
    """Returns the heads and small models among the drafters. Call it under `target.tracing_for`."""
    found = {}
    for name, drafter in planning.drafters.items():
        if isinstance(drafter, EagleDrafter):
            found[name] = _planned_head(planning, drafter, name)
        elif isinstance(drafter, SmallModelDrafter):
            found[name] = _planned_small_model(planning, drafter, name)
    return found


# -- EAGLE heads -------------------------------------------------------------------------------------------


def _planned_head(planning: Planning, drafter: EagleDrafter, name: str) -> PlannedDrafter:
    drafter.attach(planning.engine(Recording()))
    shapes = head_structs(drafter.config)

    def placed(tree: Any, decoding: bool) -> Any:
        if planning.mesh is None:
            return planning.place(tree)
        return target.put(tree, head_shardings(tree, drafter.config, planning.mesh, decoding))

    arguments, training = drafter.arguments, None
    if arguments.train and arguments.slices:
        optimizer = head_optimizer(arguments.learning_rate)
        state = jax.eval_shape(lambda params: init_state(params, optimizer), shapes)
        training = placed(state, decoding=False)
    dtype, slots = drafter.slots.numerics.dtype, drafter.slots.state_shapes(planning.buckets.batch[-1])
    weights = placed(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes), decoding=True
    )

    def begin(run: PlannedRun) -> PlanningPool:
        recording, pool = Recording(), planning.pool(drafter=name)
        engine = planning.engine(recording)
        drafter.attach(engine)
        shared = shared_params(run.decode_params, planning.model)
        drafter.slots.use(weights, shared)
        shapes = planning.plain(engine, run.decode_params).shapes
        for batch in shapes.batches:
            drafter.slots.compile(shapes, batch, shapes.drafted(batch), lambda: False)
        recording.compile_largest(pool)
        if training is not None:
            _compile_update(planning, pool, drafter, training, shared)
        return pool

    return PlannedDrafter(
        weights,
        planning.place(slots) if planning.mesh is None else slots,
        begin,
        training,
        arguments.unread_bytes // row_multiple(planning.mesh),
    )


def _compile_update(
    planning: Planning, pool: PlanningPool, drafter: EagleDrafter, state: Any, shared: Params
) -> None:
    """As `HeadTrainer.warm_up`."""
    arguments, config = drafter.arguments, drafter.config
    training = drafter.objective
    table = rope_table(planning.model, arguments.pack_length + training.steps)
    rope = planning.place(jax.ShapeDtypeStruct(table.shape, table.dtype))
    dtype = np.dtype(BufferSettings().dtype)
    batch = batch_shape(config, arguments.rows, arguments.pack_length, dtype, planning.mesh)
    optimizer, numerics = head_optimizer(arguments.learning_rate), drafter.slots.numerics
    update = HeadUpdate(config, training, optimizer, numerics, planning.mesh)
    update.compiled(pool, state, batch, shared, rope)


# -- small models ------------------------------------------------------------------------------------------


def _planned_small_model(planning: Planning, drafter: SmallModelDrafter, name: str) -> PlannedDrafter:
    mesh, buckets = drafter.mesh(planning.mesh), planning.buckets
    numerics = drafter.numerics(planning.numerics, mesh)
    small = dataclasses.replace(planning, model=drafter.config, numerics=numerics, mesh=mesh)
    weights = small.decode_params()

    def engine(pool: Recording) -> CompanionEngine:
        policy = planning.engine(pool)
        return CompanionEngine(
            small.model,
            small.numerics,
            policy.sampling,
            buckets,
            policy.eos_token_ids,
            pool=pool,
            mesh=mesh,
            verification=policy.verification,
        )

    def begin(run: PlannedRun) -> PlanningPool:
        recording, pool = Recording(), small.pool(drafter=name)
        companion, policy = engine(recording), planning.engine(Recording())
        shapes = planning.plain(policy, run.decode_params).shapes
        for batch in shapes.batches:
            for compile_program in companion.programs(policy, weights, shapes, batch):
                compile_program()
        recording.compile_largest(pool)
        return pool

    largest = engine(Recording()).state_shapes(buckets.batch[-1], buckets.cache[-1])
    return PlannedDrafter(weights, small.place(largest.cache), begin)
