"""scripts/bench_layers.py: the same programs with layers written out, inlined and called."""

import pytest

from rljax.config import load_config
from tests.scripts import load_script
from tests.training.tiny_run import write_config

bench_layers = load_script("bench_layers")


@pytest.mark.long
def test_programs_are_compared_in_all_layouts(tmp_path):
    overrides = ["speculation.drafter=srt", "speculation.verify_buckets=[8]", "speculation.max_drafts=3"]
    config = load_config(write_config(tmp_path), overrides)
    rows = {row.name: row for row in bench_layers.compile_rows("tiny", config, "cpu:1", (2,))}
    kinds = ("prefill", "generate", "verify", "gradients")
    assert set(rows) == {
        f"tiny/2 layers/{kind}/{layout}/{what}"
        for kind in kinds
        for layout in ("inlined", "called")
        for what in ("processor seconds", "temporaries", "accessed")
    }
    for kind in kinds:
        accessed = rows[f"tiny/2 layers/{kind}/inlined/accessed"]
        assert accessed.value > 0 and accessed.ratio == 1  # the same program
    assert any(rows[f"tiny/2 layers/{kind}/called/accessed"].ratio != 1 for kind in kinds)
