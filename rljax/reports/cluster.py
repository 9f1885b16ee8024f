"""Figures of rollout workers: how many there were, how busy, and what the weights took to reach them."""

import functools
from collections.abc import Iterator, Sequence

from rljax.reports.figures import Panel
from rljax.reports.learning import draw_metric
from rljax.reports.runs import RunData, series_of

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
    """Yields panels with all runs in the same axes; none where no run had workers."""
    series = series_of(runs)
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
