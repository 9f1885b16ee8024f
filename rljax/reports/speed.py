"""Figures of speed: the parts of a step's time, tokens per second, and the effect of speculation."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljax.reports import decisions
from rljax.reports.figures import COLORS, Panel, in_blocks, integer_steps, legend_above
from rljax.reports.learning import draw_metric
from rljax.reports.runs import RunData, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = (("rollout", COLORS[0]), ("reward", COLORS[4]), ("logprobs", COLORS[3]), ("update", COLORS[1]))
_REST_COLOR = "#999999"
_MOST_BARS = 60


def speed_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """Yields panels with tokens per second and accept lengths of all runs in the same axes, and with the time
    and the decisions of one run per series.
    """
    series = series_of(runs)
    for run in [group.runs[0] for group in series]:
        if run.has("time/step"):
            share = run.mean("time/rollout") / run.mean("time/step")
            title = "Where a step's time goes" + (f": {run.name}" if len(runs) > 1 else "")
            draw = functools.partial(draw_time, run=run)
            yield Panel(title, f"The rollout takes {share:.0%} of it.", draw)
    if any(run.has("rollout/tokens_per_second") for run in runs):
        yield Panel(
            "Rollout speed",
            "Response tokens per second of the rollout.",
            lambda axes: draw_metric(axes, series, "rollout/tokens_per_second", "tokens/s"),
        )
    if any(run.has("speculation/accept_length") for run in runs):
        yield Panel(
            "Accept length",
            "Tokens that a response gets from a pass that verifies drafts. 1 is what a plain step gives.",
            lambda axes: draw_metric(axes, series, "speculation/accept_length", "tokens"),
        )
    for run in [group.runs[0] for group in series]:
        if run.decisions.steps:
            yield from _decision_panels(run, len(runs) > 1)


def draw_time(axes: "Axes", run: RunData) -> None:
    """Draws one bar per step, or per block of steps in long runs."""
    steps, total = in_blocks(run.column("step"), _MOST_BARS), in_blocks(run.column("time/step"), _MOST_BARS)
    width = 0.9 * (np.diff(steps).mean() if len(steps) > 1 else 1.0)
    below = np.zeros(len(steps))
    parts = [
        (name, np.nan_to_num(in_blocks(run.column(f"time/{name}"), _MOST_BARS)), c) for name, c in _PARTS
    ]
    rest = np.maximum(np.nan_to_num(total) - sum(values for _, values, _ in parts), 0)
    for name, values, color in [*parts, ("rest", rest, _REST_COLOR)]:
        if values.sum() > 1e-3 * np.nansum(total):
            axes.bar(steps, values, width, bottom=below, color=color, label=name)
        below += values
    axes.set_ylabel("seconds")
    integer_steps(axes)
    legend_above(axes)


def _decision_panels(run: RunData, named: bool) -> Iterator[Panel]:
    """Yields figures of the manager's decisions; docs/managers.md explains each."""
    palette = itertools.cycle(COLORS)
    run_decisions = run.decisions
    colors = {
        name: _REST_COLOR if name == decisions.PLAIN else next(palette) for name in run_decisions.drafters
    }
    summary = " ".join(f"{line.partition(': ')[2]}." for line in decisions.in_words(run_decisions)[:1])
    last = next(reversed(run_decisions.steps))
    figures: list[tuple[str, str, Callable[..., None]]] = [
        (
            "Strategy within a rollout",
            f"Step {last}: who drafted, and rows of a pass. Gaps: nothing was decided.",
            decisions.draw_timeline,
        ),
        (
            "Strategy by step",
            f"Who brought the tokens (up), who took the time (down). {summary[:1].upper()}{summary[1:]}",
            decisions.draw_shares,
        ),
        ("Accept length by drafter", "Of verifying passes.", decisions.draw_accept_lengths),
    ]
    if any(decision.verified for decision in run_decisions.all):
        caption = "Solid: draft nodes accepted; they add up to the accept length less one. Dotted: verified."
        figures.append(("Accept length by position", caption, decisions.draw_positions))
    if any(
        decision.expected > 0 and decision.plain > 0 and decision.tokens > 0 for decision in run_decisions.all
    ):
        caption = "Below the diagonal, a decision brought less than predicted. Larger dots took longer."
        figures.append(("Predicted and measured gain", caption, decisions.draw_predictions))
    for title, caption, draw in figures:
        draw_run = functools.partial(draw, run=run.decisions, colors=colors)
        yield Panel(f"{title}: {run.name}" if named else title, caption, draw_run, height=3.2)
