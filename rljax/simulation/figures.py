"""The papers' figures by simulation, from `scenarios/*.yaml`: `python scripts/simulate.py --figure all`.

What a paper publishes of its inputs is seldom enough to compute its result. So a figure lists what was
published (`given`) and what we chose, and why (`chosen`); it is computed with the `central` choices and over
a `band` of others, one changed at a time. A value of the paper within 15 % of the central one agrees; within
the band it is what other inputs give; outside of it the notes say what would have to be true.

A figure's `values` are expressions over its `variants`, which are scenarios by name. A name in an expression
is a variant, and has the keys of its scenario and what was `Measured` of it; overrides of later variants may
have such expressions in braces. With a `sweep`, which multiplies the variants, `points` has one namespace of
them for each combination. The files are part of this package: their expressions are evaluated as Python.
"""

import functools
import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rljax.benchmarking import Row, write_results
from rljax.errors import ConfigError, known_names
from rljax.provenance import command_line
from rljax.simulation.cluster import Cluster
from rljax.simulation.outcome import Outcome, draw_timeline, outcome_of
from rljax.simulation.scenario import Scenario, rank_shares

AGREES = 0.15
_SCENARIOS = Path(__file__).with_name("scenarios")
_RESULTS, _PICTURES = Path("benchmarks/results"), Path("docs/images")

Figure = Mapping[str, Any]
"""An entry of `figures` in a file of scenarios."""


class Measured:
    """A scenario, simulated once something is asked of it. It has the scenario's keys, too."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outcome if name in Outcome.__dataclass_fields__ else self.scenario, name)

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The cluster after all steps."""
        return self.scenario.run(spans=True)

    @functools.cached_property
    def outcome(self) -> Outcome:
        """The figures of the steps after the warm-up."""
        return outcome_of(self.cluster, self.warm_up, self.prompts_per_step * self.samples)

    @property
    def apart_seconds(self) -> float:
        """Mean seconds of rollout and update of a step after the warm-up."""
        steps = self.cluster.steps[self.warm_up :]
        return sum(step.trained - step.begin for step in steps) / len(steps)

    @property
    def ten_steps(self) -> np.ndarray:
        """Seconds of every ten steps after the warm-up."""
        ends = [step.trained for step in self.cluster.steps]
        return np.array([ends[i + 10] - ends[i] for i in range(self.warm_up - 1, len(ends) - 10, 10)])

    @property
    def passes(self) -> float:
        """Mean passes of a worker in a step, of all steps."""
        places = self.cluster.places.values()
        return sum(place.worker.passes for place in places) / self.workers / len(self.cluster.steps)

    @property
    def tokens(self) -> float:
        """Mean tokens of a worker in a step, of all steps."""
        steps = self.cluster.steps
        return sum(step.tokens for step in steps) / len(steps) / self.workers


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)


_FUNCTIONS = {
    "min": min,
    "max": max,
    "mean": _mean,
    "ranks": lambda measured, groups: rank_shares(measured.scenario, groups),
}


class _Point:
    """The variants of a figure under some overrides, by name."""

    def __init__(self, figure: Figure, overrides: Sequence[str]) -> None:
        self._variants, self._overrides = figure["variants"], overrides

    def __getattr__(self, name: str) -> Measured:
        if name not in self._variants:
            raise AttributeError(name)
        text = re.sub(r"\{(.*?)\}", lambda found: str(self.value(found[1])), _joined(self._variants[name]))
        measured = Measured(Scenario().replaced([*self._overrides, *text.split()]))
        self.__dict__[name] = measured
        return measured

    def __getitem__(self, name: str) -> Measured:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def value(self, expression: str, **more: Any) -> Any:
        """Returns the value of an expression."""
        return eval(expression, _FUNCTIONS | more | {"__builtins__": {}}, self)


def _joined(overrides: str | Sequence[str]) -> str:
    return overrides if isinstance(overrides, str) else " ".join(overrides)


def figures() -> dict[str, Figure]:
    """Returns all figures by name."""
    found = {}
    for name in ("rhymerl", "specactor", "tlt", "srt", "turn_on"):
        content = yaml.safe_load((_SCENARIOS / f"{name}.yaml").read_text(encoding="utf-8"))
        found |= {figure["name"]: figure for figure in content["figures"]}
    return found


def _points(figure: Figure, overrides: str = "") -> list[_Point]:
    shared = [*_joined(figure["central"]).split(), *overrides.split()]
    return [
        _Point(figure, [*shared, *" ".join(combination).split()])
        for combination in itertools.product(*figure.get("sweep", ()))
    ]


def _values(figure: Figure, points: list[_Point]) -> dict[str, float]:
    return {name: points[0].value(row["of"], points=points) for name, row in figure["values"].items()}


def computed(figure: Figure, points: list[_Point] | None = None) -> dict[str, Any]:
    """Returns a figure's rows and inputs as JSON values; `points` are those of the central choices."""
    central = _values(figure, _points(figure) if points is None else points)
    band = figure["band"]
    others = {what: _values(figure, _points(figure, overrides)) for what, overrides in band.items()}
    rows = []
    for name, value in central.items():
        values = [value, *(other[name] for other in others.values())]
        row: dict[str, Any] = {"name": name, "value": float(value)}
        row |= {"low": float(min(values)), "high": float(max(values))}
        published = figure["values"][name].get("published")
        if published is not None:
            row |= {"published": published, "where": figure["values"][name]["where"]}
            row["most"] = figure["values"][name].get("most", False)
            row["agrees"] = bool(abs(value / published - 1) <= AGREES)
            row["in_band"] = bool(row["low"] <= published <= row["high"])
        rows.append(row)
    return {
        "figure": figure["name"],
        "paper": figure["paper"],
        "given": figure.get("given", {}),
        "chosen": figure["chosen"],
        "central": _joined(figure["central"]).split(),
        "band": {
            what: {"overrides": overrides.split(), "values": others[what]} for what, overrides in band.items()
        },
        "notes": figure.get("notes", []),
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


def run_figures(name: str) -> None:
    """Computes a figure, or all of them, prints them, and writes `simulation-NAME.json` and pictures.

    Raises:
      ConfigError: there is none of that name.
    """
    known = figures()
    if name != "all" and name not in known:
        raise ConfigError(f"--figure: unknown figure {name!r}; {known_names(name, ['all', *known])}")
    for figure in known.values() if name == "all" else [known[name]]:
        start = time.perf_counter()
        points = _points(figure)
        result = computed(figure, points)
        print(as_text(result))
        print(f"  {time.perf_counter() - start:.1f} s\n", flush=True)
        shared = {key: result[key] for key in ("paper", "given", "chosen", "central", "notes")}
        rows = [
            Row(
                name=f"{figure['name']}/{row['name']}",
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
        write_results(_RESULTS / f"simulation-{figure['name']}.json", rows, command_line())
        if picture := figure.get("picture"):
            clusters = {label: points[0][variant].cluster for label, variant in picture["variants"].items()}
            path = _PICTURES / f"simulation-{figure['name']}.png"
            draw_timeline(clusters, path, *picture["steps"], picture["title"])
