"""Compare plans with runs on this CPU: `python scripts/bench_plan.py [--config FILE] [key=value ...]`.

`passes` times decode steps and verifying passes, `update` the gradients of a micro-batch and its memory,
`run` the memory of a whole run of one step: rollout, update and checkpoint. Weights that are not here are
random. Figures of the CPU are measured right before (`rljax/planning/hardware.py`).

`--break-even FILE` draws what drafts must bring, of files that `--only passes` and `plan.py --json` wrote:
a pass pays if it takes less time for the tokens of a slot than decode steps over the same slots. Drafting
itself comes on top.
"""

import functools
import json
import os
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from engine_benchmarks.update import equal_batch
from processes import forget_peak, memory_kilobytes, needs_linux, train
from rljax.assembly.decoding import sampling_params
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig, load_config
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.number_type import with_number_type
from rljax.errors import UserError
from rljax.hub import local_directory
from rljax.learning.optimizer import make_optimizer
from rljax.models.huggingface import load_model_config, save_model
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.planning.planner import Plan, default_lengths, make_plan
from rljax.planning.roofline import Roofline
from rljax.planning.topologies import parse_topology
from rljax.reports.figures import COLORS, new_figure, save
from rljax.speculation.warm_up import time_passes
from rljax.tasks.tokenizer_training import train_tokenizer
from rljax.timing import interleave
from rljax.training.update import Recipe, Trainer
from workloads import REAL_CONFIG

# --- drafts that break even ------------------------------------------------------------------------------

Lines = Mapping[int, Sequence[tuple[float, float]]]
"""By slots: rows a slot, and the break-even tokens a slot, with ascending rows."""


def break_even(passes: Sequence[Mapping[str, Any]]) -> Lines:
    """Returns the break-even line of every number of slots, by "slots", "rows" and "seconds" of passes."""
    steps = {row["slots"]: row["seconds"] for row in passes if row["rows"] == row["slots"]}
    lines: dict[int, list[tuple[float, float]]] = {slots: [(1.0, 1.0)] for slots in steps}
    for row in sorted(passes, key=lambda row: row["rows"]):
        slots = row["slots"]
        if row["rows"] > slots:
            lines[slots].append((row["rows"] / slots, row["seconds"] / steps[slots]))
    return {slots: line for slots, line in sorted(lines.items()) if len(line) > 1}


def _read(path: Path) -> tuple[str, Lines]:
    """A title and the lines of what `bench_plan.py --only passes` or `plan.py --json` wrote."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in written:
            machine = written["machine"]
            timed = [row for row in written["rows"] if row["section"] == "passes"]
            passes = [{**row, "seconds": 1e-3 * row["value"]} for row in timed]
            return f"{machine['cpu']}, {machine['cores']} cores, measured", break_even(passes)
        count, kind = written["devices"], written["hardware"]["kind"]
        passes = [*written["decoding"], *written["verifying"]]
        return f"{kind if count == 1 else f'{count} x {kind}'}, planned", break_even(passes)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: holds no passes ({error})") from error


def plot(results: Sequence[Path], path: Path) -> None:
    """Draws a panel for each file of results: what a slot must get, by the rows that it has in the pass."""
    figure = new_figure(3.6 * len(results), 3.2)
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for panel, (title, lines) in zip(panels, map(_read, results), strict=True):
        for number, (slots, line) in enumerate(lines.items()):
            rows, tokens = zip(*line, strict=True)
            color = COLORS[number % len(COLORS)]
            panel.plot(rows, tokens, ".-", color=color, linewidth=1.5, label=f"{slots} slots")
        panel.plot([1, 16], [1, 16], color="0.7", linewidth=0.8, linestyle="--")  # every draft is accepted
        panel.set(xscale="log", yscale="log", xlim=(1, 17), ylim=(1, 8))
        panel.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"], minor=False)
        panel.set_yticks([1, 1.5, 2, 3, 4, 6, 8], labels=["1", "1.5", "2", "3", "4", "6", "8"], minor=False)
        panel.minorticks_off()
        panel.set_title(title, fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, frameon=False)
    figure.supxlabel("rows of a slot in a verifying pass: one and its drafts", fontsize=9)
    figure.supylabel("tokens a slot to break even", fontsize=9)
    save(figure, path)


# --- passes and updates ----------------------------------------------------------------------------------


def _compared(name: str, predicted: float, measured: float, unit: str, **details: Any) -> Row:
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
            name, key = f"verifying pass, {slots} slots, {timed.rows} tokens", timed.rows
            if timed.rows == slots:
                name, key = f"decode step, {slots} slots", 0
            both = 1e3 * timed.seconds, 1e3 * statistics.median(measured[key])
            rows.append(_compared(name, *both, "ms", slots=slots, rows=timed.rows))
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
    batch = equal_batch(rows, length, 8, run.model.vocab_size, length)

    def update() -> None:
        nonlocal state
        state, _ = trainer.update(state, [batch])

    (seconds,) = interleave({"update": update}, repeats=3).values()
    roofline = Roofline(run, plan.hardware)
    predicted = plan.microbatch[1] + roofline.seconds(roofline.optimizer())
    time_row = _compared("update of a micro-batch", 1e3 * predicted, 1e3 * statistics.median(seconds), "ms")
    peak = next((size for phase, (size, _) in plan.memory.peaks.items() if phase == "update"), 0)
    forget_peak()
    update()
    grown = 1024 * memory_kilobytes("VmHWM") - base
    return [time_row, _compared("memory of the update", peak / 2**20, grown / 2**20, "MiB")]


# --- a whole run -----------------------------------------------------------------------------------------

_SUMS = {f"What is {i} plus {i % 7}?": i + i % 7 for i in range(64)}


def run_rows(config: str, overrides: Sequence[str], plan: Plan) -> list[Row]:
    """Trains one step in a process of its own, and returns its peak memory against the plan's.

    A policy whose weights are not here has random ones, which are written in bfloat16. Where the config names
    a data set, it is one of sums.
    """
    needs_linux("run")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        keys = [*overrides, "training.steps=1", "evaluation.problems=0"]
        loaded = load_config(config, list(overrides))
        if loaded.policy.path is not None:
            source = local_directory(loaded.policy.path, weights=False)
            if not any(source.glob("*.safetensors")):
                model, tokenizer = load_model_config(source), directory / "tokenizer"
                train_tokenizer(list(_SUMS), 512, tokenizer)
                save_model(directory / "policy", model, init_params(model, 0), "bfloat16", tokenizer)
                keys.append(f"policy.path={directory / 'policy'}")
        if loaded.task.name == "dataset":
            columns, file = loaded.task.args, directory / "problems.jsonl"
            marker = columns.get("answer_marker", "")
            problems = [
                {columns["prompt"]: text, columns["answer"]: f"{marker} {answer}"}
                for text, answer in _SUMS.items()
            ]
            file.write_text("".join(json.dumps(each) + "\n" for each in problems), encoding="utf-8")
            keys.append(f"task.args.path={file}")
        (*_, metrics), peak = train(config, directory / "run", *keys)
    planned = {phase: size for phase, (size, _) in plan.memory.peaks.items()}
    details = {
        "planned": planned,
        "response_length": metrics["response_length/mean"],
        "mismatch_logprob_abs_max": metrics["mismatch/logprob_abs_max"],
        "seconds": metrics["time/step"],
    }
    most = max(planned.values()) / 2**20
    return [_compared("memory of a run", most, peak / 2**20, "MiB", **details)]


# --- the command line ------------------------------------------------------------------------------------


def _plan(arguments: Namespace) -> list[Measurement]:
    file, overrides = arguments.file, arguments.overrides

    @functools.cache
    def planned() -> tuple[ExperimentConfig, Plan]:
        config = with_number_type(arguments.config)
        plan = make_plan(config, parse_topology("cpu:1"), default_lengths(config, None, None, 0.8))
        flops, bandwidth = plan.hardware.flops[config.policy.compute_dtype], plan.hardware.bandwidth
        print(json.dumps({"GFLOP/s": round(flops / 1e9, 1), "GB/s": round(bandwidth / 1e9, 2)}), flush=True)
        return config, plan

    return [
        Measurement("passes", file, lambda: decoding_rows(*planned())),
        Measurement("update", file, lambda: update_rows(*planned())),
        Measurement("run", file, lambda: run_rows(file, overrides, planned()[1]), disturbed=False),
    ]


def _draw(arguments: Namespace) -> None:
    if not arguments.results:
        raise UserError("--break-even: name what to draw by --results")
    plot(arguments.results, arguments.break_even)


BENCHMARK = Benchmark(
    "plan",
    __doc__,
    _plan,
    packages=("jax",),
    config=REAL_CONFIG,
    options={
        "--break-even": {"type": Path, "metavar": "FILE", "help": "draw, and measure nothing"},
        "--results": {"type": Path, "nargs": "+", "metavar": "JSON", "help": "to draw from, a panel each"},
    },
    instead={"--break-even": _draw},
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
