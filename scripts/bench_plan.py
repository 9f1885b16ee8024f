"""Compare a plan for this CPU with the run: `python scripts/bench_plan.py [--config FILE] [key=value ...]`.

Prints a line of JSON a pass: predicted and measured milliseconds of decode steps, verifying passes and the
gradients of a micro-batch, and predicted and measured memory of an update and a decode step. The policy has
random weights. Figures of the CPU are measured right before (`rljax/planning/hardware.py`).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from drafters.registry import make_drafters
from rljax.config import ExperimentConfig, load_config
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.planning.planner import Plan, default_lengths, make_plan
from rljax.planning.topologies import parse_topology
from rljax.training.assembly import sampling_params
from rljax.training.update import Trainer


def _median_seconds(run: Callable[[], None], repeats: int = 7) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _memory(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status does not tell {field}")


def _peak_during(run: Callable[[], None]) -> int:
    """The largest resident size while something runs, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    run()
    return _memory("VmHWM")


def _compare(name: str, predicted: float, measured: float, unit: str) -> None:
    print(
        json.dumps(
            {"what": name, "predicted": round(predicted, 3), "measured": round(measured, 3), "unit": unit}
            | {"measured / predicted": round(measured / predicted, 2)}
        ),
        flush=True,
    )


def _decoding(config: ExperimentConfig, plan: Plan) -> None:
    run = plan.run
    numerics = Numerics(bool(config.engine.row_invariant), config.policy.compute_dtype)
    pool = ExecutablePool(numerics.row_invariant)
    engine = DecodeEngine(run.model, numerics, sampling_params(config), run.buckets, (0,), 16, pool)
    params = engine.load_params(init_params(run.model, 0))
    length = plan.decoding[0].length
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
            rows = pack_rows(tree, np.arange(timed.slots), timed.rows)

            def step(holder=holder, half=half, tree=tree, rows=rows):
                state = holder[0].replace(lengths=jax.numpy.asarray(half))
                holder[0], pending = engine.verify(params, state, tree, rows)
                pending.result()

            name, repeats = f"verifying pass, {timed.slots} slots, {timed.rows} tokens", 1
        _compare(name, 1e3 * timed.seconds, 1e3 * _median_seconds(step) / repeats, "ms")


def _update(config: ExperimentConfig, plan: Plan, base: int) -> None:
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
    weights = sum(leaf.size for leaf in jax.tree.leaves(holder[0].params))
    predicted = plan.microbatch[1] + 28.0 * weights / plan.hardware.bandwidth
    _compare("update of a micro-batch", 1e3 * predicted, 1e3 * _median_seconds(update, 3), "ms")
    peak = next((size for phase, (size, _) in plan.memory.peaks.items() if phase == "update"), 0)
    _compare("memory of the update", peak / 2**20, (_peak_during(update) - base) / 2**20, "MiB")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="bench_plan.py", description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        plan = make_plan(config, parse_topology("cpu:1"), default_lengths(config, None, None, 0.8))
        make_drafters(config.speculation)
        figures = plan.hardware
        flops = figures.flops[config.policy.compute_dtype]
        print(json.dumps({"GFLOP/s": round(flops / 1e9, 1), "GB/s": round(figures.bandwidth / 1e9, 2)}))
        base = _memory("VmRSS")
        _update(config, plan, base)
        _decoding(config, plan)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
