"""Reads the directories of runs for reports, and groups runs into series."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from rljax.config.changes import flattened, is_one_of
from rljax.config.yaml_dialect import parse_yaml
from rljax.errors import UserError
from rljax.reports.decisions import RunDecisions, read_decisions
from rljax.reports.figures import COLORS
from rljax.run_directory import RunDirectory

# Keys that may differ between repetitions of one experiment.
_REPETITION_KEYS = ("seed", "run_dir", "tracking", "checkpoint", "engine.compilation_cache")
NORMAL_QUANTILE = 1.96


@dataclasses.dataclass(frozen=True)
class RunData:
    """One run.

    Attributes:
      path: directory of the run.
      name: name on display.
      steps: lines of metrics of the training steps, at least one.
      evaluations: lines of metrics with a held-out reward.
      sessions: processes that trained the run.
      rollouts: summaries of the rollouts (`rljax/rollout/summary.py`).
      decisions: decisions of the manager.
      config: text of config.yaml; empty if there is none.
      workers: what rollout workers did in each step (`rljax/cluster/timeline.py`).
    """

    path: Path
    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    decisions: RunDecisions
    config: str
    workers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def minutes(self) -> float | None:
        """Minutes from the start of the command to the last metrics line; None after several sessions."""
        return self.steps[-1]["time/elapsed"] / 60 if len(self.sessions) == 1 else None

    @functools.cached_property
    def keys(self) -> dict[str, Any]:
        """The config as dotted keys."""
        return dict(flattened(parse_yaml(self.config, "config.yaml") or {}))

    def has(self, metric: str) -> bool:
        """Whether any step has this metric as a finite number."""
        return bool(np.isfinite(self.column(metric)).any())

    def column(self, metric: str) -> np.ndarray:
        """Returns a metric of every step, [steps]; NaN where it is missing or not a number."""
        values = [line.get(metric) for line in self.steps]
        return np.asarray([v if isinstance(v, int | float) else np.nan for v in values], float)

    def mean(self, metric: str) -> float:
        """Returns the mean of a metric over the steps that have it; NaN if none has."""
        values = self.column(metric)
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def read_run(path: Path) -> RunData:
    """Reads a run; raises a UserError if there is none in `path`, or it has not finished a step yet."""
    if not (path / "metrics.jsonl").exists():
        raise UserError(f"{path}: no run there (metrics.jsonl is missing)")
    directory = RunDirectory(path)
    lines = directory.read_metrics()
    steps = [line for line in lines if "reward/mean" in line]
    if not steps:
        raise UserError(f"{path}: the run has not finished a step yet")
    config = directory.config_path
    return RunData(
        path,
        path.resolve().name,
        steps,
        [line for line in lines if "evaluation/reward" in line],
        directory.read_sessions(),
        directory.read_rollouts(),
        read_decisions(path),
        config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
        directory.read_workers(),
    )


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Reads several runs; if two directories have the same name, the runs are named by their paths."""
    runs = [read_run(path) for path in paths]
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [dataclasses.replace(run, name=str(run.path)) for run in runs]


@dataclasses.dataclass(frozen=True)
class Series:
    """One or more repetitions of one experiment.

    Attributes:
      name: name on display.
      runs: runs that differ only by their seed.
    """

    name: str
    runs: list[RunData]


def series_of(runs: Sequence[RunData]) -> list[Series]:
    """Groups runs that differ only by the seed. A run without a config is a series by itself."""
    groups: dict[Any, list[RunData]] = {}
    for number, run in enumerate(runs):
        config = {name: value for name, value in run.keys.items() if not is_one_of(name, _REPETITION_KEYS)}
        groups.setdefault(repr(sorted(config.items())) if config else number, []).append(run)
    return [Series(_name_of(group), group) for group in groups.values()]


def colors_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Returns the colour of each run's series, by the run's name; colours repeat after the last one."""
    return {
        run.name: COLORS[number % len(COLORS)]
        for number, series in enumerate(series_of(runs))
        for run in series.runs
    }


def differing_keys(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Returns the keys whose values differ between configs, with each run's value; None where it is
    missing.
    """
    names = dict.fromkeys(name for run in runs for name in run.keys)
    values = {name: [run.keys.get(name) for run in runs] for name in names}
    return {name: column for name, column in values.items() if any(value != column[0] for value in column)}


def t_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean over the first axis, and the half width of its 95 % interval by Student's t."""
    count = len(values)
    return values.mean(0), stdtrit(count - 1, 0.975) * values.std(0, ddof=1) / np.sqrt(count)


def _name_of(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return runs[0].name
    letters = zip(*(run.name for run in runs), strict=False)
    shared = "".join(
        column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, letters)
    )
    shared = shared.rstrip("-_. /") or runs[0].name
    return f"{shared} ({len(runs)} seeds)"
