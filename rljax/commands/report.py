"""What training did, for one run or several: `rljax report RUN_DIR ... [--html FILE]`.

Writes report.html (docs/reports.md), and prints the held-out reward before and after, the parts of a step's
time, and the drafters of its tokens. `--json` writes the numbers of the table, `--plot` draws reward and
response lengths over the steps, `--decisions` draws the rollout manager's decisions (docs/managers.md).
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.benchmarking import Row, print_table, results_console, write_results
from rljax.errors import exit_status
from rljax.provenance import command_line
from rljax.reports import write_report
from rljax.reports.decisions import draw, in_words
from rljax.reports.figures import COLORS, new_figure, save
from rljax.reports.learning import SMOOTHING
from rljax.reports.runs import RunData, read_runs

if TYPE_CHECKING:
    import matplotlib.axes


def rows_of(run: RunData) -> list[Row]:
    """Returns the held-out reward against the one before RL, if both exist; and the seconds per step."""
    rows = []
    if len(run.evaluations) > 1:
        before, after = (run.evaluations[i]["evaluation/reward"] for i in (0, -1))
        rows.append(
            Row(
                name=f"{run.name}/held-out reward",
                value=after,
                unit="reward",
                baseline=f"at step {run.evaluations[0]['step']}",
                baseline_value=before,
                ratio=after / before if before else 0.0,
                details={"step": run.evaluations[-1]["step"], "gain": after - before},
            )
        )
    p75, longest = run.column("response_length/p75"), run.column("response_length/max")
    rows.append(
        Row(
            name=f"{run.name}/longest response",
            value=float(longest.mean()),
            unit="tokens",
            baseline="75th percentile",
            baseline_value=float(p75.mean()),
            ratio=float(np.median(longest / p75)),
            details={
                "steps": len(run.steps),
                "minutes": run.minutes,
                "commits": sorted({session["commit"] or "unknown" for session in run.sessions}),
                "mean_response_length": run.mean("response_length/mean"),
                "step_seconds": run.mean("time/step"),
                "rollout_seconds": run.mean("time/rollout"),
                "update_seconds": run.mean("time/update"),
                "rollout_tokens_per_second": run.mean("rollout/tokens_per_second"),
                "padding": run.mean("update/padding"),
                "mismatch_logprob_abs_max": float(run.column("mismatch/logprob_abs_max").max()),
            },
        )
    )
    return rows


def _as_json(row: Row) -> Row:
    """Replaces NaN and infinity by null, since JSON has neither."""

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    fields = {name: known(getattr(row, name)) for name in ("value", "baseline_value", "ratio")}
    return dataclasses.replace(
        row, **fields, details={name: known(value) for name, value in row.details.items()}
    )


def plot(runs: Sequence[RunData], path: Path) -> None:
    """Rewards of all runs, and response lengths over all of them, by step."""
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    _plot_rewards(left, runs)
    _plot_lengths(right, runs)
    save(figure, path)


def _plot_rewards(axes: "matplotlib.axes.Axes", runs: Sequence[RunData]) -> None:
    for number, run in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        steps, rewards = run.column("step"), run.column("reward/mean")
        width = min(SMOOTHING, len(rewards))
        smooth = np.convolve(rewards, np.ones(width) / width, mode="valid")
        axes.plot(steps, rewards, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps[width - 1 :], smooth, color=color, linewidth=2, label=run.name)
        marks = [(line["step"], line["evaluation/reward"]) for line in run.evaluations]
        if marks:
            axes.plot(*zip(*marks, strict=True), "o", color=color, markersize=7, markeredgecolor="white")
    axes.set(xlabel="step", ylabel="reward", title=f"Reward (mean of {SMOOTHING} steps; dots: held out)")
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)


def _plot_lengths(axes: "matplotlib.axes.Axes", runs: Sequence[RunData]) -> None:
    shortest = min(len(run.steps) for run in runs)
    steps = runs[0].column("step")[:shortest]
    for metric, label, color in (
        ("max", "longest", COLORS[1]),
        ("p75", "75th percentile", COLORS[4]),
        ("mean", "mean", COLORS[0]),
    ):
        values = [run.column(f"response_length/{metric}")[:shortest] for run in runs]
        axes.plot(steps, np.mean(values, axis=0), color=color, linewidth=2, label=label)
    axes.set(xlabel="step", ylabel="tokens", title="Response length: the long tail")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper center", ncols=3, fontsize=8)
    axes.grid(alpha=0.3)


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="directories of runs")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report there; otherwise into the directory of a single run, or as report.html where"
        " you are if there are several",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .svg, .pdf)")
    parser.add_argument(
        "--decisions", type=Path, metavar="FILE", help="draw there what the rollout manager decided"
    )
    return parser


@exit_status()
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_args(argv)
    runs = read_runs(arguments.runs)
    rows = [row for run in runs for row in rows_of(run)]
    print_table(rows, f"{len(runs)} run{'s' if len(runs) > 1 else ''}", results_console())
    decided = [run.decisions for run in runs]
    for line in itertools.chain.from_iterable(map(in_words, decided)):
        print(line)
    if arguments.json:
        write_results(arguments.json, [_as_json(row) for row in rows], command_line())
    if arguments.plot:
        plot(runs, arguments.plot)
    if arguments.decisions:
        draw(decided, arguments.decisions)
    html = arguments.html or (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    write_report(runs, html)
    print(f"report: {html}")
