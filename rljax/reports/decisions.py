"""Decisions of a run's manager (RUN_DIR/decisions.jsonl), as figures and in words.

The gain is the ratio of sampled tokens to the tokens that plain decoding was predicted to sample in the same
time, from the log (`rljax/speculation/pass_record.py`). The log leaves out plain steps of batches above
`speculation.max_batch`, prefilling, and the host's work between passes.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rljax.run_directory import RunDirectory
from rljax.speculation.pass_record import PLAIN, Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLAIN_COLOR, _LINE_COLOR = "#999999", "#000000"
_MOST_STEPS_TOLD = 5  # steps without a gain that are described
_LARGEST_DOT = 150.0  # in square points


@dataclasses.dataclass(frozen=True)
class RunDecisions:
    """The decisions of one run.

    Attributes:
      path: directory of the run.
      steps: decisions by training step, in order; steps without decisions are left out.
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
        """Names in the order of their first use, plain decoding first."""
        names = dict.fromkeys(decision.drafter for decision in self.all)
        return sorted(names, key=lambda name: name != PLAIN)


def read_decisions(path: Path) -> RunDecisions:
    """Reads the decisions of the run in `path`; `steps` is empty where there are none."""
    lines = RunDirectory(path).read_decisions()
    steps = {step: [Decision(**decision) for decision in decisions] for step, decisions in lines if decisions}
    return RunDecisions(path, steps)


def gain(decisions: Iterable[Decision]) -> float | None:
    """Returns the ratio of sampled tokens to those predicted of plain decoding; None without a prediction."""
    known = [decision for decision in decisions if decision.plain > 0]
    if not known:
        return None
    return sum(decision.tokens for decision in known) / sum(decision.plain for decision in known)


def shares(decisions: Iterable[Decision], amount: str) -> dict[str, float]:
    """Returns each drafter's share of `amount`, "tokens" or "seconds"."""
    sums = collections.Counter[str]()
    for decision in decisions:
        sums[decision.drafter] += getattr(decision, amount)
    return {drafter: value / max(sums.total(), 1e-9) for drafter, value in sums.items()}


def accept_length(decisions: Iterable[Decision]) -> float:
    """Returns tokens per response and pass, including the token after the last accepted draft."""
    decisions = list(decisions)
    turns = sum(decision.turns for decision in decisions)
    return sum(decision.tokens for decision in decisions) / max(turns, 1)


def by_position(decisions: Iterable[Decision], nodes: str) -> np.ndarray:
    """Returns the mean number of draft nodes per response and pass at each position after the last token,
    from 1 on: float [D]. `nodes` is "verified" or "accepted"; the accepted ones sum to the accept length
    minus one.
    """
    decisions = [decision for decision in decisions if decision.verified]
    counts = np.zeros(max((len(decision.verified) for decision in decisions), default=0))
    for decision in decisions:
        by_depth = getattr(decision, nodes)
        counts[: len(by_depth)] += by_depth
    return counts / max(sum(decision.turns for decision in decisions), 1)


# --- in words ----------------------------------------------------------------------------------------------


def in_words(run: RunDecisions) -> list[str]:
    """Describes the sources of the tokens, and the reasons of the slowest steps."""
    if not run.steps:
        return []
    tokens = sum(decision.tokens for decision in run.all)
    by_share = sorted(shares(run.all, "tokens").items(), key=lambda item: -item[1])
    sources = {PLAIN: "plain"}
    parts = [f"{share:.0%} {sources.get(name, f'with drafts of {name}')}" for name, share in by_share]
    lines = [f"{run.name}: of {tokens:,} tokens that were decided on, {', '.join(parts)}"]
    gains = {step: gain(decisions) for step, decisions in run.steps.items()}
    slow = sorted((value, step) for step, value in gains.items() if value is not None and value <= 1)
    for value, step in slow[:_MOST_STEPS_TOLD]:
        reasons = [_plain_reason(run.steps[step]), _worst_prediction(run.steps[step])]
        sentences = [
            f"{run.name}: step {step} brought {value:.2f} of what was predicted of plain decoding",
            *filter(None, reasons),
        ]
        lines.append("; ".join(sentences))
    if len(slow) > _MOST_STEPS_TOLD:
        more = len(slow) - _MOST_STEPS_TOLD
        lines.append(f"{run.name}: {more} more of {len(run.steps)} steps brought no more than that either")
    return lines


def _plain_reason(decisions: Sequence[Decision]) -> str | None:
    """Returns the most frequent reason for plain decoding, by time. Numbers in reasons are ignored."""
    seconds = collections.Counter[str]()
    for decision in decisions:
        if decision.drafter == PLAIN:
            seconds[re.sub(r"\d[\d.]*(e[+-]?\d+)?", "..", decision.reason)] += decision.seconds
    if not seconds:
        return None
    reason, most = seconds.most_common(1)[0]
    share = most / max(sum(decision.seconds for decision in decisions), 1e-9)
    return f"plain for {share:.0%} of the time because: {reason}"


def _worst_prediction(decisions: Sequence[Decision]) -> str | None:
    """Describes the drafter and the pass size with the largest deficit of tokens against the prediction."""
    groups = collections.defaultdict(list)
    for decision in decisions:
        if decision.drafter != PLAIN and decision.expected > 0 and decision.plain > 0:
            groups[decision.drafter, decision.rows].append(decision)
    missing = {
        key: sum(decision.expected - decision.tokens for decision in group) for key, group in groups.items()
    }
    worst = max(missing, key=missing.__getitem__, default=None)
    if worst is None or missing[worst] <= 0:
        return None
    group, (drafter, rows) = groups[worst], worst
    predicted = sum(decision.expected for decision in group) / sum(decision.plain for decision in group)
    compared = f"{predicted:.2f} times plain and brought {gain(group):.2f}"
    return f"furthest off: {drafter} with {rows} rows: predicted {compared}"


# --- drawn -------------------------------------------------------------------------------------------------


def draw_timeline(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Draws the last rollout of the last step."""
    from matplotlib.collections import PolyCollection

    step, decisions = list(run.steps.items())[-1]
    starts = [0, *(i for i in range(1, len(decisions)) if decisions[i].at < decisions[i - 1].at)]
    decisions = decisions[starts[-1] :]
    for drafter, color in colors.items():
        boxes = []
        for decision in decisions:
            if decision.drafter == drafter:
                left, right = decision.at, decision.at + decision.seconds
                top = decision.rows or decision.batch  # a plain step computes one row per slot
                boxes.append([(left, 0.5), (left, top), (right, top), (right, 0.5)])
        axes.add_collection(PolyCollection(boxes, facecolor=color, edgecolor="none", label=_label(drafter)))
    end = max(decision.at + decision.seconds for decision in decisions)
    axes.step(
        [*(decision.at for decision in decisions), end],
        [*(decision.responses for decision in decisions), decisions[-1].responses],
        where="post",
        color=_LINE_COLOR,
        linewidth=1.5,
        label="running responses",
    )
    highest = max(decision.rows or decision.batch for decision in decisions)
    axes.set(
        xlim=(0, end),
        xlabel="seconds since the rollout began",
        ylabel="rows of a pass, responses",
        title=f"Step {step}: who drafted, and rows (white: nothing decided)",
    )
    _powers_of_two(axes, "y")
    axes.set_ylim(0.5, 4 * highest)  # space for the legend
    axes.legend(loc="upper center", ncols=3, fontsize=8)


def draw_shares(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Draws the shares of tokens upwards, and of time downwards."""
    steps = np.asarray(list(run.steps))
    for amount, sign in (("tokens", 1), ("seconds", -1)):
        by_step = [shares(decisions, amount) for decisions in run.steps.values()]
        below = np.zeros(len(steps))
        for drafter, color in colors.items():
            heights = np.asarray([step_shares.get(drafter, 0.0) for step_shares in by_step])
            axes.bar(
                steps,
                sign * heights,
                width=0.9,
                bottom=sign * below,
                color=color,
                label=_label(drafter) if sign == 1 else None,
            )
            below += heights
    axes.axhline(0, color=_LINE_COLOR, linewidth=1)
    axes.set(ylabel="share of time  |  share of tokens", ylim=(-1.02, 1.3))
    axes.set_title("Who brought the tokens (up), who took the time (down)")
    axes.set_yticks(np.linspace(-1, 1, 9), [f"{abs(tick):.0%}" for tick in np.linspace(-1, 1, 9)])
    _steps_axis(axes, run)
    axes.legend(loc="upper center", ncols=4, fontsize=8)


def draw_predictions(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Draws measured against predicted gain; larger dots took longer."""
    known = [
        decision
        for decision in run.all
        if decision.expected > 0 and decision.plain > 0 and decision.tokens > 0
    ]
    longest = max((decision.seconds for decision in known), default=1.0)
    for drafter, color in colors.items():
        drafted = [decision for decision in known if decision.drafter == drafter]
        axes.scatter(
            [decision.expected / decision.plain for decision in drafted],
            [decision.tokens / decision.plain for decision in drafted],
            s=[2 + _LARGEST_DOT * decision.seconds / longest for decision in drafted],
            color=color,
            alpha=0.4,
            linewidth=0,
            rasterized=True,  # thousands of dots
            label=_label(drafter),
        )
    ends = [decision.tokens / decision.plain for decision in known] + [
        decision.expected / decision.plain for decision in known
    ]
    low, high = min(ends, default=0.5) / 1.2, max(ends, default=2.0) * 1.2
    axes.plot([low, high], [low, high], color=_LINE_COLOR, linewidth=1, label="as predicted")
    axes.axhline(1, color=_LINE_COLOR, linewidth=1, linestyle=":", label="as fast as plain")
    _powers_of_two(axes, "x", "y")
    axes.set(
        xlim=(low, high),
        ylim=(low, high),
        xlabel="predicted, times plain decoding",
        ylabel="measured, times plain decoding",
        title="Predicted and measured gain (dots by time)",
    )
    legend = axes.legend(loc="upper left", fontsize=8)
    for handle in legend.legend_handles[: len(colors)]:
        handle.set(sizes=[40], alpha=1)


def draw_accept_lengths(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    for drafter, color in colors.items():
        if drafter == PLAIN:
            continue
        by_step = {
            step: [decision for decision in decisions if decision.drafter == drafter]
            for step, decisions in run.steps.items()
        }
        points = [(step, accept_length(decisions)) for step, decisions in by_step.items() if decisions]
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=_label(drafter))
    axes.axhline(1, color=_PLAIN_COLOR, linestyle="--", label="a plain step")
    axes.set(ylabel="tokens of a response and pass", title="Accept length of verifying passes")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # space for the legend
    _steps_axis(axes, run)
    axes.legend(loc="upper center", ncols=4, fontsize=8)


def draw_positions(axes: "Axes", run: RunDecisions, colors: Mapping[str, str]) -> None:
    """Draws the accepted and verified nodes by position, over all steps."""
    for drafter, color in colors.items():
        drafted = [decision for decision in run.all if decision.drafter == drafter]
        accepted = by_position(drafted, "accepted")
        if not len(accepted):
            continue
        positions = np.arange(1, len(accepted) + 1)
        axes.plot(positions, accepted, "o-", color=color, markersize=4, label=_label(drafter))
        axes.plot(positions, by_position(drafted, "verified"), ":", color=color)
    axes.set(xlabel="position after the last token", ylabel="draft nodes of a response and pass")
    axes.set_title("Accepted by position (dotted: verified)")
    axes.set_ylim(0, max(1.25 * axes.get_ylim()[1], 1.25))  # space for the legend
    axes.locator_params(axis="x", integer=True)
    if axes.lines:
        axes.legend(loc="upper center", ncols=4, fontsize=8)


def _label(drafter: str) -> str:
    return "plain" if drafter == PLAIN else drafter


def _steps_axis(axes: "Axes", run: RunDecisions) -> None:
    axes.set(xlabel="step", xlim=(min(run.steps) - 0.6, max(run.steps) + 0.6))
    axes.locator_params(axis="x", integer=True)


def _powers_of_two(axes: "Axes", *which: str) -> None:
    """Makes axes logarithmic, with plain numbers at the ticks."""
    for axis in which:
        getattr(axes, f"set_{axis}scale")("log", base=2)
        getattr(axes, f"{axis}axis").set_major_formatter(
            lambda value, _: f"{value:.2g}" if value < 1 else f"{value:g}"
        )
