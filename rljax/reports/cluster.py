"""Figures of rollout workers: what each did when, how busy they were, and what weights took to reach them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rljax.reports.figures import COLORS, GRID, Panel
from rljax.reports.learning import draw_metric
from rljax.reports.runs import RunData, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = 4  # the newest ones, whose timelines are drawn
_MOST_ROWS = 24
_STATES = {  # of `rljax/cluster/timeline.py`, in the legend's order
    "decoding": COLORS[0],
    "loading": COLORS[4],
    "starting": COLORS[3],
    "training": COLORS[2],
    "waiting": GRID,
    "idle": GRID,
}

_METRICS = (
    ("Workers", "cluster/workers", "workers", "That have an engine, at the end of the step."),
    (
        "Busy in rollouts",
        "cluster/busy_share",
        "share",
        "Share of the workers' time in rollouts in which they decoded.",
    ),
    (
        "Idle over the step",
        "cluster/idle_share",
        "share",
        "Share of the workers' time in which they did not decode, updates included.",
    ),
    (
        "Weights to the workers",
        "cluster/fetch_seconds",
        "seconds",
        "Time that the slowest worker took to fetch and load the weights that it has.",
    ),
)


def cluster_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """Yields a timeline of each run, and panels with all runs in the same axes; none without workers."""
    series = series_of(runs)
    for run in runs:
        records = run.workers[-_STEPS:]
        if records:
            title = "Workers over time" + (f": {run.name}" if len(runs) > 1 else "")
            height = 1.3 + 0.22 * min(len(_rows(records)), _MOST_ROWS)
            yield Panel(title, _told(records), functools.partial(draw_timeline, records=records), height)
    for title, metric, unit, caption in _METRICS:
        if any(run.has(metric) for run in runs):
            draw = functools.partial(draw_metric, series=series, metric=metric, unit=unit)
            yield Panel(title, caption + (_lost(runs) if metric == "cluster/workers" else ""), draw)


def _lost(runs: Sequence[RunData]) -> str:
    """Returns a sentence about lost workers, or nothing."""
    lost, moved = (
        sum(line.get(f"cluster/{name}", 0) for run in runs for line in run.steps)
        for name in ("restarts", "migrations")
    )
    return f" {lost:,} were lost, and {moved:,} responses went on elsewhere." if lost else ""


def draw_timeline(axes: "Axes", records: Sequence[Mapping[str, Any]]) -> None:
    """Draws what trainer and workers did, a row each, in successive steps."""
    rows, drawn, begin = _rows(records)[:_MOST_ROWS], set(), 0.0
    for record in records:
        for place, name in enumerate(rows):
            spans = record["rows"].get(name, {"spans": ()})["spans"]
            for state in dict.fromkeys(state for *_, state in spans):
                ranges = [(begin + first, last - first) for first, last, each in spans if each == state]
                idle = state in ("idle", "waiting")
                label = "idle, waiting" if idle else state
                axes.broken_barh(
                    ranges,
                    (place - 0.2, 0.4) if idle else (place - 0.38, 0.76),
                    color=_STATES.get(state, GRID),
                    label=None if label in drawn else label,
                    linewidth=0,
                )
                drawn.add(label)
        begin += record["seconds"]
        if record is not records[-1]:
            axes.axvline(begin, color=COLORS[1], linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [_label(name, records) for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(begin, 1e-3))
    axes.set_xlabel("seconds")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, borderpad=0.2, handlelength=1.2)


def _rows(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns everyone's name, in order of appearance."""
    return list(dict.fromkeys(name for record in records for name in record["rows"]))


def _label(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    tokens = sum(record["rows"].get(name, {}).get("tokens", 0) for record in records)
    return f"{name}, {tokens:,} tok" if tokens else name


def _told(records: Sequence[Mapping[str, Any]]) -> str:
    first, last = records[0]["step"], records[-1]["step"]
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    moved = sum(record["moved"] for record in records)
    rows = len(_rows(records))
    return (
        f"What trainer and workers did in {steps} (dotted lines between them), and whose tokens"
        " were taken."
        + (f" {moved:,} responses are of several workers." if moved else "")
        + (f" {rows - _MOST_ROWS:,} further workers are not drawn." if rows > _MOST_ROWS else "")
    )
