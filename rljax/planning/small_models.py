"""Small models that draft, in a plan: what they hold, and their programs.

A small model keeps its depth whatever the policy's, so it is planned once. Its programs are recorded by the
method that compiles them behind a rollout (`CompanionEngine.compile_beside`), and the largest of each kind is
compiled.
"""

import dataclasses

from drafters.small_model import SmallModelDrafter
from rljax.engine.companion import CompanionEngine
from rljax.engine.kv_cache import KVCache
from rljax.models.transformer import Params
from rljax.planning.programs import PlannedRun, Planning, PlanningPool, device_bytes
from rljax.planning.recording import Recording


@dataclasses.dataclass(frozen=True)
class PlannedSmallModel:
    """Shapes of everything that a small model holds on the devices.

    Attributes:
      planning: the experiment with the small model in the place of the policy.
      weights: its weights.
      cache: its KV cache for the largest decode state.
    """

    planning: Planning
    weights: Params
    cache: KVCache


def planned_small_models(planning: Planning) -> dict[str, PlannedSmallModel]:
    """Returns the small models among the drafters, by name. Call it under `target.tracing_for`."""
    found, buckets = {}, planning.buckets
    for name, drafter in planning.drafters.items():
        if not isinstance(drafter, SmallModelDrafter):
            continue
        mesh = drafter.mesh(planning.mesh)
        numerics = drafter.numerics(planning.numerics, mesh)
        small = dataclasses.replace(planning, model=drafter.config, numerics=numerics, mesh=mesh)
        largest = _engine(planning, small, Recording()).state_shapes(buckets.batch[-1], buckets.cache[-1])
        found[name] = PlannedSmallModel(small, small.decode_params(), small.place(largest.cache))
    return found


def small_model_programs(planning: Planning, run: PlannedRun, name: str) -> PlanningPool:
    """Begins to compile the largest program of every kind that one of a run's small models needs. Returns the
    pool that will have them, and knows how many smaller ones there are. Call it under `target.tracing_for`.
    """
    planned, buckets = run.small_models[name], planning.buckets
    recording = Recording()
    companion = _engine(planning, planned.planning, recording)
    policy = planning.engine(Recording())
    prefixes = planning.prefixes
    # As in a run: a few prompts at a time enter small states, too, unless it compiles behind the first
    # rollout and nothing runs ahead.
    config = planning.config
    at_once = planning.mesh is not None or config.engine.compile == "before"
    late = at_once or config.speculation.run_ahead_below != 0
    few = [prefix for prefix in prefixes if late and prefix[0] == policy.prefill_rows[0]]
    for batch in buckets.batch:
        entering = prefixes if batch == buckets.batch[-1] else few
        arguments = (batch, buckets.batch[-1], buckets.cache, entering, lambda: False)
        companion.compile_beside(policy, planned.weights, *arguments)
    pool = planned.planning.pool(drafter=name)
    recording.compile_largest(pool)
    return pool


def _engine(planning: Planning, small: Planning, pool: Recording) -> CompanionEngine:
    """Returns the engine of a small model beside the policy."""
    policy = planning.engine(pool)
    return CompanionEngine(
        small.model,
        small.numerics,
        policy.sampling,
        planning.buckets,
        policy.eos_token_ids,
        pool=pool,
        mesh=small.mesh,
        verification=policy.verification,
    )


def small_model_bytes(models: dict[str, PlannedSmallModel]) -> tuple[int, int]:
    """Returns the bytes on a device of the small models' weights, and of their caches."""
    return (
        sum(device_bytes(model.weights) for model in models.values()),
        sum(device_bytes(model.cache) for model in models.values()),
    )
