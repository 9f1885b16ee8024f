"""Times and memory of passes and updates, against a plan."""

import time
from collections.abc import Callable

import jax
import numpy as np

from process_memory import forget_peak, memory_kilobytes
from rljax.assembly.decoding import sampling_params
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.planning.planner import Plan
from rljax.planning.roofline import Roofline
from rljax.training.update import Trainer


def _median_seconds(run: Callable[[], None], repeats: int = 7) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _peak_during(run: Callable[[], None]) -> int:
    """The largest resident size while something runs, in bytes."""
    forget_peak()
    run()
    return 1024 * memory_kilobytes("VmHWM")


def _compared(name: str, predicted: float, measured: float, unit: str) -> Row:
    """A row of what was measured against what the plan says."""
    return Row(f"plan/{name}", measured, unit, "planned", predicted, predicted / measured)


def decoding_rows(config: ExperimentConfig, plan: Plan) -> list[Row]:
    """Times decode steps and verifying passes of every planned size, over caches that are half full."""
    run = plan.run
    numerics = Numerics(bool(config.engine.row_invariant), config.policy.compute_dtype)
    pool = ExecutablePool(numerics.row_invariant)
    engine = DecodeEngine(run.model, numerics, sampling_params(config), run.buckets, (0,), 16, pool)
    params = engine.load_params(init_params(run.model, 0))
    length = plan.decoding[0].length
    rows = []
    for timed in (*plan.decoding, *plan.verifying):
        state = engine.init_state(timed.slots, length)
        half = np.full(timed.slots, length // 2, np.int32)
        state = state.replace(
            active=jax.numpy.ones(timed.slots, bool),
            remaining=jax.numpy.full(timed.slots, 2**20, jax.numpy.int32),
        )
        holder = [state]
        if timed.rows == timed.slots:

            def step(holder=holder, half=half):
                state = holder[0].replace(lengths=jax.numpy.asarray(half))
                holder[0], _ = engine.generate(params, state, 4)

            name, repeats = f"decode step, {timed.slots} slots", 4
        else:
            nodes = next(n for r, n in run.buckets.passes(timed.slots) if r == timed.rows)
            tree = empty_tree(timed.slots, nodes)
            tree.parents[:] = np.arange(-1, nodes - 1)[None]
            tree.valid[:, : timed.rows // timed.slots - 1] = True
            packed = pack_rows(tree, np.arange(timed.slots), timed.rows)

            def step(holder=holder, half=half, tree=tree, packed=packed):
                state = holder[0].replace(lengths=jax.numpy.asarray(half))
                holder[0], pending = engine.verify(params, state, tree, packed)
                pending.result()

            name, repeats = f"verifying pass, {timed.slots} slots, {timed.rows} tokens", 1
        rows.append(_compared(name, 1e3 * timed.seconds, 1e3 * _median_seconds(step) / repeats, "ms"))
    return rows


def update_rows(config: ExperimentConfig, plan: Plan) -> list[Row]:
    """Times the update of a micro-batch, and measures by how much the process grows at its peak."""
    base = 1024 * memory_kilobytes("VmRSS")
    run, training = plan.run, config.training
    numerics = Numerics(bool(config.engine.row_invariant), config.policy.compute_dtype)
    optimizer = make_optimizer(**config.optimizer.model_dump(), total_updates=100)
    pool = ExecutablePool(numerics.row_invariant)
    arguments = (config.algorithm, training, optimizer, pool)
    trainer = Trainer(run.model, numerics, sampling_params(config), *arguments)
    state = trainer.init(init_params(run.model, 0))
    rows, length = training.rows_per_microbatch, training.pack_length
    rng = np.random.default_rng(0)
    vocabulary, weight = run.model.vocab_size, 1.0 / (rows * length)
    prompt, logprobs = 8, -np.ones(length - 8)

    def sequence() -> TrainingSequence:
        tokens = rng.integers(0, vocabulary, length)
        return TrainingSequence(tokens[:prompt], tokens[prompt:], logprobs, 1.0, weight)

    sequences = [sequence() for _ in range(rows)]
    packing = pack_sequences([length] * rows, length)
    batch = build_batch(sequences, packing, range(rows))
    holder = [state]
    del state

    def update():
        holder[0], _ = trainer.update(holder[0], [batch])

    update()
    roofline = Roofline(run, plan.hardware)
    predicted = plan.microbatch[1] + roofline.seconds(roofline.optimizer())
    time_row = _compared("update of a micro-batch", 1e3 * predicted, 1e3 * _median_seconds(update, 3), "ms")
    peak = next((size for phase, (size, _) in plan.memory.peaks.items() if phase == "update"), 0)
    grown = _peak_during(update) - base
    return [time_row, _compared("memory of the update", peak / 2**20, grown / 2**20, "MiB")]
