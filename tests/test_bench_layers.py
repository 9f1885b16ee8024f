"""scripts/bench_layers.py: the same programs with layers written out and compiled once."""

import pytest

from rljax.config import load_config
from tests.scripts import load_script
from tests.training.tiny_run import write_config

bench_layers = load_script("bench_layers")


@pytest.mark.slow
def test_programs_are_compared_both_ways(tmp_path):
    overrides = ["speculation.drafter=srt", "speculation.verify_buckets=[8]", "speculation.max_drafts=3"]
    config = load_config(write_config(tmp_path), overrides)
    rows = {row.name: row for row in bench_layers.compile_rows("tiny", config, "cpu:1", (2,))}
    kinds = ("prefill", "generate", "verify", "gradients")
    assert set(rows) == {
        f"tiny/2 layers/{kind}/{what}" for kind in kinds for what in ("seconds", "temporaries", "accessed")
    }
    for kind in kinds:
        accessed = rows[f"tiny/2 layers/{kind}/accessed"]
        assert accessed.value > 0 and accessed.ratio == accessed.baseline_value / accessed.value
    assert any(rows[f"tiny/2 layers/{kind}/accessed"].ratio != 1 for kind in kinds)  # two ways, not one twice


@pytest.mark.slow
def test_speed_is_compared():
    (row, *_) = bench_layers.speed_rows((1,), ("float32",), 1)
    assert row.name == "cpu/1 layers/decode, 4 slots/float32"
    assert row.value > 0 and row.baseline_value > 0
