"""A paper's figure by simulation.

What a paper publishes of its inputs is seldom enough to compute its result. So a figure lists what was
published and what we chose, and why; it is computed with the central choices and over a band of others, one
changed at a time. A value of the paper within 15 % of the central one agrees; within the band it is what
other inputs give; outside of it the note says what would have to be true.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.errors import ConfigError, known_names

AGREES = 0.15
_MODULES = ("rhymerl", "specactor", "tlt", "srt", "turn_on")
_RESULTS = Path("benchmarks/results")


@dataclasses.dataclass(frozen=True)
class Published:
    """A value of a paper.

    Attributes:
      value: the number.
      where: figure, table or section.
      most: whether the paper states it as a maximum.
    """

    value: float
    where: str
    most: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """See the module's docstring.

    Attributes:
      name: for `--figure`.
      paper: paper and figure.
      published: the paper's values by name; names that it does not have are what ours adds.
      given: inputs that the paper publishes.
      chosen: inputs of ours, with the reason.
      compute: (overrides of the scenario) -> values by name.
      central: overrides of the central choices.
      band: other choices: (what is changed, overrides).
      notes: sentences about what does not agree, and what would have to be true.
      picture: writes a picture to a path, with the central choices; None for none.
    """

    name: str
    paper: str
    published: Mapping[str, Published]
    given: Mapping[str, str]
    chosen: Mapping[str, str]
    compute: Callable[[Sequence[str]], Mapping[str, float]]
    central: Sequence[str]
    band: Sequence[tuple[str, Sequence[str]]]
    notes: Sequence[str] = ()
    picture: Callable[[Path, Sequence[str]], None] | None = None


def figures() -> dict[str, Figure]:
    """Returns all figures by name."""
    found = {}
    for module in _MODULES:
        for figure in importlib.import_module(f"rljax.simulation.figures.{module}").FIGURES:
            found[figure.name] = figure
    return found


def computed(figure: Figure) -> dict[str, Any]:
    """Returns a figure's rows and inputs as JSON values."""
    central = figure.compute(figure.central)
    others = {what: figure.compute([*figure.central, *overrides]) for what, overrides in figure.band}
    rows = []
    for name, value in central.items():
        values = [value, *(other[name] for other in others.values())]
        row: dict[str, Any] = {"name": name, "value": float(value)}
        row |= {"low": float(min(values)), "high": float(max(values))}
        published = figure.published.get(name)
        if published is not None:
            row |= {"published": published.value, "where": published.where, "most": published.most}
            row["agrees"] = bool(abs(value / published.value - 1) <= AGREES)
            row["in_band"] = bool(row["low"] <= published.value <= row["high"])
        rows.append(row)
    return {
        "figure": figure.name,
        "paper": figure.paper,
        "given": dict(figure.given),
        "chosen": dict(figure.chosen),
        "central": list(figure.central),
        "band": {
            what: {"overrides": list(overrides), "values": dict(others[what])}
            for what, overrides in figure.band
        },
        "notes": list(figure.notes),
        "rows": rows,
    }


def as_text(result: Mapping[str, Any]) -> str:
    """Returns the rows of a figure as a table."""
    lines = [f"{result['figure']}: {result['paper']}"]
    for row in result["rows"]:
        published = ""
        if "published" in row:
            said = "agrees" if row["agrees"] else "in the band" if row["in_band"] else "outside of the band"
            bound = "at most " if row["most"] else ""
            published = f"  published {bound}{row['published']:g} ({row['where']}): {said}"
        lines.append(
            f"  {row['name']:<44} {row['value']:8.3g}  [{row['low']:.3g} to {row['high']:.3g}]{published}"
        )
    return "\n".join(lines)


def run_figures(name: str, results: Path = _RESULTS) -> None:
    """Computes a figure, or all of them, prints them, and writes `simulation-NAME.json` and pictures.

    Raises:
      ConfigError: there is none of that name.
    """
    from rljax.benchmarking import Row, write_results
    from rljax.provenance import command_line

    known = figures()
    if name != "all" and name not in known:
        raise ConfigError(f"--figure: unknown figure {name!r}; {known_names(name, ['all', *known])}")
    for figure in known.values() if name == "all" else [known[name]]:
        start = time.perf_counter()
        result = computed(figure)
        print(as_text(result))
        print(f"  {time.perf_counter() - start:.1f} s\n", flush=True)
        shared = {key: result[key] for key in ("paper", "given", "chosen", "central", "notes")}
        rows = [
            Row(
                name=f"{figure.name}/{row['name']}",
                value=row["value"],
                unit="simulated",
                baseline="published" if "published" in row else "not published",
                baseline_value=row.get("published", row["value"]),
                ratio=row["value"] / row.get("published", row["value"]) if row["value"] else 0.0,
                details={
                    **{key: row[key] for key in ("low", "high", "where", "agrees", "in_band") if key in row},
                    **({"inputs": shared, "band": result["band"]} if not number else {}),
                },
            )
            for number, row in enumerate(result["rows"])
        ]
        write_results(results / f"simulation-{figure.name}.json", rows, command_line())
        if figure.picture is not None:
            figure.picture(Path("docs/images") / f"simulation-{figure.name}.png", figure.central)
