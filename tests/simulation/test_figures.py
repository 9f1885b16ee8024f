"""The files of scenarios: all that they name exists, and their values are what their expressions say."""

import collections
import itertools
import json
import re
from pathlib import Path

import pytest

from rljax.errors import ConfigError
from rljax.planning.hardware import Hardware, Work
from rljax.simulation.figures import (
    HARDWARE,
    RESULTS,
    Measured,
    as_rows,
    computed,
    figures,
    run_figures,
    verdict_of,
)
from rljax.simulation.scenario import Scenario

ROOT = Path(__file__).resolve().parents[2]
FIGURES = figures()
NAMES = {"min", "max", "mean", "ranks", "points", "p", "for", "in", "if"}


def text_of(overrides):
    return overrides if isinstance(overrides, str) else " ".join(overrides)


def overrides_of(figure):
    """All overrides of a figure as text, with its inputs in their places."""
    swept = itertools.chain(*figure.get("sweep", ()))
    inputs = figure.get("inputs", {})
    for overrides in [*figure["variants"].values(), *figure["band"].values(), *swept]:
        text = re.sub(r"@(\w+)(?!\w|=)", lambda found: inputs[found[1]], text_of(overrides))
        yield " ".join(word for word in text.split() if not word.startswith("@"))


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_figure_names_exists(name):
    figure = FIGURES[name]
    variants, central = figure["variants"], text_of(figure["central"]).split()
    central = [word for word in central if not word.startswith("@")]
    keys = {key for key in dir(Scenario()) + dir(Measured) if not key.startswith("_")}
    keys |= {"step_seconds", "rollout_seconds", "first_idle", "migrated"}
    expressions = [row["of"] for row in figure["values"].values()]
    for text in overrides_of(figure):
        expressions += re.findall(r"\{(.*?)\}", text)
        Scenario().replaced([*central, "drafters=d:0.5:0.1:1", *re.sub(r"\{.*?\}", "7.0", text).split()])
    for expression in expressions:
        for word in re.findall(r"(?<![.\w])[a-z_]\w*", expression):
            assert word in NAMES | set(variants), expression
        for key in re.findall(r"\.([a-z]\w*)", expression):
            assert key in keys | set(variants), expression
    assert set(figure.get("picture", {"variants": {}})["variants"].values()) <= set(variants)
    assert set(figure) <= {
        "name", "paper", "given", "chosen", "central", "inputs", "band", "sweep", "variants", "values",
        "picture",
    }  # fmt: skip
    for row in figure["values"].values():
        assert {"of"} <= set(row) <= {"of", "unit", "published", "above", "where", "most", "fitted"}
        assert (("published" in row) + ("above" in row)) == ("where" in row)
    # Passes take the same for all papers, and bands have the acceptance.
    texts = [text_of(figure["central"]), *map(text_of, variants.values())]
    assert not any(re.search(r"\b(arithmetic|memory|base_ms|sum_us)=", text) for text in texts)
    drafters = set(re.findall(r"drafters=(\S+)", " ".join(texts[1:])))
    assert all(each.startswith("@") for each in drafters)  # else no band could change the acceptance
    changed = set(re.findall(r"@(\w+)=", " ".join(figure["band"].values())))
    assert set(re.findall(r"@(\w+)", " ".join(drafters))) - {"small", "ngram"} <= changed


def test_values_by_hand():
    """One worker, passes of one second or of two, and responses of 10 or of 20 tokens."""
    figure = {
        "name": "test",
        "paper": "a test",
        "chosen": {},
        "central": [
            "workers=1 prompts_per_step=1 prompts=1 samples=1 prompt_tokens=0 sigma=0 drift=0",
            "steps=3 warm_up=1 train=3 weights=0 base_ms=1000 arithmetic=1e9 memory=1e9",
        ],
        "inputs": {"mode": "order=on-policy"},
        "band": {"longer updates": "train=4", "a pipe": "@mode=order=pipe"},
        "sweep": [["mean=10", "mean=20"]],
        "variants": {"plain": "@mode", "slow": "base_ms={2 * plain.base_ms} train={plain.train + 1}"},
        "values": {
            "rollout": {"of": "plain.rollout_seconds", "unit": "seconds", "published": 10.0, "where": "here"},
            "step": {"of": "slow.step_seconds", "published": 40.0, "where": "here", "most": True},
            "longest": {"of": "max(p.plain.apart_seconds for p in points)"},
            "tokens of a pass": {"of": "plain.tokens / plain.passes"},
            "piped": {"of": "plain.step_seconds"},
        },
    }
    result = computed(figure)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["rollout"]["value"] == pytest.approx(10, rel=1e-3)
    assert (rows["rollout"]["verdict"], rows["step"]["verdict"]) == ("agrees", "outside")
    assert rows["step"]["value"] == pytest.approx(24, rel=1e-3)
    assert rows["longest"]["value"] == pytest.approx(23, rel=1e-3)
    assert result["band"]["longer updates"]["values"]["longest"] == pytest.approx(24, rel=1e-3)
    assert rows["tokens of a pass"]["value"] == pytest.approx(1, rel=1e-3)
    assert result["band"]["longer updates"]["overrides"] == ["train=4"]
    # In a pipe the update is behind the next rollout, of the same ten seconds.
    assert result["band"]["a pipe"]["values"]["piped"] == pytest.approx(10, rel=1e-3)
    assert rows["piped"]["value"] == pytest.approx(13, rel=1e-3)
    assert set(HARDWARE) < set(result["band"])  # of whose passes this one has others
    assert "| step | at most 40 | 24 |" in as_rows(result)


JUDGED = [
    (1.40, {"published": 1.5}, "agrees"),  # a gain of 0.4, where it is 0.5
    (1.37, {"published": 1.5}, "in the band"),  # within 15 % of the ratio, and a quarter less gain
    (1.37, {"published": 1.5, "unit": "seconds"}, "agrees"),
    (1.10, {"published": 1.03}, "in the band"),
    (0.92, {"published": 0.9}, "agrees"),
    (1.95, {"published": [1.8, 2.0], "high": 1.7}, "agrees"),
    (1.50, {"published": [1.8, 2.0], "high": 1.7}, "outside"),
    (1.50, {"published": [1.4, 1.41], "fitted": True}, "fitted"),
    (1.02, {"above": 1}, "agrees"),
    (0.99, {"above": 1}, "in the band"),
    (1.5, {}, ""),
]


def test_a_gain_is_judged_and_not_a_ratio():
    for value, said, verdict in JUDGED:
        assert verdict_of({"unit": "speed-up", "value": value, "low": 0.8, "high": 1.6} | said) == verdict


def test_the_page_has_the_results_and_counts_what_agrees():
    verdicts, page = collections.Counter(), (ROOT / "docs/simulation.md").read_text()
    for name, figure in FIGURES.items():
        result = json.loads((ROOT / RESULTS / f"simulation-{name}.json").read_text())
        assert as_rows(result) in page or name == "turn-on"
        for row in result["rows"]:  # as they are judged now, of what is published now
            kept, verdict = figure["values"][row["name"]], verdict_of(row)
            assert verdict == row.get("verdict", "") or name == "turn-on"
            assert all(row.get(key) == kept.get(key) for key in ("published", "above", "where", "fitted"))
            verdicts[row.get("verdict", "fitted")] += 1
    del verdicts["fitted"]
    page = " ".join(page.split())
    assert f"Of {verdicts.total()} published values {verdicts['agrees']} agree" in page
    assert f"{verdicts['in the band']} are in the band" in page
    assert f"{verdicts['outside']} outside" in page


def test_an_unknown_figure_is_one_line():
    with pytest.raises(ConfigError, match="unknown figure 'rhymerl'; did you mean 'rhymerl-1"):
        run_figures("rhymerl")


def test_the_roofline_by_hand():
    """The longer one of arithmetic and memory, and collectives by the slower link between hosts."""
    hardware = Hardware("test", "gpu", 1.0, 100.0, {"bfloat16": 1000.0}, 10.0, 5.0, 8)
    assert hardware.seconds(Work(2000.0, 300.0), "bfloat16") == 3.0
    assert hardware.seconds(Work(4000.0, 300.0, 20.0, 10.0), "bfloat16", tensor=4, devices=16) == 4 + 2 + 2
    assert hardware.reaching(0.5, 0.25, 4).seconds(Work(4000.0, 300.0), "bfloat16") == 3.0


def test_what_to_turn_on_has_the_results():
    """Its tables have a column a value, and a row for the central choices and for each of the band."""
    result = json.loads((ROOT / RESULTS / "simulation-turn-on.json").read_text())
    rows = {row["name"]: row["value"] for row in result["rows"]}
    shapes = {name: other["values"] for name, other in result["band"].items() if name not in HARDWARE}
    page = (ROOT / "docs/what-to-turn-on.md").read_text()
    shown = []
    for table in re.findall(r"^\| shape \|.*\n\| --- .*\n(?:\|.*\n)+", page, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().split("\n")]
        names = lines[0][1:]
        shown += names
        assert [line[0] for line in lines[3:]] == list(shapes)
        for values, line in zip([rows, *shapes.values()], lines[2:], strict=True):
            assert line[1:] == [f"{values[name]:.2f}" for name in names]
    assert sorted(shown) == sorted(rows)
