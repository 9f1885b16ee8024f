"""The files of scenarios: all that they name exists, and their values are what their expressions say."""

import itertools
import re

import pytest

from rljax.errors import ConfigError
from rljax.planning.hardware import Hardware, Work
from rljax.simulation.figures import Measured, as_text, computed, figures, run_figures
from rljax.simulation.scenario import Scenario

FIGURES = figures()
NAMES = {"min", "max", "mean", "ranks", "points", "p", "for", "in", "if"}


def text_of(overrides):
    return overrides if isinstance(overrides, str) else " ".join(overrides)


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_figure_names_exists(name):
    figure = FIGURES[name]
    variants, central = figure["variants"], text_of(figure["central"]).split()
    keys = {key for key in dir(Scenario()) + dir(Measured) if not key.startswith("_")}
    keys |= {"step_seconds", "rollout_seconds", "first_idle", "migrated"}
    expressions = [row["of"] for row in figure["values"].values()]
    swept = itertools.chain(*figure.get("sweep", ()))
    for overrides in [*variants.values(), *figure["band"].values(), *swept]:
        text = text_of(overrides)
        expressions += re.findall(r"\{(.*?)\}", text)
        number = "d:0.5:0.1:1" if "drafters={" in text else "7.0"
        Scenario().replaced([*central, "drafters=d:0.5:0.1:1", *re.sub(r"\{.*?\}", number, text).split()])
    for expression in expressions:
        for word in re.findall(r"(?<![.\w])[a-z_]\w*", expression):
            assert word in NAMES | set(variants), expression
        for key in re.findall(r"\.([a-z]\w*)", expression):
            assert key in keys | set(variants), expression
    assert set(figure.get("picture", {"variants": {}})["variants"].values()) <= set(variants)
    assert set(figure) <= {
        "name", "paper", "given", "chosen", "central", "band", "sweep", "variants", "values", "notes",
        "picture",
    }  # fmt: skip
    for row in figure["values"].values():
        assert {"of"} <= set(row) <= {"of", "published", "where", "most"}
        assert ("published" in row) == ("where" in row)


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
        "band": {"longer updates": "train=4"},
        "sweep": [["mean=10", "mean=20"]],
        "variants": {"plain": "", "slow": "base_ms={2 * plain.base_ms} train={plain.train + 1}"},
        "values": {
            "rollout": {"of": "plain.rollout_seconds", "published": 10.0, "where": "here"},
            "step": {"of": "slow.step_seconds", "published": 40.0, "where": "here", "most": True},
            "longest": {"of": "max(p.plain.apart_seconds for p in points)"},
            "tokens of a pass": {"of": "plain.tokens / plain.passes"},
        },
    }
    result = computed(figure)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["rollout"]["value"] == pytest.approx(10, rel=1e-3)
    assert rows["rollout"]["agrees"] and not rows["step"]["agrees"]
    assert rows["step"]["value"] == pytest.approx(24, rel=1e-3)
    assert (rows["longest"]["low"], rows["longest"]["high"]) == pytest.approx((23, 24), rel=1e-3)
    assert rows["tokens of a pass"]["value"] == pytest.approx(1, rel=1e-3)
    assert result["band"]["longer updates"]["overrides"] == ["train=4"]
    assert "published at most 40 (here): outside of the band" in as_text(result)


def test_an_unknown_figure_is_one_line():
    with pytest.raises(ConfigError, match="unknown figure 'rhymerl'; did you mean 'rhymerl-1"):
        run_figures("rhymerl")


def test_the_roofline_by_hand():
    """The longer one of arithmetic and memory, and collectives by the slower link between hosts."""
    hardware = Hardware("test", "gpu", 1.0, 100.0, {"bfloat16": 1000.0}, 10.0, 5.0, 8)
    assert hardware.seconds(Work(2000.0, 300.0), "bfloat16") == 3.0
    assert hardware.seconds(Work(4000.0, 300.0, 20.0, 10.0), "bfloat16", tensor=4, devices=16) == 4 + 2 + 2
    assert hardware.reaching(0.5, 0.25, 4).seconds(Work(4000.0, 300.0), "bfloat16") == 3.0
