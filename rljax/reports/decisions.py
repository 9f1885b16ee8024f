"""Decisions of a run's manager (RUN_DIR/decisions.jsonl), as figures and in words.

    python scripts/report.py RUN_DIR --decisions decisions.png

Gain is tokens per second against what plain decoding promised for the same time, as it is logged
(`rljax/speculation/pass_record.py`). What is not in the log is not in here: plain steps of batches above
`speculation.max_batch`, prefilling, and the host's work between the passes.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rljax.errors import UserError
from rljax.reports.figures import COLORS, new_figure, save
from rljax.run_directory import RunDirectory
from rljax.speculation.pass_record import PLAIN, Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLAIN_COLOR, _LINE_COLOR = "#999999", "#000000"
_MOST_STEPS_TOLD = 5  # of those that did not speed up
_LARGEST_DOT = 150.0  # in square points


@dataclasses.dataclass(frozen=True)
class RunDecisions:
    """One run's decisions.

    Attributes:
      path: directory of the run.
      steps: decisions of every training step that has some, in order.
    """

    path: Path
    steps: dict[int, list[Decision]]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def all(self) -> list[Decision]:
        return list(itertools.chain.from_iterable(self.steps.values()))

    @property
    def drafters(self) -> list[str]:
        """In the order of their first use, plain decoding first."""
        names = dict.fromkeys(decision.drafter for decision in self.all)
        return sorted(names, key=lambda name: name != PLAIN)


def read_decisions(path: Path) -> RunDecisions:
    """Without any steps where the run in `path` has decided nothing."""
    lines = RunDirectory(path).read_decisions()
    steps = {step: [Decision(**decision) for decision in decisions] for step, decisions in lines if decisions}
    return RunDecisions(path, steps)


def gain(decisions: Iterable[Decision]) -> float | None:
    """Tokens against those that plain decoding promised; None where it promised nothing."""
    known = [decision for decision in decisions if decision.plain > 0]
    return sum(each.tokens for each in known) / sum(each.plain for each in known) if known else None


def shares(decisions: Iterable[Decision], amount: str) -> dict[str, float]:
    """By drafter, of "tokens" or "seconds"."""
    sums = collections.Counter[str]()
    for decision in decisions:
        sums[decision.drafter] += getattr(decision, amount)
    return {drafter: each / max(sums.total(), 1e-9) for drafter, each in sums.items()}


def accept_length(decisions: Iterable[Decision]) -> float:
    """Tokens per response and pass, the one behind the last accepted draft included."""
    decisions = list(decisions)
    return sum(each.tokens for each in decisions) / max(sum(each.turns for each in decisions), 1)


def by_position(decisions: Iterable[Decision], nodes: str) -> np.ndarray:
    """Draft nodes at each position behind the last token, from 1 on, that a response's pass "verified" or
    "accepted" on the average: float [D]. Those accepted add up to the accept length less one.
    """
    decisions = [decision for decision in decisions if decision.verified]
    counts = np.zeros(max((len(decision.verified) for decision in decisions), default=0))
    for decision in decisions:
        own = getattr(decision, nodes)
        counts[: len(own)] += own
    return counts / max(sum(decision.turns for decision in decisions), 1)


# --- in words ----------------------------------------------------------------------------------------------


def in_words(run: RunDecisions) -> list[str]:
    """Describes the drafters that tokens came from, and the reasons of the slowest steps."""
    if not run.steps:
        return []
    tokens = sum(decision.tokens for decision in run.all)
    by_share = sorted(shares(run.all, "tokens").items(), key=lambda item: -item[1])
    parts = [f"{share:.0%} {_source(drafter)}" for drafter, share in by_share]
    lines = [f"{run.name}: of {tokens:,} tokens that were decided on, {', '.join(parts)}"]
    gains = {step: gain(decisions) for step, decisions in run.steps.items()}
    slow = sorted((each, step) for step, each in gains.items() if each is not None and each <= 1)
    for own, step in slow[:_MOST_STEPS_TOLD]:
        because = [_plain_reason(run.steps[step]), _worst_promise(run.steps[step])]
        told = [
            f"{run.name}: step {step} brought {own:.2f} of what plain decoding promised",
            *filter(None, because),
        ]
        lines.append("; ".join(told))
    if len(slow) > _MOST_STEPS_TOLD:
        more = len(slow) - _MOST_STEPS_TOLD
        lines.append(f"{run.name}: {more} more of {len(run.steps)} steps brought no more than that either")
    return lines


def _source(drafter: str) -> str:
    return "plain" if drafter == PLAIN else f"with drafts of {drafter}"


def _plain_reason(decisions: Sequence[Decision]) -> str | None:
    """Why most of its plain time was plain. Reasons that differ only in their numbers are the same."""
    seconds = collections.Counter[str]()
    for decision in decisions:
        if decision.drafter == PLAIN:
            seconds[re.sub(r"\d[\d.]*(e[+-]?\d+)?", "..", decision.reason)] += decision.seconds
    if not seconds:
        return None
    reason, most = seconds.most_common(1)[0]
    share = most / max(sum(decision.seconds for decision in decisions), 1e-9)
    return f"plain for {share:.0%} of the time because: {reason}"


def _worst_promise(decisions: Sequence[Decision]) -> str | None:
    """Describes the drafter and the size of pass that fell most tokens short of their promise."""
    groups = collections.defaultdict(list)
    for decision in decisions:
        if decision.drafter != PLAIN and decision.expected > 0 and decision.plain > 0:
            groups[decision.drafter, decision.rows].append(decision)
    missing = {key: sum(each.expected - each.tokens for each in own) for key, own in groups.items()}
    worst = max(missing, key=missing.__getitem__, default=None)
    if worst is None or missing[worst] <= 0:
        return None
    own, (drafter, rows) = groups[worst], worst
    promised = sum(each.expected for each in own) / sum(each.plain for each in own)
    promise = f"{promised:.2f} times plain and brought {gain(own):.2f}"
    return f"furthest off: {drafter} with {rows} rows promised {promise}"


# --- drawn -------------------------------------------------------------------------------------------------


def draw(runs: Sequence[RunDecisions], path: Path) -> None:
    """Five panels a run, below each other."""
    for run in runs:
        if not run.steps:
            raise UserError(
                f"{run.path / 'decisions.jsonl'}: no decisions there to draw; runs with speculation.drafter"
                " have some once a batch is down to speculation.max_batch"
            )
    figure = new_figure("--decisions", 13, 13 * len(runs))
    parts = figure.subfigures(len(runs), 1, squeeze=False)[:, 0]
    for run, part in zip(runs, parts, strict=True):
        palette = itertools.cycle(COLORS)
        colors = {drafter: _PLAIN_COLOR if drafter == PLAIN else next(palette) for drafter in run.drafters}
        grid = part.add_gridspec(3, 2)
        for place, drawer in (
            (grid[0, :], draw_timeline),
            (grid[1, 0], draw_shares),
            (grid[1, 1], draw_promises),
            (grid[2, 0], draw_accept_lengths),
            (grid[2, 1], draw_positions),
        ):
            axes = part.add_subplot(place)
            drawer(axes, run, colors)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        part.suptitle(f"What the rollout manager decided: {run.name}")
    save(figure, path)


def draw_timeline(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """The last rollout of the last step."""
    from matplotlib.collections import PolyCollection

    step, decisions = list(run.steps.items())[-1]
    starts = [0, *(i for i in range(1, len(decisions)) if decisions[i].at < decisions[i - 1].at)]
    decisions = decisions[starts[-1] :]
    for drafter, color in colors.items():
        boxes = []
        for each in decisions:
            if each.drafter == drafter:
                left, right = each.at, each.at + each.seconds
                top = each.rows or each.batch  # a plain step computes a row of every slot
                boxes.append([(left, 0.5), (left, top), (right, top), (right, 0.5)])
        axes.add_collection(PolyCollection(boxes, facecolor=color, edgecolor="none", label=_label(drafter)))
    end = max(each.at + each.seconds for each in decisions)
    axes.step(
        [*(each.at for each in decisions), end],
        [*(each.responses for each in decisions), decisions[-1].responses],
        where="post",
        color=_LINE_COLOR,
        linewidth=1.5,
        label="running responses",
    )
    highest = max(each.rows or each.batch for each in decisions)
    axes.set(
        xlim=(0, end),
        xlabel="seconds since the rollout began",
        ylabel="rows of a pass, responses",
        title=f"Step {step}: who drafted, and rows (white: nothing decided)",
    )
    _powers_of_two(axes, "y")
    axes.set_ylim(0.5, 4 * highest)  # room for the legend
    axes.legend(loc="upper center", ncols=3, fontsize=8)


def draw_shares(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Of tokens upwards, of time downwards."""
    steps = np.asarray(list(run.steps))
    for amount, sign in (("tokens", 1), ("seconds", -1)):
        by_step = [shares(decisions, amount) for decisions in run.steps.values()]
        below = np.zeros(len(steps))
        for drafter, color in colors.items():
            own = np.asarray([each.get(drafter, 0.0) for each in by_step])
            axes.bar(
                steps,
                sign * own,
                width=0.9,
                bottom=sign * below,
                color=color,
                label=_label(drafter) if sign == 1 else None,
            )
            below += own
    axes.axhline(0, color=_LINE_COLOR, linewidth=1)
    axes.set(ylabel="share of time  |  share of tokens", ylim=(-1.02, 1.3))
    axes.set_title("Who brought the tokens (up), who took the time (down)")
    axes.set_yticks(np.linspace(-1, 1, 9), [f"{abs(tick):.0%}" for tick in np.linspace(-1, 1, 9)])
    _steps_axis(axes, run)
    axes.legend(loc="upper center", ncols=4, fontsize=8)


def draw_promises(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Promised against measured gain; larger dots took longer."""
    known = [each for each in run.all if each.expected > 0 and each.plain > 0 and each.tokens > 0]
    longest = max((each.seconds for each in known), default=1.0)
    for drafter, color in colors.items():
        own = [each for each in known if each.drafter == drafter]
        axes.scatter(
            [each.expected / each.plain for each in own],
            [each.tokens / each.plain for each in own],
            s=[2 + _LARGEST_DOT * each.seconds / longest for each in own],
            color=color,
            alpha=0.4,
            linewidth=0,
            rasterized=True,  # thousands of dots
            label=_label(drafter),
        )
    ends = [each.tokens / each.plain for each in known] + [each.expected / each.plain for each in known]
    low, high = min(ends, default=0.5) / 1.2, max(ends, default=2.0) * 1.2
    axes.plot([low, high], [low, high], color=_LINE_COLOR, linewidth=1, label="as promised")
    axes.axhline(1, color=_LINE_COLOR, linewidth=1, linestyle=":", label="as fast as plain")
    _powers_of_two(axes, "x", "y")
    axes.set(
        xlim=(low, high),
        ylim=(low, high),
        xlabel="promised, times plain decoding",
        ylabel="measured, times plain decoding",
        title="What was promised, what came (dots by time)",
    )
    legend = axes.legend(loc="upper left", fontsize=8)
    for handle in legend.legend_handles[: len(colors)]:
        handle.set(sizes=[40], alpha=1)


def draw_accept_lengths(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    for drafter, color in colors.items():
        if drafter == PLAIN:
            continue
        own = {
            step: [each for each in decisions if each.drafter == drafter]
            for step, decisions in run.steps.items()
        }
        points = [(step, accept_length(decisions)) for step, decisions in own.items() if decisions]
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=_label(drafter))
    axes.axhline(1, color=_PLAIN_COLOR, linestyle="--", label="a plain step")
    axes.set(ylabel="tokens of a response and pass", title="Accept length of verifying passes")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend
    _steps_axis(axes, run)
    axes.legend(loc="upper center", ncols=4, fontsize=8)


def draw_positions(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Of all steps."""
    for drafter, color in colors.items():
        own = [each for each in run.all if each.drafter == drafter]
        accepted = by_position(own, "accepted")
        if not len(accepted):
            continue
        positions = np.arange(1, len(accepted) + 1)
        axes.plot(positions, accepted, "o-", color=color, markersize=4, label=_label(drafter))
        axes.plot(positions, by_position(own, "verified"), ":", color=color)
    axes.set(xlabel="position behind the last token", ylabel="draft nodes of a response and pass")
    axes.set_title("Accepted by position (dotted: verified)")
    axes.set_ylim(0, max(1.25 * axes.get_ylim()[1], 1.25))  # room for the legend
    axes.locator_params(axis="x", integer=True)
    if axes.lines:
        axes.legend(loc="upper center", ncols=4, fontsize=8)


def _label(drafter: str) -> str:
    return "plain" if drafter == PLAIN else drafter


def _steps_axis(axes: "Axes", run: RunDecisions) -> None:
    axes.set(xlabel="step", xlim=(min(run.steps) - 0.6, max(run.steps) + 0.6))
    axes.locator_params(axis="x", integer=True)


def _powers_of_two(axes: "Axes", *which: str) -> None:
    """Logarithmic axes whose ticks are plain numbers."""
    for each in which:
        getattr(axes, f"set_{each}scale")("log", base=2)
        getattr(axes, f"{each}axis").set_major_formatter(
            lambda value, _: f"{value:.2g}" if value < 1 else f"{value:g}"
        )
