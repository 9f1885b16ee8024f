"""Figures of the long tail: response lengths, and the number of running requests within a rollout."""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.reports.figures import COLORS, Panel, draw_curve, in_blocks, integer_steps, legend_above
from rljax.reports.runs import RunData, colors_of, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PERCENTILES = (
    ("max", "longest", 1.0),
    ("p95", "95th percentile", 0.8),
    ("p75", "75th percentile", 0.65),
    ("p50", "median", 0.5),
)
_MOST_COLUMNS = 200  # of a heat map


def rollout_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """Yields panels with percentiles and running requests of all runs in the same axes, and one histogram per
    series.
    """
    if any(run.has("response_length/max") for run in runs):
        yield Panel("Response lengths", _lengths_caption(runs), lambda axes: draw_lengths(axes, runs))
    with_rollouts = [run for run in runs if run.rollouts]
    for run in [series.runs[0] for series in series_of(with_rollouts)]:
        yield Panel(
            "Response lengths by step" + (f": {run.name}" if len(runs) > 1 else ""),
            "Share of a step's responses by length. Small shares are drawn larger than they are: one response"
            " of the tail can be seen.",
            functools.partial(draw_histogram, run=run),
        )
    if with_rollouts:
        yield Panel(
            "Running requests",
            "How many requests decode at a time within a rollout. " + _tail_in_words(with_rollouts),
            lambda axes: draw_running(axes, with_rollouts),
        )


def draw_lengths(axes: "Axes", runs: Sequence[RunData]) -> None:
    """Draws percentiles of the response length by step; for several runs the median, and dashed the
    longest.
    """
    colors, named = colors_of(runs), set[str]()
    for run in runs:
        for i, (metric, label, width) in enumerate(_PERCENTILES):
            name, alone = f"response_length/{metric}", len(runs) == 1
            if not run.has(name) or not (alone or metric in ("max", "p50")):
                continue
            color = COLORS[i] if alone else colors[run.name]
            values = in_blocks(run.column(name), reduce=np.nanmax if metric == "max" else np.nanmean)
            line = "-" if alone or metric == "p50" else "--"
            label = label if alone else _first_time(_series_name(run, runs), named)
            draw_curve(
                axes, run.column("step"), values, color, linewidth=2 * width, linestyle=line, label=label
            )
    axes.set_ylabel("tokens")
    axes.set_ylim(bottom=0)
    integer_steps(axes)
    legend_above(axes)


def draw_histogram(axes: "Axes", run: RunData) -> None:
    """Draws the distribution of lengths by step as a heat map."""
    from matplotlib.colors import to_rgb

    # The bin width grows with rollout.max_response_length, which may change when a run is resumed.
    lengths = [line["lengths"] for line in run.rollouts]
    width = max(line["bin"] for line in lengths)
    places = [((np.arange(len(line["counts"])) + 0.5) * line["bin"] // width).astype(int) for line in lengths]
    rows = 1 + max(int(place.max(initial=0)) for place in places)
    counts = np.zeros((rows, len(run.rollouts)))
    for column, line in enumerate(lengths):
        np.add.at(counts[:, column], places[column], line["counts"])
    shares = counts / np.maximum(counts.sum(0), 1)
    shares = np.stack([in_blocks(row, _MOST_COLUMNS) for row in shares])
    image = np.empty((*shares.shape, 4))
    image[..., :3] = to_rgb(COLORS[0])
    image[..., 3] = (shares / max(shares.max(), 1e-9)) ** 0.4  # makes the tail visible
    first, last = run.rollouts[0]["step"], run.rollouts[-1]["step"]
    axes.imshow(
        image,
        origin="lower",
        aspect="auto",
        interpolation="none",
        zorder=1,  # above the grid
        extent=(first - 0.5, last + 0.5, 0, rows * width),
    )
    axes.set_ylabel("tokens")
    integer_steps(axes)


def draw_running(axes: "Axes", runs: Sequence[RunData]) -> None:
    """Draws running requests over time: the first, middle and last step of one run, or the last steps of
    several.
    """
    colors, named = colors_of(runs), set[str]()
    for run in runs:
        lines, alone = run.rollouts, len(runs) == 1
        chosen = sorted({0, len(lines) // 2, len(lines) - 1}) if alone else [-1]
        for number, line in enumerate(lines[i] for i in chosen):
            times, counts = _curve(line)
            color = COLORS[number] if alone else colors[run.name]
            label = f"step {line['step']}" if alone else _first_time(_series_name(run, runs), named)
            axes.step(times, counts, where="pre", color=color, linewidth=1.4, label=label)
        if alone:
            axes.fill_between(times, counts, step="pre", color=color, alpha=0.1, linewidth=0)
    axes.set(xlabel="seconds since the rollout began", ylabel="requests")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    legend_above(axes)


def _curve(line: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns times and counts of a step's rounds in sequence, from time 0 to a count of 0."""
    times, counts, began = [0.0], [], 0.0
    for points in line["running"]:
        times += [began + until for until, _ in points]
        counts += [running for _, running in points]
        began = times[-1]
    if not counts:  # the step's groups had all ended before it
        return np.zeros(2), np.zeros(2)
    return np.asarray([*times, times[-1]]), np.asarray([*counts[:1], *counts, 0.0])


def _tail_in_words(runs: Sequence[RunData]) -> str:
    """Describes the share of time in which few requests ran."""
    shares = []
    for run in runs:
        total = few = 0.0
        for line in run.rollouts:
            times, counts = _curve(line)
            seconds = np.diff(times)
            total += seconds.sum()
            few += seconds[counts[1:] < counts.max() / 4].sum()
        shares.append(f"{few / max(total, 1e-9):.0%}")
    ends = sorted(set(shares), key=lambda share: float(share[:-1]))
    between = ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
    return f"Fewer than a quarter of the most ran in {between} of the rollouts' time."


def _lengths_caption(runs: Sequence[RunData]) -> str:
    ratios = [run.column("response_length/max") / run.column("response_length/p75") for run in runs]
    typical = np.nanmedian(np.concatenate(ratios))
    lines = "" if len(runs) == 1 else " Solid: median. Dashed: longest."
    return f"Of a step's responses. The longest has typically {typical:.1f} times the 75th percentile.{lines}"


def _series_name(run: RunData, runs: Sequence[RunData]) -> str:
    return next(series.name for series in series_of(runs) if run in series.runs)


def _first_time(name: str, named: set[str]) -> str | None:
    """Returns the name, or None if an earlier curve has it."""
    if name in named:
        return None
    named.add(name)
    return name
