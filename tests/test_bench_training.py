"""scripts/bench_training.py: its command line, and the rows of its sections at sizes that take seconds."""

import jax
import pytest

from rljax.config import OptimizerConfig
from rljax.learning.optimizer import make_optimizer
from tests.scripts import SCRIPTS, load_script

bench_training = load_script("bench_training")
checkpoint = load_script("training_benchmarks.checkpoint")
loading = load_script("training_benchmarks.loading")
memory = load_script("training_benchmarks.memory")
padding = load_script("training_benchmarks.padding")
policies = load_script("training_benchmarks.policies")
process_memory = load_script("process_memory")


@pytest.fixture
def tiny():
    return policies.qwen3(vocab=512, hidden=64, layers=1, heads=1, kv_heads=1, mlp=96)


# --- command line ----------------------------------------------------------------------------------------


def test_an_unknown_section_is_one_line(capsys):
    assert bench_training.main(["--only", "padding,memry"]) == 2
    error = capsys.readouterr().err
    assert error == "error: --only: 'memry' is not a section; they are padding,memory,checkpoint,loading\n"


def test_an_accelerator_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(bench_training.jax, "default_backend", lambda: "gpu")
    assert bench_training.main(["--only", "padding"]) == 2
    assert capsys.readouterr().err.startswith("error: JAX runs on gpu, the figures are a CPU's")


# --- sections --------------------------------------------------------------------------------------------


def test_padding_rows():
    short, long = padding.padding_rows((512, 2048), count=40, draws=3)
    assert short.name == "padding/pack_length 512" and long.name == "padding/pack_length 2048"
    for row in (short, long):
        # Smaller last micro-batches never pad more, and by 4 rows of 2048 for 40 sequences much less.
        assert 0 < row.value <= row.baseline_value < 100
        assert row.details["worst"] >= row.value
        assert row.ratio == pytest.approx(row.baseline_value / row.value)
    assert long.ratio > 1


@pytest.mark.long
def test_memory_rows(tiny):
    chunks = memory.logits_row("tiny", tiny, (2, 128), logprob_chunk=32)
    assert chunks.name == "memory/tiny/logits in chunks"
    assert chunks.details["logits_mb"] == pytest.approx(2 * 128 * 512 * 4 / 1e6)
    # Whole, the logits exist at least twice: as they are, and as gradients.
    assert chunks.baseline_value - chunks.value > chunks.details["logits_mb"]
    remat = memory.remat_row("tiny", tiny, (2, 128), logprob_chunk=32)
    assert remat.baseline_value == chunks.value  # the same program
    assert remat.value > 0 and remat.ratio == pytest.approx(remat.baseline_value / remat.value)


def test_checkpoint_rows(tiny):
    rows = {
        row.name.removeprefix("checkpoint/tiny/"): row for row in checkpoint.checkpoint_rows("tiny", tiny, 1)
    }
    params = rows["restore"].details["params"]
    disk = rows["on disk"]
    # Weights and two moments of four bytes; the steps of optimizer and schedule are a few bytes more.
    assert 12 * params / 1e6 < disk.baseline_value < 12 * params / 1e6 + 1e-4
    assert disk.value > disk.baseline_value
    assert 0 < rows["save blocks"].value < rows["save complete"].value
    assert rows["save blocks"].baseline_value == rows["save complete"].baseline_value
    assert {"save, processor time", "optimizer step during a save"} <= rows.keys()
    zstd = rows["Orbax uncompressed, processor time"]
    assert 0.5 * 12 * params < zstd.details["baseline_bytes"]  # random numbers hardly compress


def test_what_is_written_plainly_is_read_again(tiny, tmp_path):
    optimizer = make_optimizer(**OptimizerConfig().model_dump(), total_updates=1)
    state = checkpoint.random_state(tiny, optimizer)
    checkpoint.write_plainly(tmp_path / "plain", state)
    read = checkpoint.read_plainly(tmp_path / "plain", jax.eval_shape(lambda: state))
    for ours, theirs in zip(*map(jax.tree.leaves, (state, read)), strict=True):
        assert ours.dtype == theirs.dtype and bool((ours == theirs).all())


@pytest.mark.skipif(
    process_memory.memory_kilobytes("VmHWM") is None, reason="needs Linux's count of peak memory"
)
def test_loading_rows(tiny, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    rows = loading.loading_rows("tiny", tiny, repeats=1, cases=[("bfloat16", "float32")])
    assert [row.name for row in rows] == [
        "loading/tiny/bfloat16 as float32/mmap from 1 MB on",
        "loading/tiny/bfloat16 as float32/glibc's defaults",
    ]
    for row in rows:
        assert row.value > 0 and row.ratio == pytest.approx(row.baseline_value / row.value)
        # The file is half as large, and has a header.
        assert 0.5e6 * row.baseline_value < row.details["checkpoint_bytes"] < 0.6e6 * row.baseline_value
