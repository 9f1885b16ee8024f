"""Times and memory of passes and updates, against a plan."""

import statistics
from collections.abc import Callable

from engine_benchmarks.update import equal_sequences
from process_memory import forget_peak, memory_kilobytes
from rljax.assembly.decoding import sampling_params
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import build_batch, pack_sequences
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.planning.planner import Plan
from rljax.planning.roofline import Roofline
from rljax.speculation.warm_up import time_passes
from rljax.timing import interleave
from rljax.training.update import Recipe, Trainer


def _peak_during(run: Callable[[], None]) -> int:
    """The largest resident size while something runs, in bytes."""
    forget_peak()
    run()
    return 1024 * memory_kilobytes("VmHWM")


def _compared(name: str, predicted: float, measured: float, unit: str, **details: int) -> Row:
    """A row of what was measured against what the plan says."""
    return Row(f"plan/{name}", measured, unit, "planned", predicted, predicted / measured, details)


def decoding_rows(config: ExperimentConfig, plan: Plan) -> list[Row]:
    """Times decode steps and verifying passes of every planned size, over caches that are half full."""
    run = plan.run
    numerics = Numerics(bool(config.engine.row_invariant), config.policy.compute_dtype)
    pool = ExecutablePool(numerics.row_invariant)
    engine = DecodeEngine(run.model, numerics, sampling_params(config), run.buckets, (0,), 16, pool)
    params = engine.load_params(init_params(run.model, 0))
    rows = []
    for slots in dict.fromkeys(timed.slots for timed in plan.decoding):
        measured = time_passes(engine, params, slots, plan.decoding[0].length, repeats=7)
        for timed in (*plan.decoding, *plan.verifying):
            if timed.slots != slots:
                continue
            plain = timed.rows == slots
            name = (
                f"decode step, {slots} slots"
                if plain
                else f"verifying pass, {slots} slots, {timed.rows} tokens"
            )
            seconds = statistics.median(measured[0 if plain else timed.rows])
            shape = {"slots": slots, "rows": timed.rows}
            rows.append(_compared(name, 1e3 * timed.seconds, 1e3 * seconds, "ms", **shape))
    return rows


def update_rows(config: ExperimentConfig, plan: Plan) -> list[Row]:
    """Times the update of a micro-batch, and measures by how much the process grows at its peak."""
    base = 1024 * memory_kilobytes("VmRSS")
    run, training = plan.run, config.training
    numerics = Numerics(bool(config.engine.row_invariant), config.policy.compute_dtype)
    optimizer = make_optimizer(config.optimizer, 100)
    pool = ExecutablePool(numerics.row_invariant)
    recipe = Recipe(sampling_params(config), config.algorithm, training, optimizer)
    trainer = Trainer(run.model, numerics, recipe, pool)
    state = trainer.init(init_params(run.model, 0))
    rows, length = training.rows_per_microbatch, training.pack_length
    sequences = equal_sequences(rows, length, 8, run.model.vocab_size)
    packing = pack_sequences([length] * rows, length)
    batch = build_batch(sequences, packing, range(rows))
    holder = [state]
    del state

    def update():
        holder[0], _ = trainer.update(holder[0], [batch])

    (seconds,) = interleave({"update": update}, repeats=3).values()
    roofline = Roofline(run, plan.hardware)
    predicted = plan.microbatch[1] + roofline.seconds(roofline.optimizer())
    time_row = _compared("update of a micro-batch", 1e3 * predicted, 1e3 * statistics.median(seconds), "ms")
    peak = next((size for phase, (size, _) in plan.memory.peaks.items() if phase == "update"), 0)
    grown = _peak_during(update) - base
    return [time_row, _compared("memory of the update", peak / 2**20, grown / 2**20, "MiB")]
