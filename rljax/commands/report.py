"""What training did, for one run or several: `rljax report RUN_DIR ... [--html FILE]`.

Writes report.html (docs/reports.md), and prints the held-out reward before and after, the parts of a step's
time, and the drafters of its tokens. `--json` writes the numbers of the table, `--plot` draws rewards
and response lengths over the steps.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.benchmarking import Row, print_table, results_console, write_results
from rljax.errors import exit_status
from rljax.provenance import command_line
from rljax.reports import write_report
from rljax.reports.decisions import in_words
from rljax.reports.figures import new_figure, save
from rljax.reports.learning import learning_panels
from rljax.reports.rollouts import rollout_panels
from rljax.reports.runs import RunData, read_runs


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
    """Draws rewards, held-out rewards and response lengths, as the page has them."""
    panels = {panel.title: panel for panel in (*learning_panels(runs), *rollout_panels(runs))}
    shown = [panels[title] for title in ("Reward", "Held-out reward", "Response lengths") if title in panels]
    figure = new_figure(5 * len(shown), 3.8)
    for axes, panel in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        panel.draw(axes)
        axes.set_ylabel(panel.title)
        axes.grid(alpha=0.3)
    save(figure, path)


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
    return parser


@exit_status()
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_args(argv)
    runs = read_runs(arguments.runs)
    rows = [row for run in runs for row in rows_of(run)]
    print_table(rows, f"{len(runs)} run{'s' if len(runs) > 1 else ''}", results_console())
    for line in itertools.chain.from_iterable(in_words(run.decisions) for run in runs):
        print(line)
    if arguments.json:
        write_results(arguments.json, [_as_json(row) for row in rows], command_line())
    if arguments.plot:
        plot(runs, arguments.plot)
    html = arguments.html or (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    write_report(runs, html)
    print(f"report: {html}")
