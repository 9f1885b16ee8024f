"""scripts/bench_rollout.py: its command line, and its sections on a tiny policy."""

import pytest

from rljax.config import load_config
from tests.scripts import load_script
from tests.training.tiny_run import write_config

bench_rollout = load_script("bench_rollout")
rollout = load_script("rollout_benchmarks.rollout")
strategies = load_script("rollout_benchmarks.strategies")

_TINY = [
    "task.problems=2",
    "engine.max_slots=2",
    "engine.batch_buckets=[2]",
    "speculation.drafter=srt",
    "speculation.verify_buckets=[16]",
    "speculation.max_drafts=7",
]


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path), _TINY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "SRT,STR"], "error: --variants: 'STR' is not one; they are prompt lookup, "),
        (["--only", "speed"], "error: --only: 'speed' is not a section; they are rollout,"),
        (["engine.max_slot=3"], "error: engine.max_slot: "),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert bench_rollout.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


@pytest.mark.slow
def test_rollout_rows(config):
    names = ["plain", "SRT", "prompt lookup", "suffix decoding", "all by the ladder"]
    rows = rollout.rollout_rows(config, names)
    assert [row.name for row in rows] == [
        f"rollout/epoch {epoch}/{name}" for epoch in (1, 2) for name in names[1:]
    ]
    for row in rows:
        assert row.ratio == pytest.approx(row.value / row.baseline_value)
        assert min(row.ratio, 1) < row.details["step_ratio"] < max(row.ratio, 1)  # updates are not faster
        assert 0 < row.details["busy_slots"] <= 1
        assert row.details["length_p75"] <= row.details["length_max"] <= 48
    assert len({row.details["tokens"] for row in rows[: len(names) - 1]}) == 1  # of the same responses


@pytest.mark.slow
def test_what_came_before_is_accepted_again(config):
    always = {"choice": "fixed", "strategies": [{"drafter": "srt", "depth": 7, "top_k": 1, "nodes": 7}]}
    config = config.model_copy(update={"speculation": config.speculation.model_copy(update=always)})
    first, second = rollout.rollout_rows(config, ["plain", "SRT"])
    assert second.details["accept_length"] > 1 and second.details["verifying_passes"] > 0
    assert first.name.startswith("rollout/epoch 1/") and second.name.startswith("rollout/epoch 2/")


@pytest.mark.slow
def test_strategy_rows(config, monkeypatch):
    monkeypatch.setattr(strategies, "_DEPTHS", (2,))
    monkeypatch.setattr(strategies, "_NODES", (3,))
    monkeypatch.setattr(strategies, "_TOP_KS", (1,))
    monkeypatch.setattr(strategies, "_BITS", (8,))
    monkeypatch.setattr(strategies, "_LENGTHS", (2,))
    monkeypatch.setattr(strategies, "_HEAD", "eagle")  # an EAGLE-3 head needs more layers
    monkeypatch.setattr(strategies, "_TRAINING", {"slices": 1, "depths": [2], "train_below": 0})
    rows = strategies.strategy_rows(config, training_steps=1)
    assert [row.name for row in rows] == [
        "strategies/depth/depth 2, 3 to verify",
        "strategies/top_k/top_k 1",
        "strategies/batch/2 slots, 3 to verify",
        "strategies/bits/8 bits, 2 drafts",
    ]
    assert [row.details["strategy"] for row in rows] == [
        "eagle 2/2/3",
        "eagle 4/1/4",
        "eagle 4/2/3",
        "quantized 2/1/2",
    ]
    assert all(row.details["verifying_passes"] > 0 for row in rows)
    assert rows[-1].details["acceptance"] > 0.5
