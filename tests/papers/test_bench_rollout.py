"""scripts/bench_rollout.py on a tiny policy: the sections and variants of mechanisms of the papers."""

import pytest

from rljax.config import load_config
from rljax.errors import UserError
from tests.scripts import load_script
from tests.test_bench_rollout import TINY
from tests.training.tiny_run import write_config

counts = load_script("rollout_benchmarks.counts")
rollout = load_script("rollout_benchmarks.rollout")
variants = load_script("rollout_benchmarks.variants")


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path), TINY)


@pytest.mark.long
def test_rows_of_races(config):
    """Passes are counted where tokens and logprobs are those of plain decoding."""
    ladder, expected = counts.race_rows(config, seeds=1)
    assert (ladder.name, expected.name) == ("races/ladder", "races/expected")
    assert ladder.details["tokens"] == expected.details["tokens"] > ladder.details["verifying_passes"] > 0


@pytest.mark.long
def test_rows_of_epochs(config, monkeypatch):
    always = [{"drafter": "srt", "depth": 7, "top_k": 1, "nodes": 7}]
    head = {
        "variant": "eagle",
        "depths": [2],
        "slices": 4,
        "train_below": 0,
    }  # all of them, behind the rollout
    keys = {"drafter": "srt", "choice": "fixed", "strategies": always}
    monkeypatch.setitem(variants.VARIANTS, "SRT always", keys)
    monkeypatch.setitem(variants.VARIANTS, "head", {"drafter": "eagle", "args": head})
    names = ["SRT always", "head", "quantized always", "quantized by the roofline", "small model"]
    known, roll_out = set(), rollout.roll_out

    def watched(run, variant, step):
        if variant.name == "plain":
            known.add((step, int(variant.collector.scheduler.lengths.state()["lengths_counts"].sum())))
        return roll_out(run, variant, step)

    monkeypatch.setattr(rollout, "roll_out", watched)
    rows = rollout.rollout_rows(config, ["plain", *names])
    # The lengths of a step are not known before it, however often it is rolled out.
    assert len(known) == config.training.steps
    assert [row.name for row in rows] == [
        f"rollout/epoch {epoch}/{name}" for epoch in (1, 2) for name in names
    ]
    for row in rows:
        details = row.details
        assert row.ratio == pytest.approx(row.value / row.baseline_value)
        plain = details["baseline_seconds"] + details["update_seconds"]
        whole = details["seconds"] + details["learn_seconds"] + details["update_seconds"]
        assert details["step_ratio"] == pytest.approx(plain / whole)
        assert 0 < details["busy_slots"] <= 1
        assert details["length_p75"] <= details["length_max"] <= 48
    assert len({row.details["tokens"] for row in rows[: len(names)]}) == 1  # of the same responses
    first, second = rows[: len(names)], rows[len(names) :]
    assert second[0].details["accept_length"] > 1  # what came before is accepted again
    assert first[2].details["verifying_passes"] > 0
    # Where a history files tokens away, a head is trained.
    assert first[1].details["learn_seconds"] > first[0].details["learn_seconds"]


@pytest.mark.long
def test_rows_of_draft_lengths(config, tmp_path):
    """Every length samples what plain decoding does, and the figure can be drawn of the rows."""
    toggle = config.speculation.toggle.model_copy(update={"lengths": (2, 4), "patience": 1})
    speculation = {"drafter": "quantized", "toggle": toggle, "args": {"bits": 4}}
    rows = counts.draft_length_rows(variants.with_keys(config, speculation=speculation))
    assert [row.baseline for row in rows] == ["2 drafts throughout"] * 2 + ["4 drafts throughout"] * 2
    assert rows[0].details["length_by_step"][0] == 2
    assert len(rows[0].details["entropy_by_step"]) == config.training.steps
    counts.plot([row.as_json() for row in rows], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    with pytest.raises(UserError, match=r"^--plot: the results have no draft lengths"):
        counts.plot([rows[1].as_json()], tmp_path / "plot.png")
