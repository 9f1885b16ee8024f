"""What ways to train have learned: `python scripts/bench_learning.py [--only SECTIONS] [key=value ...]`.

`algorithms`: every algorithm of `rljax/algorithms/registry.py`. `staleness`: responses of the step's own
weights, of those of the step before, and in the order of arrival with bounded lag, which workers decode;
`time`: steps of the first two, with workers. `curriculum`: problems that come back, asked in order and by
each rule. `distillation`: a policy that a larger one teaches, and the same by reward. `lora`: an adapter, and
all weights. `agents`: responses that agents sample through HTTP, and those of the run itself.

The config is SmolLM2's where a section's ways do not change the task or the policy's shape, else
configs/bench_algorithms.yaml. All start from one warm start a seed, or from the published weights. The runs
stay in `run_dir`, which is runs/learning unless the key is set: started again, it goes on where it was
stopped. `--plot FILE` draws what was written and trains nothing. docs/benchmarks.md says where results are.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError, known_names
from rljax.reports.figures import COLORS, new_figure, save
from rljax.reports.learning import SMOOTHING
from training_benchmarks.learning import EXPERIMENTS, learning_rows


def _plan(arguments: Namespace) -> list[Measurement]:
    return [
        Measurement(section, f"{len(experiment.ways)} ways", _rows, (section, arguments), disturbed=False)
        for section, experiment in EXPERIMENTS.items()
    ]


def _rows(section: str, arguments: Namespace) -> list[Any]:
    ways = arguments.ways.split(",") if arguments.ways else None
    for way in ways or ():
        if way not in EXPERIMENTS[section].ways:
            raise UserError(f"--ways: {way!r} is not one; {known_names(way, EXPERIMENTS[section].ways)}")
    for name in ("steps", "seeds"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise UserError(f"--{name}: {number} is not at least 1")
    file = arguments.config or EXPERIMENTS[section].file
    of_runs = file, arguments.overrides, arguments.steps, arguments.seeds
    return learning_rows(section, *of_runs, ways)


BENCHMARK = Benchmark(
    "learning",
    __doc__,
    _plan,
    packages=("numpy", "optax", "ray", "openai"),
    options={
        "--config": {"metavar": "FILE", "help": "of all runs (default: the section's)"},
        "overrides": {"nargs": "*", "metavar": "key=value", "help": "set keys of the config"},
        "--steps": {"type": int, "metavar": "N", "help": "of each run; default: the section's"},
        "--seeds": {"type": int, "metavar": "N", "help": "of each way; default: the section's"},
        "--ways": {"metavar": "NAMES", "help": "of the section, separated by commas (default: all)"},
        "--plot": {"type": Path, "metavar": "FILE", "help": "draw what --output holds, and train nothing"},
    },
)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel per way: its reward by step, the others in grey, held-out rewards as dots."""
    figure = new_figure(10, 2.4 * -(-len(rows) // 4))
    axes = figure.subplots(-(-len(rows) // 4), 4, sharex=True, sharey=True, squeeze=False).ravel()
    windows = np.lib.stride_tricks.sliding_window_view
    curves = [  # [seeds, steps] each
        windows(np.asarray(row["reward_by_step"]), SMOOTHING, axis=1).mean(-1) for row in rows
    ]
    for number, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        panel, steps = axes[number], SMOOTHING + np.arange(curve.shape[1])
        for other in curves:
            panel.plot(steps[: other.shape[1]], other.mean(0)[: len(steps)], color="0.8", linewidth=0.8)
        panel.fill_between(steps, curve.min(0), curve.max(0), color=COLORS[0], alpha=0.2, linewidth=0)
        panel.plot(steps, curve.mean(0), color=COLORS[0], linewidth=2)
        for step, heldout in ((0, row["before"]), (row["steps"], row["after"])):
            panel.plot([step] * len(heldout), heldout, "o", color=COLORS[1], markersize=4, clip_on=False)
        panel.set_title(row["name"].partition("/")[2], fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes[len(rows) :]:
        panel.remove()
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("reward", fontsize=10)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = BENCHMARK.parser().parse_intermixed_args(argv)
    if arguments.plot is None:
        return BENCHMARK.run(arguments)
    results = arguments.output or Path("benchmarks/results/learning.json")
    try:
        rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {results}: holds no results ({error})", file=sys.stderr)
        return 2
    plot([row for row in rows if "reward_by_step" in row], arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
