"""Tokens that a slot must get from a verifying pass, so that drafting is not slower than plain decoding.

A pass pays if its tokens take less time than decode steps: tokens a slot > seconds of the pass / seconds of a
decode step over the same slots. Drafting itself comes on top.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.errors import UserError
from rljax.reports.figures import COLORS, new_figure, save

Lines = Mapping[int, Sequence[tuple[float, float]]]
"""By slots: rows a slot, and the break-even tokens a slot, with ascending rows."""


def break_even(passes: Sequence[Mapping[str, Any]]) -> Lines:
    """Returns the break-even line of every number of slots.

    Args:
      passes: decode steps and verifying passes, with "slots", "rows" and "seconds".
    """
    steps = {row["slots"]: row["seconds"] for row in passes if row["rows"] == row["slots"]}
    lines: dict[int, list[tuple[float, float]]] = {slots: [(1.0, 1.0)] for slots in steps}
    for row in sorted(passes, key=lambda row: row["rows"]):
        slots = row["slots"]
        if row["rows"] > slots:
            lines[slots].append((row["rows"] / slots, row["seconds"] / steps[slots]))
    return {slots: line for slots, line in sorted(lines.items()) if len(line) > 1}


def _read(path: Path) -> tuple[str, Lines]:
    """A title and the lines of what `bench_plan.py --only passes` or `plan.py --json` wrote."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in written:
            machine = written["machine"]
            timed = [row for row in written["rows"] if row["section"] == "passes"]
            passes = [{**row, "seconds": 1e-3 * row["value"]} for row in timed]
            return f"{machine['cpu']}, {machine['cores']} cores, measured", break_even(passes)
        count, kind = written["devices"], written["hardware"]["kind"]
        passes = [*written["decoding"], *written["verifying"]]
        return f"{kind if count == 1 else f'{count} x {kind}'}, planned", break_even(passes)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: holds no passes ({error})") from error


def plot(results: Sequence[Path], path: Path) -> None:
    """Draws a panel for each file of results: what a slot must get, by the rows that it has in the pass."""
    figure = new_figure(3.6 * len(results), 3.2)
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for panel, (title, lines) in zip(panels, map(_read, results), strict=True):
        for number, (slots, line) in enumerate(lines.items()):
            rows, tokens = zip(*line, strict=True)
            color = COLORS[number % len(COLORS)]
            panel.plot(rows, tokens, ".-", color=color, linewidth=1.5, label=f"{slots} slots")
        panel.plot([1, 16], [1, 16], color="0.7", linewidth=0.8, linestyle="--")  # every draft is accepted
        panel.set(xscale="log", yscale="log", xlim=(1, 17), ylim=(1, 8))
        panel.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"], minor=False)
        panel.set_yticks([1, 1.5, 2, 3, 4, 6, 8], labels=["1", "1.5", "2", "3", "4", "6", "8"], minor=False)
        panel.minorticks_off()
        panel.set_title(title, fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, frameon=False)
    figure.supxlabel("rows of a slot in a verifying pass: one and its drafts", fontsize=9)
    figure.supylabel("tokens a slot to break even", fontsize=9)
    save(figure, path)
