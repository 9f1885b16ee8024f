"""Figures of learning: rewards with confidence bands, held-out rewards, and any metric over the steps."""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljax.reports.figures import CARD, COLORS, INK, Panel, draw_curve, in_blocks, integer_steps, legend_above
from rljax.reports.runs import NORMAL_QUANTILE, RunData, Series, series_of, t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 5  # most steps in the running mean of the reward


def learning_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """Yields panels with all runs in the same axes; runs that differ only by their seed are one series."""
    series = series_of(runs)
    repeated = any(len(group.runs) > 1 for group in series)
    band = (
        "Thin: each seed. Band: 95 % confidence of the seeds' mean (Student's t)."
        if repeated
        else "Band: 95 % confidence over the prompts of the same steps. Thin: each step."
    )
    yield Panel(
        "Reward",
        f"Training rewards, running mean of up to {SMOOTHING} steps. {band}",
        lambda axes: draw_rewards(axes, series),
    )
    if any(run.evaluations for run in runs):
        yield Panel(
            "Held-out reward",
            "On problems that training never shows."
            + (" Thin: each seed; band: 95 % confidence of their mean." if repeated else ""),
            lambda axes: draw_heldout(axes, series),
        )
    metrics = [
        ("Entropy", "entropy", "nats", "Of the sampling distribution, mean over the tokens."),
        ("Gradient norm", "gradient_norm", "norm", "Before clipping, mean of a step's updates."),
    ]
    for title, metric, unit, caption in metrics:
        if any(run.has(metric) for run in runs):
            draw = functools.partial(draw_metric, series=series, metric=metric, unit=unit)
            yield Panel(title, caption, draw)
    if any(run.has("mismatch/logprob_abs_max") for run in runs):
        yield Panel(
            "Mismatch",
            "Largest distance of the training pass's log-probabilities from the rollout's, under the same"
            " weights. 0 where the engine is row-invariant.",
            lambda axes: draw_mismatch(axes, series),
        )


def draw_rewards(axes: "Axes", series: Sequence[Series]) -> None:
    """Draws the training rewards."""
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        curves = [_smoothed(run.column("step"), run.column("reward/mean")) for run in group.runs]
        if len(curves) == 1:
            run = group.runs[0]
            steps, rewards = run.column("step"), run.column("reward/mean")
            draw_curve(axes, steps, rewards, color, alpha=0.3, linewidth=0.8, marker="")
            steps, smooth = curves[0]
            variances = _smoothed(run.column("step"), run.column("reward/standard_error") ** 2)[1]
            error = NORMAL_QUANTILE * np.sqrt(variances / _window(len(run.steps)))
            _band(axes, steps, smooth, error, color)
            draw_curve(axes, steps, smooth, color, linewidth=1.8, label=group.name)
        else:
            _draw_repeated(axes, curves, color, group.name)
    _finish(axes, "reward", fits=any(len(group.runs) > 1 for group in series))


def draw_heldout(axes: "Axes", series: Sequence[Series]) -> None:
    """Draws the held-out rewards."""
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        curves = [
            tuple(
                np.asarray([line[name] for line in run.evaluations], float)
                for name in ("step", "evaluation/reward")
            )
            for run in group.runs
        ]
        if len(curves) == 1:
            axes.plot(*curves[0], "o-", color=color, markersize=5, markeredgecolor=CARD, label=group.name)
        else:
            _draw_repeated(axes, curves, color, group.name, "o")
    _finish(axes, "reward", fits=any(len(group.runs) > 1 for group in series))


def draw_metric(axes: "Axes", series: Sequence[Series], metric: str, unit: str) -> None:
    """Draws a metric of every step, one line per run."""
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        for i, run in enumerate(group.runs):
            label = None if i else group.name
            draw_curve(axes, run.column("step"), run.column(metric), color, linewidth=1.3, label=label)
    _finish(axes, unit)


def draw_mismatch(axes: "Axes", series: Sequence[Series]) -> None:
    """Draws the largest and mean distance of the training pass's log-probabilities from the rollout's."""
    largest, alone = 0.0, len(series) == 1
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        for i, run in enumerate(group.runs):
            for metric, name, line in (("max", "largest", "-"), ("mean", "mean", ":"))[: 2 if alone else 1]:
                values = in_blocks(run.column(f"mismatch/logprob_abs_{metric}"), reduce=np.nanmax)
                label = None if i else name if alone else group.name
                steps = run.column("step")
                draw_curve(axes, steps, values, color, linestyle=line, linewidth=1.3, label=label)
                largest = max(largest, *values[np.isfinite(values)], 0.0)
    if largest:
        axes.set_yscale("symlog", linthresh=largest / 1e3)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0, 3 * largest)
        legend_above(axes)
    else:
        axes.set_ylim(-0.05, 1)
        axes.text(0.5, 0.5, "0 at every step", transform=axes.transAxes, ha="center", color=INK)
    axes.set_ylabel("nats")
    integer_steps(axes)


def _draw_repeated(
    axes: "Axes",
    curves: Sequence[tuple[np.ndarray, ...]],
    color: str,
    name: str,
    marker: str | None = None,
) -> None:
    """Draws each repetition, and their mean with its confidence band at the steps that all of them have."""
    for steps, values in curves:
        draw_curve(axes, steps, values, color, alpha=0.35, linewidth=0.8)
    shared = np.asarray(sorted(set.intersection(*(set(steps) for steps, _ in curves))))
    if not len(shared):
        return
    together = np.stack([values[np.isin(steps, shared)] for steps, values in curves])
    mean, error = t_interval(together)
    _band(axes, shared, mean, error, color)
    draw_curve(axes, shared, mean, color, marker, linewidth=1.8, markersize=4, label=name)


def _finish(axes: "Axes", unit: str, fits: bool = False) -> None:
    """Adds what all figures have."""
    if fits:
        _show_lines(axes)
    axes.set_ylabel(unit)
    integer_steps(axes)
    legend_above(axes)


def _show_lines(axes: "Axes") -> None:
    """Fits the y axis to the curves: the bands of few seeds are wide and would flatten the curves."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    low, high = np.nanmin(values), np.nanmax(values)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _band(axes: "Axes", steps: np.ndarray, middle: np.ndarray, error: np.ndarray, color: str) -> None:
    if np.isfinite(error).any():
        ends = [in_blocks(middle + sign * error) for sign in (-1, 1)]
        axes.fill_between(in_blocks(steps), *ends, color=color, alpha=0.2, linewidth=0)


def _window(steps: int) -> int:
    """Returns the number of steps to average, fewer for short runs."""
    return min(SMOOTHING, max(steps // 4, 1))


def _smoothed(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps at the ends of the windows, and the running mean there."""
    width = _window(len(values))
    return steps[width - 1 :], np.convolve(values, np.ones(width) / width, mode="valid")
