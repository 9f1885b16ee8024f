"""The papers' figures by simulation are those of the results: their scenarios have the papers' mechanisms."""

import json

import pytest

from rljax.simulation.figures import RESULTS, central_values
from tests.simulation.test_figures import FIGURES, ROOT

QUICK = ("rhymerl-table-2", "tlt-table-4")
"""Figures whose central values take seconds; all others are held by `--all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FIGURES]
)
def test_central_values_are_those_of_the_results(name):
    figure = FIGURES[name]
    result = json.loads((ROOT / RESULTS / f"simulation-{name}.json").read_text())
    values = central_values(figure)
    assert [row["name"] for row in result["rows"]] == list(values)
    for row in result["rows"]:
        assert values[row["name"]] == pytest.approx(row["value"], rel=1e-6), row["name"]
