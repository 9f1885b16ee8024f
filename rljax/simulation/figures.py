"""The papers' figures by simulation, from `scenarios/*.yaml`: `python scripts/simulate.py --figure all`.

What a paper publishes of its inputs is seldom enough to compute its result. So a figure lists what was
published (`given`) and what we chose, and why (`chosen`); it is computed with the `central` choices and over
a `band` of others, one changed at a time, those of the hardware (`HARDWARE`) among them. What passes take is
the same for all papers: no figure sets it, and `scenario.py` says where it comes from.

A speed-up agrees if its gain, which is the ratio - 1, is within a quarter of the published gain; what has a
`unit`, such as seconds, if it is within 15 %. What is published as `[from, to]` agrees inside of that, too;
what is published as `above` a value, if it is above. Else "in the band" is what other inputs give. A value
that inputs were `fitted` to says nothing. docs/simulation.md says what would have to be true of the rest.

A figure's `values` are expressions over its `variants`, which are scenarios by name. A name in an expression
is a variant, and has the keys of its scenario and what was `Measured` of it; overrides of later variants may
have such expressions in braces. `inputs` are texts that variants share as `@name`; `@name=text` in an
override replaces one. With a `sweep`, which multiplies the variants, `points` has one namespace of them for
each combination. The files are part of this package: their expressions are evaluated as Python.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rljax.errors import ConfigError, known_names
from rljax.provenance import command_line, write_figures
from rljax.simulation.cluster import Cluster
from rljax.simulation.outcome import Outcome, draw_timeline, outcome_of
from rljax.simulation.scenario import Scenario, rank_shares

AGREES, GAIN_AGREES = 0.15, 0.25
HARDWARE = {
    "slower arithmetic": "arithmetic=0.3",
    "faster arithmetic": "arithmetic=0.8",
    "slower memory": "memory=0.6",
    "slower passes": "base_ms=4",
}
"""What every band has."""
_SCENARIOS = Path(__file__).with_name("scenarios")
RESULTS, _PICTURES = Path("benchmarks/results"), Path("docs/images")

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
    def migrations(self) -> np.ndarray:
        """Percent of the responses of each step after the warm-up that went on elsewhere."""
        steps = self.cluster.steps[self.warm_up :]
        return 100 * np.array([step.migrations for step in steps]) / (self.prompts_per_step * self.samples)

    @property
    def first_copy(self) -> float:
        """Mean seconds of a step after the warm-up until a response is raced for with another drafter."""
        steps = enumerate(self.cluster.steps[self.warm_up :], self.warm_up + 1)
        copies = [span for span in self.cluster.spans if span.kind == "copy"]
        return _mean(
            min((span.begin for span in copies if span.step == number), default=step.end) - step.begin
            for number, step in steps
        )

    @property
    def idle_seconds(self) -> float:
        """Mean seconds of a step after the warm-up in which a worker waits for the end of the rollout."""
        steps = list(enumerate(self.cluster.steps[self.warm_up :], self.warm_up + 1))
        busy = sum(span.end - span.begin for span in self.cluster.spans if span.step > self.warm_up)
        return _mean(step.end - step.begin for _, step in steps) - busy / self.workers / len(steps)

    def speed(self, running: int) -> float:
        """Tokens per second of one of so many requests, whose caches take no time."""
        return 1 / self.scenario.machines().drafting.token_seconds(running, 0.0)

    def prefill(self, tokens: float) -> float:
        """Seconds of prefilling so many tokens."""
        return self.scenario.pass_costs().prefill(round(tokens))

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
    "ranks": lambda measured, groups: 100 * rank_shares(measured.scenario, groups),
}


class _Point:
    """The variants of a figure under some overrides, by name."""

    def __init__(self, figure: Figure, overrides: Sequence[str]) -> None:
        self._variants, self._inputs = figure["variants"], dict(figure.get("inputs", {}))
        for override in overrides:
            name, _, text = override.partition("=")
            if name.startswith("@"):
                self._inputs[name[1:]] = text
        self._overrides = [override for override in overrides if not override.startswith("@")]

    def __getattr__(self, name: str) -> Measured:
        if name not in self._variants:
            raise AttributeError(name)
        text = re.sub(r"@(\w+)", lambda found: self._inputs[found[1]], _joined(self._variants[name]))
        text = re.sub(r"\{(.*?)\}", lambda found: str(self.value(found[1])), text)
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
    return {name: float(points[0].value(row["of"], points=points)) for name, row in figure["values"].items()}


def central_values(figure: Figure) -> dict[str, float]:
    """Returns the values with the central choices."""
    return _values(figure, _points(figure))


def verdict_of(row: Mapping[str, Any]) -> str:
    """Returns what is said of a row: "agrees", "in the band" or "outside"; "fitted" where it was; "" of one
    that is not published.
    """
    if row.get("fitted"):
        return "fitted"
    if "above" in row:
        low, high, agrees = row["above"], float("inf"), row["value"] > row["above"]
    elif "published" in row:
        low, high = _interval(row["published"])
        nearest = min(max(row["value"], low), high)
        zero, most = (1.0, GAIN_AGREES) if row["unit"] == "speed-up" else (0.0, AGREES)
        agrees = abs(row["value"] - nearest) <= most * abs(nearest - zero)
    else:
        return ""
    if agrees:
        return "agrees"
    return "in the band" if row["low"] <= high and low <= row["high"] else "outside"


def _interval(published: float | Sequence[float]) -> tuple[float, float]:
    low, high = published if isinstance(published, Sequence) else (published, published)
    return low, high


def _published(row: Mapping[str, Any]) -> str:
    """What is published of a row, as text."""
    if "above" in row:
        return f"above {row['above']:g}"
    if "published" not in row:
        return ""
    low, high = _interval(row["published"])
    bound = "at most " if row.get("most") else ""
    return f"{bound}{low:g}" + (f" to {high:g}" if high > low else "")


def computed(figure: Figure, points: list[_Point] | None = None) -> dict[str, Any]:
    """Returns a figure's rows and inputs as JSON values; `points` are those of the central choices."""
    central = _values(figure, _points(figure) if points is None else points)
    band = figure["band"] | HARDWARE
    others = {what: _values(figure, _points(figure, overrides)) for what, overrides in band.items()}
    rows = []
    for name, value in central.items():
        values = [value, *(other[name] for other in others.values())]
        said = figure["values"][name]
        row: dict[str, Any] = {"name": name, "value": value}
        row |= {"low": min(values), "high": max(values), "unit": said.get("unit", "speed-up")}
        row |= {key: said[key] for key in ("published", "above", "where", "most", "fitted") if key in said}
        if verdict := verdict_of(row):
            row["verdict"] = verdict
        rows.append(row)
    return {
        "figure": figure["name"],
        "paper": figure["paper"],
        "given": figure.get("given", {}),
        "chosen": figure["chosen"],
        "central": _joined(figure["central"]).split(),
        "inputs": figure.get("inputs", {}),
        "band": {
            what: {"overrides": overrides.split(), "values": others[what]} for what, overrides in band.items()
        },
        "rows": rows,
    }


def as_rows(result: Mapping[str, Any]) -> str:
    """Returns a figure as rows of the table in docs/simulation.md."""
    link = f"[{result['paper']}](../benchmarks/results/simulation-{result['figure']}.json)"
    return "\n".join(
        f"| {'' if number else link} | {row['name']} | {_published(row)} | {row['value']:.3g}"
        f" | {row['low']:.3g} to {row['high']:.3g} | {row.get('verdict', '')} |"
        for number, row in enumerate(result["rows"])
    )


def run_figures(name: str) -> None:
    """Computes a figure, or all of them, prints them, and writes `simulation-NAME.json` and pictures.

    Raises:
      ConfigError: there is none of that name.
    """
    known = figures()
    if name != "all" and name not in known:
        raise ConfigError(f"--figure: unknown figure {name!r}; {known_names(name, ['all', *known])}")
    for figure in known.values() if name == "all" else [known[name]]:
        points = _points(figure)
        result = computed(figure, points)
        print(as_rows(result), flush=True)
        write_figures(RESULTS / f"simulation-{figure['name']}.json", result, command_line())
        if picture := figure.get("picture"):
            clusters = {label: points[0][variant].cluster for label, variant in picture["variants"].items()}
            path = _PICTURES / f"simulation-{figure['name']}.png"
            draw_timeline(clusters, path, *picture["steps"], picture["title"])
