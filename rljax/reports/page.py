"""report.html: the report of one run, or of several side by side, as a single file.

It needs no network and runs no script, and its content security policy (CSP) forbids both, because the text
of responses is untrusted.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import numpy as np

from rljax.durable_files import write_durably
from rljax.errors import UserError
from rljax.reports.cluster import cluster_panels
from rljax.reports.figures import COLORS, in_blocks, svg_of
from rljax.reports.learning import learning_panels
from rljax.reports.rollouts import rollout_panels
from rljax.reports.runs import RunData, colors_of, differing_keys, read_run
from rljax.reports.speed import speed_panels

_MOST_SAMPLED_STEPS = 8  # of a run, evenly spread, including the last one
_SPARK_WIDTH, _SPARK_HEIGHT, _SPARK_POINTS = 120, 24, 60


def write_report(runs: Sequence[RunData], file: Path) -> None:
    """Writes the report of some runs.

    Raises:
      UserError: the file cannot be written.
    """
    html = report_html(runs)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, html.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{file}: the report cannot be written there: {error.strerror}") from error


def write_report_of_run(path: Path, say: Callable[[str], None]) -> None:
    """Writes report.html into the run's directory. A failure is a line for the user, not an error."""
    file = path / "report.html"
    try:
        write_report([read_run(path)], file)
    except Exception as error:  # a report must not fail a run
        say(f"no report: {' '.join(str(error).split()) or type(error).__name__}")
    else:
        say(f"report: {file}")


def report_html(runs: Sequence[RunData]) -> str:
    """Returns the page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rljax", "reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["svg"] = lambda panel: markupsafe.Markup(svg_of(panel))
    environment.globals["pieces"] = _pieces
    summary = [_summary(run) for run in runs]
    samples = [(run, list(_sampled_steps(run))) for run in runs]
    sections = {
        "Learning": list(learning_panels(runs)),
        "Rollouts": list(rollout_panels(runs)),
        "Speed": list(speed_panels(runs)),
        "Rollout workers": list(cluster_panels(runs)),
    }
    return environment.get_template("report.html.jinja").render(
        title=", ".join(run.name for run in runs),
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=runs,
        summary=summary,
        facts=list(dict.fromkeys(name for facts in summary for name in facts)),
        sections={name: panels for name, panels in sections.items() if panels},
        samples=samples,
        drafted=any(
            "drafted" in each
            for _, lines in samples
            for line in lines
            for each in (*line["best"], *line["worst"])
        ),
        metrics=_metrics(runs),
        differing=differing_keys(runs),
        colors=[f"var(--s{COLORS.index(color)})" for color in (colors_of(runs)[run.name] for run in runs)],
        spark=(_SPARK_WIDTH, _SPARK_HEIGHT),
    )


def _summary(run: RunData) -> dict[str, str]:
    """Returns the main facts of a run as text, by label."""
    facts = {"steps": f"{run.steps[-1]['step']:,}"}
    if run.evaluations:
        first, last = (run.evaluations[i] for i in (0, -1))
        rewards = [f"{line['evaluation/reward']:.3f}" for line in (first, last)]
        facts["held-out reward"] = rewards[1] if first is last else f"{rewards[0]} → {rewards[1]}"
    facts["reward"] = f"{run.steps[0]['reward/mean']:.3f} → {run.steps[-1]['reward/mean']:.3f}"
    if run.minutes is not None:
        facts["minutes"] = f"{run.minutes:.1f}"
    if run.has("rollout/tokens_per_second"):
        facts["tokens/s"] = f"{run.mean('rollout/tokens_per_second'):,.0f}"
    if run.has("time/step"):
        facts["rollout's share"] = f"{run.mean('time/rollout') / run.mean('time/step'):.0%}"
    if run.has("speculation/accept_length"):
        facts["accept length"] = f"{run.mean('speculation/accept_length'):.2f}"
    if run.has("mismatch/logprob_abs_max"):
        facts["largest mismatch"] = _number(float(np.nanmax(run.column("mismatch/logprob_abs_max"))))
    fingerprints = list(dict.fromkeys(line["numerics"] for line in run.sessions if "numerics" in line))
    if fingerprints:
        facts["numerics"] = ", ".join(fingerprints)
    return facts


def _sampled_steps(run: RunData) -> Iterator[dict[str, Any]]:
    """Yields evenly spread rollout lines with samples, newest first."""
    lines = [line for line in run.rollouts if line["best"] or line["worst"]]
    if lines:
        chosen = np.unique(np.linspace(0, len(lines) - 1, _MOST_SAMPLED_STEPS).round().astype(int))
        for i in reversed(chosen):
            yield lines[i]


def _pieces(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a sample's response in parts, each with what it is: "drafted" (an accepted draft), "read" (an
    environment's turn), or "".
    """
    spans = [(*span, kind) for kind in ("drafted", "read") for span in sample.get(kind, ())]
    text, at = sample["response"], 0
    for begin, end, kind in sorted(spans):
        yield text[at:begin], ""
        yield text[begin:end], kind
        at = end
    yield text[at:], ""


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A row of the table: per run, `curves` are SVG points, and `ends` the first and last value as text."""

    name: str
    curves: list[str]
    ends: list[tuple[str, str]]


def _metrics(runs: Sequence[RunData]) -> list[_Metric]:
    """Returns a row for every numeric metric of any training step."""
    names = sorted({name for run in runs for line in run.steps for name in line if name != "step"})
    rows = []
    for name in names:
        columns = [run.column(name) for run in runs]
        known = np.concatenate([column[np.isfinite(column)] for column in columns])
        if not len(known):
            continue
        last = max(run.steps[-1]["step"] for run in runs)
        limits = (min(run.steps[0]["step"] for run in runs), last), (known.min(), known.max())
        curves = [_spark(run.column("step"), c, *limits) for run, c in zip(runs, columns, strict=True)]
        finite = [column[np.isfinite(column)] for column in columns]
        ends = [(_number(values[0]), _number(values[-1])) if len(values) else ("", "") for values in finite]
        rows.append(_Metric(name, curves, ends))
    return rows


def _spark(
    steps: np.ndarray, values: np.ndarray, across: tuple[float, float], upwards: tuple[float, float]
) -> str:
    """Returns the SVG points of a small curve, y downwards."""
    steps, values = in_blocks(steps, _SPARK_POINTS), in_blocks(values, _SPARK_POINTS)
    x = (steps - across[0]) / max(across[1] - across[0], 1) * (_SPARK_WIDTH - 4) + 2
    height = upwards[1] - upwards[0]
    y = (upwards[1] - values) / height if height > 0 else np.where(np.isfinite(values), 0.5, np.nan)
    y = y * (_SPARK_HEIGHT - 4) + 2
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if math.isfinite(b))


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
