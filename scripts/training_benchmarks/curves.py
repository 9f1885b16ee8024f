"""What benchmarks that train share: runs that go on where they stopped, rows of what was learned, options."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.benchmark_runs import Benchmark
from rljax.benchmarking import Row
from rljax.config import load_config
from rljax.errors import Interrupted, UserError
from rljax.reports.learning import SMOOTHING
from rljax.reports.runs import RunData, read_run
from rljax.training import session

CONFIG = "configs/bench_algorithms.yaml"


def train_to_end(config: str, overrides: Sequence[str], name: str) -> RunData:
    """Trains a run, from where an earlier call stopped; returns the results of a finished run at once.

    Args:
      config: file with the config.
      overrides: keys of the config.
      name: directory of the run in the config's `run_dir`.
    """
    run_config = load_config(config, list(overrides))
    run_config = run_config.model_copy(update={"run_dir": f"{run_config.run_dir}/{name}"})
    path = Path(run_config.run_dir)
    steps = read_run(path).steps if (path / "metrics.jsonl").exists() else []
    if not steps or steps[-1]["step"] < run_config.training.steps:
        try:
            session.run(run_config)
        except Interrupted as interrupted:
            raise KeyboardInterrupt from interrupted
    return read_run(path)


def learning_row(name: str, runs: Sequence[RunData], details: Mapping[str, Any]) -> Row:
    """Returns a row of what runs of several seeds have learned: mean held-out reward after, against before.

    Args:
      name: the row's name.
      runs: one a seed.
      details: further ones than those that every such row has.
    """
    before, after = ([run.evaluations[i]["evaluation/reward"] for run in runs] for i in (0, -1))
    shared = {
        "steps": len(runs[0].steps),
        "seeds": len(runs),
        "before": before,
        "after": after,
        "reward_by_step": [run.column("reward/mean").tolist() for run in runs],
        "entropy_at_last": [float(run.column("entropy")[-1]) for run in runs],
        "clip_fraction": [
            run.mean("policy/clip_fraction_low") + run.mean("policy/clip_fraction_high") for run in runs
        ],
        "mismatch_logprob_abs_max": max(float(run.column("mismatch/logprob_abs_max").max()) for run in runs),
        "commits": sorted({result["commit"] or "unknown" for run in runs for result in run.sessions}),
    }
    return Row(
        name=name,
        value=float(np.mean(after)),
        unit="reward",
        baseline="before RL",
        baseline_value=float(np.mean(before)),
        ratio=float(np.mean(after) / np.mean(before)),
        details=shared | details,
    )


def smoothed(rewards: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the running mean over steps, [seeds, steps - SMOOTHING + 1]."""
    return np.lib.stride_tricks.sliding_window_view(np.asarray(rewards), SMOOTHING, axis=1).mean(-1)


def run_command_line(
    make: Callable[[str, Sequence[str], int], Benchmark],
    plot: Callable[[Sequence[Mapping[str, Any]], Path], None],
    what: str,
    argv: Sequence[str] | None,
) -> int:
    """Runs the command line of a benchmark of learning curves, and returns its exit status.

    Args:
      make: returns the benchmark of a config, overrides, and a number of seeds.
      plot: draws rows into a file.
      what: what every seed is of, such as "algorithm".
      argv: arguments; those of the process by default.
    """
    parser = make(CONFIG, (), 0).parser()
    parser.add_argument("--config", default=CONFIG, metavar="FILE", help=f"default: {CONFIG}")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help=f"of each {what} (default: 3)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw what --output holds there, and train nothing"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    try:
        if arguments.seeds < 1:
            raise UserError(f"--seeds: {arguments.seeds} is not at least 1")
        benchmark = make(arguments.config, arguments.overrides, arguments.seeds)
        if arguments.plot is not None:
            everything = [measurement.section for measurement in benchmark.plan]
            results = arguments.output or benchmark.default_output(False, everything)
            try:
                rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"{results}: holds no results ({error})") from error
            plot(rows, arguments.plot)
            return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return benchmark.run(arguments)
