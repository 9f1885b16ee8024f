"""The results of an evaluation as a table."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(results: dict[str, Any], console: Console) -> None:
    """Prints the metrics, of all problems and by difficulty, each with half the width of its 95 % interval.

    Args:
      results: as in results.json.
      console: where to.
    """
    overall = results["overall"]
    names = [name for name in overall if name == "reward" or name != results["success"]]  # `mean@n` says it
    table = Table(title=_title(results), title_justify="left", title_style="not italic")
    table.add_column("difficulty")
    for name in ("problems", *names):
        table.add_column(name.replace("_", " "), justify="right")
    lines = [("all", results["problems"], overall)]
    if len(results["by_difficulty"]) > 1:
        lines += [
            (each["difficulty"], each["problems"], each["metrics"]) for each in results["by_difficulty"]
        ]
    for label, problems, metrics in lines:
        table.add_row(label, f"{problems:,}", *(_cell(name, metrics[name]) for name in names))
    console.print(table)


def _title(results: dict[str, Any]) -> str:
    policy = results["policy"]
    step = "" if policy["step"] is None else f", step {policy['step']}"
    samples = results["samples"]
    return (
        f"{policy['path']}{step}: {results['problems']:,} problems, {samples:,} sample"
        f"{'' if samples == 1 else 's'} each; passed where {results['success']} is 1"
    )


def _cell(name: str, estimate: dict[str, float | None]) -> str:
    digits = 1 if name == "response_length" else 3
    if estimate["low"] is None:
        return f"{estimate['value']:.{digits}f}"
    half = (estimate["high"] - estimate["low"]) / 2
    return f"{estimate['value']:.{digits}f} ±{half:.{digits}f}"
