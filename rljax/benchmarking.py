"""Shared by all benchmark scripts: facts of the machine, and one format of results.

Timing is in `rljax.timing`. Results are JSON, one file a script, with the command, commit and machine that
made them:

    {"command", "commit", "date", "machine": {"cpu", "vectors", "cores", "accelerator", "jax",
     "python"},
     "rows": [{"name", "value", "unit", "baseline", "baseline_value", "ratio", ...}]}
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rljax.provenance import write_figures
from rljax.timing import Comparison

# --- interference ----------------------------------------------------------------------------------------


class Interference:
    """Measures how much of the machine other processes took meanwhile (on a virtual one, its host too).

        with Interference() as interference:
            ...
        interference.share

    Attributes:
      share: share of all cores' time, 0 to 1; None before the end, and on systems that do not tell (Linux
        does).
    """

    def __init__(self) -> None:
        self.share: float | None = None

    def __enter__(self) -> "Interference":
        self._start = self._clocks()
        return self

    def __exit__(self, *exception: object) -> None:
        stop = self._clocks()
        if self._start is not None and stop is not None:
            busy, own, total = (after - before for before, after in zip(self._start, stop, strict=True))
            self.share = min(max((busy - own) / total, 0.0), 1.0) if total else 0.0

    @staticmethod
    def _clocks() -> tuple[float, float, float] | None:
        """Core-seconds that were not idle, those of this process and its finished children, and all."""
        try:
            line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [int(field) for field in line.split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return (sum(ticks) - ticks[3] - ticks[4]) / per_second, own, sum(ticks) / per_second


# --- results ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure.

    Attributes:
      name: name of the measurement, such as "decode/25M/batch 8/row_invariant on".
      value: ours, in `unit`.
      unit: unit of value and baseline_value, such as "tokens/s".
      ratio: above 1 means that ours is better, whether `unit` counts speed or time.
      details: whatever else the reader needs, besides these fields in the JSON object.
    """

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        details = own.pop("details")
        if clash := own.keys() & details.keys():
            raise ValueError(f"{self.name}: details repeat {sorted(clash)}")
        return {**own, **details}


def timed_row(
    name: str, timing: Comparison, baseline: str, unit: str = "s", scale: float = 1.0, **details: Any
) -> Row:
    """Returns the row of two sides that were timed.

    Args:
      timing: seconds of both.
      unit: of the seconds times `scale`.
      scale: such as 1e3 for milliseconds.
      details: besides the extremes of the ratio and the number of rounds.
    """
    seconds = scale * timing.seconds, scale * timing.baseline_seconds
    return Row(name, seconds[0], unit, baseline, seconds[1], timing.ratio, _rounds(timing) | details)


def speed_row(name: str, amount: float, timing: Comparison, baseline: str, **details: Any) -> Row:
    """As `timed_row`, in tokens per second, where each call of either side is of `amount` tokens."""
    rates = amount / timing.seconds, amount / timing.baseline_seconds
    return Row(name, rates[0], "tokens/s", baseline, rates[1], timing.ratio, _rounds(timing) | details)


def counted_row(
    name: str,
    value: float,
    baseline_value: float,
    unit: str,
    baseline: str,
    less: bool = False,
    **details: Any,
) -> Row:
    """Returns the row of two figures, of which the larger one is better, or with `less` the smaller one."""
    better, worse = (baseline_value, value) if less else (value, baseline_value)
    return Row(name, value, unit, baseline, baseline_value, better / worse, details)


def _rounds(timing: Comparison) -> dict[str, Any]:
    return {"rounds": timing.rounds, "ratio_low": timing.ratio_low, "ratio_high": timing.ratio_high}


def write_results(
    path: str | os.PathLike[str], rows: Sequence[Row], command: str, packages: Sequence[str] = ()
) -> None:
    """Writes rows, at least one, as `write_figures` does."""
    if not rows:
        raise ValueError("no rows to write")
    write_figures(path, {"rows": [row.as_json() for row in rows]}, command, packages)


def results_console() -> Console:
    """A console whose tables are not squeezed into 80 columns where the output is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 120)


def print_table(rows: Sequence[Row], title: str, console: Console) -> None:
    """Prints name, value, baseline and ratio of every row."""
    table = Table(title=title, title_justify="left")
    table.add_column("measured", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("baseline", overflow="fold")
    table.add_column("its value", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{_short(row.value)} {row.unit}",
            row.baseline,
            f"{_short(row.baseline_value)} {row.unit}",
            f"{row.ratio:.2f}",
        )
    console.print(table)


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
