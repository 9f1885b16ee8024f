"""scripts/bench_drafters.py: its command line, and the rows of its sections at sizes that take seconds."""

import zlib

import jax
import numpy as np
import pytest

from drafters.eagle.data import HeadSequence
from drafters.warm_up import WarmUp
from rljax.config import load_config
from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.scripts import load_script
from tests.training.tiny_run import write_config

bench_drafters = load_script("bench_drafters")
adaptation = load_script("drafter_benchmarks.adaptation")
objectives = load_script("drafter_benchmarks.objectives")
packing = load_script("drafter_benchmarks.packing")
policies = load_script("training_benchmarks.policies")
saving = load_script("drafter_benchmarks.saving")

SETTINGS = WarmUp("eagle", steps=2, slices_per_round=1, heldout=3, depth=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield load_config(write_config(tmp_path_factory.mktemp("bench")), [])


def by_name(rows):
    for row in rows:
        assert row.value > 0 and row.ratio > 0
    return {row.name: row for row in rows}


def test_an_unknown_section_is_one_line(capsys):
    assert bench_drafters.main(["--only", "packing,savings"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: --only: 'savings' is not a section; they are packing,checkpoint,adaptation,training\n"
    )


def test_a_section_is_written(config, tmp_path, capsys):
    file = tmp_path / "results.json"
    path = str(tmp_path / "config.yaml")
    write_config(tmp_path)
    assert bench_drafters.main(["--config", path, "--only", "packing", "--output", str(file)]) == 0
    assert "packing/against padded to the longest" in file.read_text()


def test_objective_rows(config):
    rows = by_name(objectives.objective_rows(config, SETTINGS, 1, ("EAGLE", "HASS", "EAGLE-3, LK")))
    assert len(rows) == 6 and rows["training/EAGLE/accept length"].ratio == 1
    for name in ("EAGLE", "HASS", "EAGLE-3, LK"):
        row = rows[f"training/{name}/accept length"]
        assert 1 < row.value < 3 and len(row.details["acceptance_by_position"]) == 2
        assert row.value != row.details["untrained"]


def test_objectives_are_the_published_ones():
    from drafters.eagle.training import published_training

    for name, variant in (("EAGLE", "eagle"), ("HASS", "hass"), ("EAGLE-3", "eagle3")):
        assert objectives.OBJECTIVES[name] == (variant, published_training(variant))


def test_packing_rows(config):
    rows = packing.packing_rows(config, SETTINGS, 1)
    for row in rows:
        assert row.details["sequences"] == 8
        assert row.details["tokens"] <= row.details["positions"]
    assert rows[0].details["baseline_positions"] >= rows[1].details["tokens"]


def test_padded_batches_hold_every_sequence():
    lengths = (5, 70, 9, 130, 3)
    sequences = [
        HeadSequence(np.full(n, n, np.int32), np.zeros((n, 1, 2)), np.ones(n, bool), step=0) for n in lengths
    ]
    own = list(packing.padded(sequences, 2))
    assert [batch.tokens.shape for batch in own] == [(2, 128), (2, 192), (2, 64)]
    whole = list(packing.padded(sequences, 2, 130))
    assert [batch.tokens.shape for batch in whole] == [(2, 130)] * 3
    for batches in (own, whole):
        assert sum(int((batch.segment_ids > 0).sum()) for batch in batches) == sum(lengths)
        assert sum(int((batch.tokens == 9).sum()) for batch in batches) == 9


def test_saving_rows():
    tiny = policies.qwen3(vocab=512, hidden=64, layers=1, heads=1, kv_heads=1, mlp=96)
    rows = by_name(saving.saving_rows("tiny", tiny, 2))
    assert len(rows) == 3
    for row in rows.values():
        head = row.details["bytes"]
        # Head, two moments of it, the tied embedding; and the counters of updates.
        assert 0 < row.details["baseline_bytes"] - 3 * head - 4 * 512 * 64 < 100


def test_adaptation_rows(config, monkeypatch):
    # Every response has a reward of its own: else nothing would be learned here.
    luck = lambda self, problem, text: {"reward": zlib.crc32(text.encode()) % 1000 / 1000}  # noqa: E731
    monkeypatch.setattr(ChainArithmetic, "reward", luck)
    rows = by_name(adaptation.adaptation_rows(config, SETTINGS, rl_steps=2, learning_rate=1e-2, slices=2))
    assert len(rows) == 6
    heads = {
        name: rows[f"adaptation/RL policy/{name} head"].value for name in ("frozen", "trained on", "adapted")
    }
    assert len(set(heads.values())) == 3  # three different heads
    assert rows["adaptation/base policy/frozen head"].value != heads["frozen"]  # two policies
