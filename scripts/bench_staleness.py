"""What does staleness cost: `python scripts/bench_staleness.py [--seeds N] [key=value ...]`.

Trains the config's policy with responses of the step's own weights, with those of the step before, and in the
order of arrival with bounded lag, from one warm start a seed and for as many steps. Workers decode the last
one, and with `--only time` the first two as well, to compare the times of their steps. The runs stay in
`run_dir`: started again, it goes on where it was stopped. `--plot FILE` draws what was written and trains
nothing. `docs/cluster.md` shows the results.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.config import load_config
from rljax.reports.figures import COLORS, new_figure, save
from rljax.reports.learning import SMOOTHING
from rljax.reports.runs import RunData
from training_benchmarks.curves import learning_row, run_command_line, smoothed, train_to_end

MODES: Mapping[str, tuple[str, ...]] = {
    "0": (),
    "1": ("rollout.staleness=1",),
    "at-most-2": ("rollout.max_staleness=2", "cluster.workers=2"),
}
"""The overrides of each mode."""


def curve_row(name: str, runs: Sequence[RunData]) -> Row:
    """Returns one mode's row over its seeds: mean held-out reward after the run, against before."""
    details: dict[str, Any] = {"rollout_kl": [run.mean("policy/rollout_kl") for run in runs]}
    if runs[0].has("rollout/lag_mean"):
        details["lag_mean"] = [run.mean("rollout/lag_mean") for run in runs]
        details["lag_max"] = max(float(run.column("rollout/lag_max").max()) for run in runs)
    return learning_row(f"staleness/{name}", runs, details)


def time_row(exact: RunData, stale: RunData) -> Row:
    """Returns the median seconds of a step with staleness, against those without, with the same workers."""
    seconds = [float(np.median(run.column("time/step")[1:])) for run in (stale, exact)]
    shares = [run.mean("cluster/idle_share") for run in (stale, exact)]
    parts = {
        name: [float(np.median(run.column(f"time/{name}")[1:])) for run in (stale, exact)]
        for name in ("rollout", "update")
    }
    return Row(
        name="staleness/step with 2 workers",
        value=seconds[0],
        unit="s",
        baseline="staleness 0",
        baseline_value=seconds[1],
        ratio=seconds[1] / seconds[0],
        details={"idle_share": shares, "seconds": parts, "steps": len(stale.steps)},
    )


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the reward by step of every mode, with the range of its seeds; held-out rewards as dots."""
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    rows = [row for row in rows if "reward_by_step" in row]
    for number, row in enumerate(rows):
        curve, color = smoothed(row["reward_by_step"]), COLORS[number]
        steps, label = SMOOTHING + np.arange(curve.shape[1]), row["name"].removeprefix("staleness/")
        axes.fill_between(steps, curve.min(0), curve.max(0), color=color, alpha=0.15, linewidth=0)
        axes.plot(steps, curve.mean(0), color=color, linewidth=2, label=label.replace("-", " "))
        place = row["steps"] + 0.4 * number
        axes.plot([place] * len(row["after"]), row["after"], "o", color=color, markersize=4, clip_on=False)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.legend(title="staleness", frameon=False)
    axes.grid(alpha=0.3)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return run_command_line(_benchmark, plot, "mode", argv)


def _benchmark(config: str, overrides: Sequence[str], seeds: int) -> Benchmark:
    def curves(name: str) -> list[Row]:
        runs = [
            train_to_end(config, [*overrides, *MODES[name], f"seed={seed}"], f"staleness-{name}-seed{seed}")
            for seed in range(seeds)
        ]
        return [curve_row(name, runs)]

    def times() -> list[Row]:
        shared = [*overrides, "cluster.workers=2", "evaluation.problems=0"]
        exact = train_to_end(config, shared, "time-0")
        return [time_row(exact, train_to_end(config, [*shared, *MODES["1"]], "time-1"))]

    plan = [
        Measurement(name, f"{seeds} seeds", lambda name=name: curves(name), disturbed=False) for name in MODES
    ]
    return Benchmark(
        "staleness",
        __doc__.splitlines()[0],
        [*plan, Measurement("time", "steps with 2 workers", times)],
        packages=("numpy", "ray"),
        prepare=lambda sections: load_config(config, overrides) and None,
    )


if __name__ == "__main__":
    sys.exit(main())
