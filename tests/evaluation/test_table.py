"""The printed table: whole figures on a narrow terminal, whatever the number of difficulties."""

import io

from rich.console import Console

from rljax.evaluation.table import print_table


def estimate(value):
    return {"value": value, "low": value - 0.25, "high": value + 0.25}


def test_nothing_is_cut_off_on_a_narrow_terminal():
    names = ["reward", "mean@4", "response_length", "truncated"]
    by_difficulty = [
        {"difficulty": str(i), "problems": 10 + i, "metrics": {name: estimate(i / 8) for name in names}}
        for i in range(7)
    ]
    results = {
        "overall": {name: estimate(0.5) for name in names},
        "problems": 91,
        "samples": 4,
        "success": "correct",
        "by_difficulty": by_difficulty,
        "policy": {"path": "runs/some", "step": 3},
    }
    text = io.StringIO()
    print_table(results, Console(file=text, width=80))
    printed = text.getvalue()
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    for number in range(7):
        assert f"difficulty {number}" in printed and f"{number / 8:.3f} ±0.250" in printed
