"""The results of an evaluation as a table."""

from typing import Any

from rich.console import Console
from rich.table import Table

_NAME_WIDTH, _CELL_WIDTH = 22, 17  # of the columns of names and of values with intervals, with borders


def print_table(results: dict[str, Any], console: Console) -> None:
    """Prints the metrics with half the width of their 95 % intervals, in one column for all problems and one
    for each difficulty. Tables are as wide as the console.

    Args:
      results: contents of results.json.
    """
    overall = results["overall"]
    names = [name for name in overall if name == "reward" or name != results["success"]]  # as `mean@n`
    columns = [("all", results["problems"], overall)]
    if len(results["by_difficulty"]) > 1:
        columns += [
            (f"difficulty {group['difficulty']}", group["problems"], group["metrics"])
            for group in results["by_difficulty"]
        ]
    at_once = max(1, (console.width - _NAME_WIDTH) // _CELL_WIDTH)
    for first in range(0, len(columns), at_once):
        shown = columns[first : first + at_once]
        title = None if first else _title(results)
        table = Table(title=title, title_justify="left", title_style="not italic")
        table.add_column("")
        for label, _, _ in shown:
            table.add_column(label, justify="right", no_wrap=True)
        table.add_row("problems", *(f"{problems:,}" for _, problems, _ in shown))
        for name in names:
            cells = (_cell(name, metrics[name]) if name in metrics else "" for _, _, metrics in shown)
            table.add_row(name.replace("_", " "), *cells)
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
