"""scripts/bench_engine.py: its command line, its rows, and that both sides compute the same thing."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from rljax.config import TrainingConfig
from rljax.errors import UserError
from rljax.models import huggingface
from rljax.models.transformer import init_params, num_params
from tests.scripts import SCRIPTS, load_script

_SCRIPT = SCRIPTS / "bench_engine.py"
bench_engine = load_script("bench_engine")
bandwidth = load_script("engine_benchmarks.bandwidth")
blocks = load_script("engine_benchmarks.blocks")
companion = load_script("engine_benchmarks.companion")
decode = load_script("engine_benchmarks.decode")
policies = load_script("engine_benchmarks.policies")
pool = load_script("engine_benchmarks.pool")
rows = load_script("engine_benchmarks.rows")
sampling = load_script("engine_benchmarks.sampling")
self_draft = load_script("engine_benchmarks.self_draft")
startup = load_script("engine_benchmarks.startup")
update = load_script("engine_benchmarks.update")


@pytest.fixture
def tiny():
    return policies.qwen3(vocab=64, hidden=64, layers=1, heads=2, kv_heads=1, mlp=96)


# --- command line ----------------------------------------------------------------------------------------


def test_an_unknown_section_is_one_line(capsys):
    assert bench_engine.main(["--only", "decode,sped"]) == 2
    error = capsys.readouterr().err
    sections = "decode,bandwidth,update,startup,self_draft,companion,rows,price,blocks,pool,sampling"
    assert error == f"error: --only: 'sped' is not a section; they are {sections}\n"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_baseline_names_the_extra(capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, "torch", None if missing == "torch" else object())
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert bench_engine.main(["--only", "startup,decode"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {missing} is not installed")
    assert "dev extra" in error and error.count("\n") == 1


def test_an_accelerator_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(bench_engine.jax, "default_backend", lambda: "gpu")
    assert bench_engine.main(["--quick", "--only", "bandwidth"]) == 2
    assert capsys.readouterr().err.startswith("error: JAX runs on gpu, PyTorch on the CPU")


def test_a_quick_run_has_every_section():
    named = {measurement.section for measurement in bench_engine.measurements()}
    assert {measurement.section for measurement in bench_engine.quick_measurements()} == named


# --- sections --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_responses_have_the_length_asked_for(tiny):
    params = init_params(tiny, seed=0)
    prompts = policies.random_prompts(3, tiny.vocab_size)
    engine = policies.make_engine(tiny, True, slots=3, length=64 + 70)
    sampled = decode.decode(engine, params, prompts, 70)  # more than one host sync
    assert sampled.shape == (3, 70) and np.all(sampled >= 0)


def test_bytes_of_a_step_count_a_tied_embedding_once_and_an_untied_input_not_at_all(tiny):
    untied = dataclasses.replace(tiny, tie_embeddings=False)
    assert bandwidth.step_weight_bytes(tiny) == bandwidth.step_weight_bytes(untied)
    assert bandwidth.step_weight_bytes(tiny) == 4 * num_params(tiny)


@pytest.mark.long
def test_bandwidth_rows(tiny, monkeypatch):
    monkeypatch.setattr(bandwidth, "measure_read_bandwidth", lambda repeats: {"a": 1e9, "b": 4e9})
    rows = bandwidth.bandwidth_rows("tiny", tiny, steps=4, repeats=1)
    assert [row.name for row in rows] == [f"bandwidth/tiny/batch 1/row_invariant {s}" for s in ("on", "off")]
    for row in rows:
        assert row.baseline_value == 4.0
        assert row.ratio == pytest.approx(row.value / 4.0)


@pytest.mark.long
def test_self_draft_rows(tiny):
    rows = {row.name: row for row in self_draft.self_draft_rows("tiny", tiny, (1,), repeats=1)}
    labels = ("W4", "W8", "W8, float activations")
    assert set(rows) == {
        f"self_draft/tiny/{dtype}/{name}"
        for dtype in ("float32", "bfloat16")
        for label in labels
        for name in (f"batch 1/{label}", f"{label}/bytes")
    }
    for label in labels:
        assert rows[f"self_draft/tiny/float32/batch 1/{label}"].details["computed_rows"] == 2
    stored = [
        rows[f"self_draft/tiny/float32/{label}/bytes"].details["stored_beside_policy_mb"] for label in labels
    ]
    assert stored[0] < stored[1] == stored[2]


def test_companion_rows(tiny):
    rows = companion.companion_rows("tiny", tiny, 1, (1,), repeats=1)
    assert [row.name for row in rows] == [
        f"companion/tiny/1 layers/batch 1/{label}"
        for label in ("draft step", "catch up by 1", "catch up by 16")
    ]
    for row in rows:
        assert row.value > 0 and row.ratio == pytest.approx(row.baseline_value / row.value)


def test_sampling_rows(tiny, monkeypatch):
    """A mix has the tokens of the baseline in the slots with its settings, which is checked."""
    mixes = {name: sampling._MIXES[name] for name in ("greedy", "temperature 0.7 and top_p 0.9")}
    monkeypatch.setattr(sampling, "_MIXES", mixes)
    rows = sampling.sampling_rows("tiny", tiny, 2, 4, repeats=1)
    assert [row.name for row in rows] == [f"sampling/tiny/batch 2/{name}" for name in mixes]
    assert [row.baseline for row in rows] == ["the same settings inside", "temperature 0.7 inside"]


def test_a_second_process_gets_the_first_ones_cache(tiny, monkeypatch):
    caches = []

    def first_step(command, **options):
        assert command[:3] == [sys.executable, str(_SCRIPT), "--first-step"]
        caches.append(command[-1])
        seconds = 1.0 if caches.count(command[-1]) == 2 else 4.0
        now = time.time()
        times = {"created": now + seconds, "decoded": now + 2 * seconds, "compiling_seconds": seconds}
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(times))

    monkeypatch.setattr(subprocess, "run", first_step)
    rows = startup.startup_rows("tiny", tiny, repeats=2)
    assert caches[0] == caches[1] != caches[2] == caches[3]
    process, engine = rows
    assert process.name == "startup/tiny/process start to first decode step"
    assert (process.value, process.baseline_value) == (
        pytest.approx(2.0, abs=0.1),
        pytest.approx(8.0, abs=0.1),
    )
    assert engine.name == "startup/tiny/engine creation to first decode step"
    assert (engine.value, engine.baseline_value, engine.ratio) == pytest.approx((1.0, 4.0, 4.0), abs=1e-3)
    assert (engine.details["compiling_s"], engine.details["baseline_compiling_s"]) == (1.0, 4.0)


@pytest.mark.long
def test_a_process_decodes_its_first_step_and_leaves_its_programs(tiny, tmp_path):
    policy, cache = tmp_path / "policy", tmp_path / "cache"
    huggingface.save_model(policy, tiny, init_params(tiny, seed=0), "float32")
    command = [sys.executable, str(_SCRIPT), "--first-step", str(policy), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parent.parent)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    times = json.loads(output.stdout)
    assert times["created"] < times["decoded"]
    cached = " ".join(file.name for file in cache.iterdir())
    assert all(program in cached for program in ("prefill", "insert", "generate"))


def test_rows_see_what_depends_on_their_number():
    ones = np.ones((64, 2), np.float32)
    assert rows._differing(lambda x: x / x.shape[0], ones) == [1, 2, 3, 4, 8, 16, 32]
    assert rows._differing(lambda x: x + 1, ones) == []


@pytest.mark.long
def test_buckets_need_fewer_programs_than_one_for_every_strategy(tiny, monkeypatch):
    """To verify; and a head's, to draft: the two strategies share a depth."""
    monkeypatch.setattr(pool, "_NODES", (3, 7))
    monkeypatch.setattr(pool, "_ROWS", (16,))
    rows = pool.pool_rows("tiny", tiny, (2,))
    parts = ["single", "bucketed", "drafting single", "drafting bucketed"]
    assert [row.name for row in rows] == [f"pool/tiny/{part}" for part in parts]
    for row in rows:
        assert (row.details["programs"], row.details["baseline_programs"]) == (1, 2)
        assert row.baseline_value > row.value > 0
        assert row.details["largest"] <= row.value


@pytest.mark.long
class TestAgainstTransformers:
    """What needs the baseline installed."""

    @pytest.fixture
    def reference(self, tiny, tmp_path):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        return policies.make_reference(tiny, tmp_path / "policy")

    def test_decode_rows(self, tiny, reference):
        rows = decode.decode_rows("tiny", tiny, {2: (3, 1)})
        assert [row.name for row in rows] == [
            f"decode/tiny/batch 2/{what}"
            for what in ("row_invariant on", "row_invariant off", "price of row_invariant")
        ]
        on, off, price = rows
        assert on.baseline_value == off.baseline_value
        assert (price.value, price.baseline_value) == (on.value, off.value)

    def test_generate_is_as_long_as_asked_and_not_cut_to_its_top_k(self, reference):
        model, _ = reference
        prompts = policies.random_prompts(1, 64) * 1024
        sampled = decode.reference_decode(model, prompts, 2)
        assert sampled.shape == (1024, 2)
        # One distribution, nearly uniform over 64 tokens: by default only its best 50 could be sampled.
        assert len(set(sampled[:, 0].tolist())) > 50

    def test_another_policy_is_not_timed(self, tiny, reference):
        model, params = reference
        decode.check_same_policy(model, tiny, params)
        params = params | {"final_norm": -params["final_norm"]}
        with pytest.raises(UserError, match="not the same policy"):
            decode.check_same_policy(model, tiny, params)

    def test_both_sides_do_the_same_update(self, tiny, reference, monkeypatch):
        model, params = reference
        small = TrainingConfig(pack_length=256, rows_per_microbatch=2)
        monkeypatch.setattr(update, "UPDATE", small)
        sequences = update.long_tailed_sequences(6, tiny.vocab_size)
        ours = update.PackedUpdates(tiny, params, sequences, row_invariant=True)
        theirs = update.PaddedUpdates(model, sequences)
        for _ in range(2):  # the second sees the weights that the first left
            result = ours()
            update.check_same_update(result, theirs(), "on")
        with pytest.raises(UserError, match="not the same update"):
            update.check_same_update((result[0], 1.01 * result[1]), result, "on")
        assert 0 < ours.padding < 1 and 0 <= theirs.padding < 1

    def test_shared_prompts_are_the_same_update(self, tiny, reference, monkeypatch):
        model, params = reference
        training = TrainingConfig(pack_length=256, rows_per_microbatch=2)
        monkeypatch.setattr(update, "LONG_PROMPT_TOKENS", 90)
        sequences = update.grouped_sequences(1, tiny.vocab_size)
        settings = {"training": training, "share_prompts": True}
        ours = update.PackedUpdates(tiny, params, sequences, row_invariant=True, **settings)
        update.check_same_update(ours(), update.PaddedUpdates(model, sequences, training)(), "on")


@pytest.mark.long
def test_blocks_are_compared_with_whole_weights(tiny, monkeypatch):
    monkeypatch.setattr(blocks, "_BATCHES", (2, 64))
    rows = blocks.block_rows("tiny", tiny, repeats=1)
    assert [row.name.split("/")[-1] for row in rows] == ["decode batch 2", "verify 2 x 8", "decode batch 64"]
    assert all(row.baseline == "whole weights" and row.value > 0 for row in rows)
