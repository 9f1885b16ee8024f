"""Figures of learning: rewards with confidence bands, held-out rewards, and any metric over the steps."""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljax.reports.figures import CARD, COLORS, INK, Panel, in_blocks, integer_steps, legend_above, marker_of
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
            axes.plot(in_blocks(steps), in_blocks(rewards), color=color, alpha=0.3, linewidth=0.8)
            steps, smooth = curves[0]
            variances = _smoothed(run.column("step"), run.column("reward/standard_error") ** 2)[1]
            error = NORMAL_QUANTILE * np.sqrt(variances / _window(len(run.steps)))
            _band(axes, steps, smooth, error, color)
            axes.plot(
                in_blocks(steps),
                in_blocks(smooth),
                color=color,
                linewidth=1.8,
                marker=marker_of(smooth),
                label=group.name,
            )
        else:
            _draw_repeated(axes, curves, color, group.name, "-")
    if any(len(group.runs) > 1 for group in series):
        _show_lines(axes)
    axes.set_ylabel("reward")
    integer_steps(axes)
    legend_above(axes)


def draw_heldout(axes: "Axes", series: Sequence[Series]) -> None:
    """Draws the held-out rewards."""
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        curves = []
        for run in group.runs:
            points = [(line["step"], line["evaluation/reward"]) for line in run.evaluations]
            curves.append(
                (np.asarray([p[0] for p in points], float), np.asarray([p[1] for p in points], float))
            )
        if len(curves) == 1:
            axes.plot(*curves[0], "o-", color=color, markersize=5, markeredgecolor=CARD, label=group.name)
        else:
            _draw_repeated(axes, curves, color, group.name, "o-")
    if any(len(group.runs) > 1 for group in series):
        _show_lines(axes)
    axes.set_ylabel("reward")
    integer_steps(axes)
    legend_above(axes)


def draw_metric(axes: "Axes", series: Sequence[Series], metric: str, unit: str) -> None:
    """Draws a metric of every step, one line per run."""
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        for i, run in enumerate(group.runs):
            steps, values = in_blocks(run.column("step")), in_blocks(run.column(metric))
            axes.plot(
                steps,
                values,
                color=color,
                linewidth=1.3,
                marker=marker_of(values),
                label=None if i else group.name,
            )
    axes.set_ylabel(unit)
    integer_steps(axes)
    legend_above(axes)


def draw_mismatch(axes: "Axes", series: Sequence[Series]) -> None:
    """Draws the largest and mean distance of the training pass's log-probabilities from the rollout's."""
    largest, alone = 0.0, len(series) == 1
    for number, group in enumerate(series):
        color = COLORS[number % len(COLORS)]
        for i, run in enumerate(group.runs):
            for metric, name, line in (("max", "largest", "-"), ("mean", "mean", ":"))[: 2 if alone else 1]:
                values = in_blocks(run.column(f"mismatch/logprob_abs_{metric}"), reduce=np.nanmax)
                label = None if i else name if alone else group.name
                axes.plot(
                    in_blocks(run.column("step")),
                    values,
                    line,
                    color=color,
                    linewidth=1.3,
                    marker=marker_of(values),
                    label=label,
                )
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
    axes: "Axes", curves: Sequence[tuple[np.ndarray, np.ndarray]], color: str, name: str, style: str
) -> None:
    """Draws each repetition, and their mean with its confidence band at the steps that all of them have."""
    for steps, values in curves:
        axes.plot(
            in_blocks(steps),
            in_blocks(values),
            color=color,
            alpha=0.35,
            linewidth=0.8,
            marker=marker_of(values),
        )
    shared = sorted(set.intersection(*(set(steps) for steps, _ in curves)))
    if not shared:
        return
    together = np.stack([values[np.isin(steps, shared)] for steps, values in curves])
    mean, error = t_interval(together)
    _band(axes, np.asarray(shared), mean, error, color)
    axes.plot(
        in_blocks(np.asarray(shared)),
        in_blocks(mean),
        style,
        color=color,
        linewidth=1.8,
        **({"marker": "o"} if len(shared) == 1 else {}),
        markersize=4,
        label=name,
    )


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
