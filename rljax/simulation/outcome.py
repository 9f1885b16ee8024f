"""What a simulation tells: figures, a table, and a timeline picture of workers and trainer."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.reports.figures import new_figure, save
from rljax.simulation.cluster import Cluster, Span, StepTimes

_MOST_ROWS = 48  # workers in a picture
_COLOURS = [f"C{number}" for number in range(10)]  # of Matplotlib's cycle


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of the steps after the warm-up.

    Attributes:
      step_seconds: between the ends of two updates, on average.
      rollout_seconds: of a rollout, on average; in a pipe they overlap.
      tokens_per_second: sampled tokens.
      busy: share of the workers' time in which they decode.
      first_idle: mean share of a rollout for which the worker that ends first has nothing to do; NaN where
        workers go on to the next one.
      migrated: share of responses that went on elsewhere.
      failures: workers that were lost, in the warm-up too.
      seconds: virtual time of all steps.
      head_updates: of a head that idle workers train, a step, in the warm-up too.
      training: share of the workers' time in which they do that.
      training_delay: seconds a step that requests wait for it.
    """

    step_seconds: float
    rollout_seconds: float
    tokens_per_second: float
    busy: float
    first_idle: float
    migrated: float
    failures: int
    seconds: float
    head_updates: float
    training: float
    training_delay: float


def outcome_of(cluster: Cluster, warm_up: int, responses: int) -> Outcome:
    """Returns the figures of a cluster after its steps of so many responses each, without those of the
    warm-up.
    """
    steps, machines = cluster.steps, cluster.machines
    counted = steps[warm_up:]
    seconds = counted[-1].trained - (steps[warm_up - 1].trained if warm_up else 0.0)
    available = machines.workers * cluster.now
    first = [_first_idle(cluster.spans, number, step) for number, step in enumerate(steps, 1)][warm_up:]
    counts: Any = getattr(cluster.coordinator.idle_work, "counts", None)
    return Outcome(
        seconds / len(counted),
        sum(step.end - step.begin for step in counted) / len(counted),
        sum(step.tokens for step in counted) / seconds,
        (sum(cluster.busy_seconds()) + cluster.lost_busy) / available,
        sum(first) / len(first),
        sum(step.migrations for step in counted) / (responses * len(counted)),
        cluster.failures,
        cluster.now,
        counts.updates / len(steps) if counts else 0.0,
        counts.seconds / available if counts else 0.0,
        counts.delay / len(steps) if counts else 0.0,
    )


def _first_idle(spans: Sequence[Span], number: int, step: StepTimes) -> float:
    last: dict[int, float] = {}
    for span in spans:
        if span.step == number:
            last[span.worker] = max(last.get(span.worker, 0.0), span.end)
    if not last or step.end <= step.begin:
        return math.nan
    return (step.end - min(last.values())) / (step.end - step.begin)


def table(outcomes: dict[str, Outcome]) -> str:
    """Returns a table of outcomes by name, with speed-ups over the first one."""
    first = next(iter(outcomes.values()))
    header = ("", "step s", "speed-up", "rollout s", "tokens/s", "busy", "first idle", "migrated")
    spot = any(each.head_updates for each in outcomes.values())
    rows: list[tuple[str, ...]] = [(*header, "training", "updates") if spot else header]
    for name, each in outcomes.items():
        idle = "" if math.isnan(each.first_idle) else f"{each.first_idle:.0%}"
        rows.append(
            (
                name,
                f"{each.step_seconds:,.1f}",
                f"{first.step_seconds / each.step_seconds:.2f}",
                f"{each.rollout_seconds:,.1f}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.busy:.0%}",
                idle,
                f"{each.migrated:.1%}",
                *((f"{each.training:.0%}", f"{each.head_updates:,.0f}") if spot else ()),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def draw_timeline(
    clusters: dict[str, Cluster], path: Path, first_step: int, last_step: int, title: str = ""
) -> None:
    """Writes a picture: a panel a cluster, a row a worker, a colour a step, and the trainer below."""
    figure = new_figure(11, 1.2 + 2.6 * len(clusters))
    axes = figure.subplots(len(clusters), 1, sharex=True, squeeze=False)
    latest = 0.0
    for axis, (name, cluster) in zip(axes[:, 0], clusters.items(), strict=True):
        begin = cluster.steps[first_step - 1].begin
        workers = cluster.machines.workers
        shown = sorted({round(i * (workers - 1) / max(_MOST_ROWS - 1, 1)) for i in range(_MOST_ROWS)})
        row_of = {worker: row for row, worker in enumerate(shown if workers > _MOST_ROWS else range(workers))}
        for span in cluster.spans:
            if span.worker in row_of and first_step <= span.step <= last_step:
                axis.broken_barh(
                    [(span.begin - begin, span.end - span.begin)],
                    (row_of[span.worker] + 0.05, 0.9),
                    facecolors=_COLOURS[span.step % 10],
                    hatch="////" if span.kind == "copy" else None,
                    edgecolor="white",
                    linewidth=0.2,
                )
        for number in range(first_step, last_step + 1):
            step = cluster.steps[number - 1]
            length = cluster.machines.train_seconds(step.tokens)
            axis.broken_barh(
                [(step.trained - length - begin, length)], (-2.4, 1.6), facecolors=_COLOURS[number % 10]
            )
            latest = max(latest, step.trained - begin)
        axis.set_yticks([-1.6, len(row_of) / 2], ["trainer", f"{workers} workers"])
        axis.set_ylim(-2.8, len(row_of))
        axis.set_title(name, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    axes[-1, 0].set_xlim(0, latest)
    if title:
        figure.suptitle(title, fontsize=11)
    save(figure, path)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the figures as JSON values; what does not exist is null."""
    values = dataclasses.asdict(outcome)
    return {name: None if math.isnan(value) else value for name, value in values.items()}
