"""Benchmarks: what is computed from timings, what is written, and that both sides compute the same thing."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax import benchmarking
from rljax.benchmarking import (
    Interference,
    Row,
    command_line,
    compare,
    git_commit,
    interleave,
    machine_facts,
    measure_read_bandwidth,
    paired,
    print_table,
    results_console,
    write_results,
)
from rljax.errors import UserError
from tests.scripts import SCRIPTS, load_script

_SCRIPT = SCRIPTS / "bench_engine.py"


@pytest.fixture(scope="module")
def bench_engine():
    return load_script("bench_engine")


@pytest.fixture
def tiny(bench_engine):
    return bench_engine._qwen3(vocab=64, hidden=64, layers=2, heads=2, kv_heads=1, mlp=96)


def _row(**changes) -> Row:
    fields = {
        "name": "decode",
        "value": 3.0,
        "unit": "tokens/s",
        "baseline": "theirs",
        "baseline_value": 2.0,
        "ratio": 1.5,
    }
    return Row(**(fields | changes))


# --- timing ----------------------------------------------------------------------------------------------


def test_actions_alternate_in_both_orders_after_the_warm_up():
    calls = []
    actions = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = interleave(actions, repeats=3, warmups=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # The second round ran on a machine ten times slower, the third was disturbed on one side only.
    comparison = compare(seconds=[1.0, 10.0, 9.0], baseline_seconds=[2.0, 20.0, 2.0])
    assert comparison.ratio == 2.0
    assert (comparison.ratio_low, comparison.ratio_high) == (2.0 / 9.0, 2.0)
    assert (comparison.seconds, comparison.baseline_seconds) == (9.0, 2.0)


def test_paired_puts_ours_below_the_line(monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 4.0])  # ours from 0 to 1, the baseline from 1 to 4
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    comparison = paired(lambda: None, lambda: None, repeats=1)
    assert (comparison.seconds, comparison.baseline_seconds, comparison.ratio) == (1.0, 3.0, 3.0)


def test_timing_nothing_is_refused():
    with pytest.raises(ValueError, match="repeats: 0"):
        interleave({"a": lambda: None}, repeats=0)


# --- machine ---------------------------------------------------------------------------------------------


def test_every_method_of_reading_counts_bytes_of_the_whole_array(monkeypatch):
    def run_once(methods, repeats):
        for method in methods.values():
            method()
        return {name: [4.0, 0.5] for name in methods}

    monkeypatch.setattr(benchmarking, "interleave", run_once)
    bandwidths = measure_read_bandwidth(megabytes=2)
    assert {"jax sum", "jax matrix-vector", "numpy sum"} <= bandwidths.keys()
    assert set(bandwidths.values()) == {2 * 2**20 / 0.5}  # the fastest run counts


def test_machine_facts():
    facts = machine_facts(("numpy", "surely-not-installed"))
    assert facts["cpu"] and facts["cores"] >= 1
    assert facts["jax"] == jax.__version__
    assert facts["numpy"] == np.__version__
    assert "surely-not-installed" not in facts
    if jax.default_backend() == "cpu":
        assert facts["accelerator"] is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's counters")
def test_interference_counts_others_and_not_ourselves(monkeypatch):
    # Of 8 core-seconds 5 were busy, 2 of them ours: others took 3 / 8.
    clocks = iter([(100.0, 10.0, 1000.0), (105.0, 12.0, 1008.0)])
    monkeypatch.setattr(Interference, "_clocks", staticmethod(lambda: next(clocks)))
    with Interference() as interference:
        assert interference.share is None
    assert interference.share == 3 / 8


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's counters")
def test_the_clocks_of_the_system_are_read():
    before = Interference._clocks()
    deadline = time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    busy, own, total = (after - start for start, after in zip(before, Interference._clocks(), strict=True))
    assert own >= 0.08
    assert -0.001 < busy < total + 0.001  # sums of ticks, as floats


def test_commit_and_whether_it_is_what_ran(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path / "nowhere") is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "engine.json").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == head
    (results / "engine.json").write_text("2")
    (tmp_path / "notes.txt").write_text("untracked")
    assert git_commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert git_commit(tmp_path) == head + "-dirty"


def test_the_command_can_be_run_again_and_names_no_home():
    argv = [str(_SCRIPT), "--output", "a file.json"]
    assert command_line(argv) == "python scripts/bench_engine.py --output 'a file.json'"


# --- results ---------------------------------------------------------------------------------------------


def test_results_file(tmp_path):
    path = tmp_path / "new" / "engine.json"
    write_results(path, [_row(details={"batch": 8})], "python scripts/bench_engine.py", ("numpy",))
    content = json.loads(path.read_text())
    assert list(content) == ["command", "commit", "date", "machine", "rows"]
    assert {"cpu", "cores", "accelerator", "jax", "python", "numpy"} == content["machine"].keys()
    assert content["rows"] == [
        {
            "name": "decode",
            "value": 3.0,
            "unit": "tokens/s",
            "baseline": "theirs",
            "baseline_value": 2.0,
            "ratio": 1.5,
            "batch": 8,
        }
    ]
    assert [file.name for file in path.parent.iterdir()] == ["engine.json"]


def test_results_that_say_nothing_or_two_things_are_refused(tmp_path):
    path = tmp_path / "engine.json"
    with pytest.raises(ValueError, match="no rows"):
        write_results(path, [], "command")
    with pytest.raises(ValueError, match="decode: details repeat \\['ratio'\\]"):
        write_results(path, [_row(details={"ratio": 2.0})], "command")
    with pytest.raises(ValueError):  # JSON has no NaN
        write_results(path, [_row(value=float("nan"))], "command")
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="results cannot be written there"):
        write_results(tmp_path / "file" / "engine.json", [_row()], "command")


def test_table(capsys):
    print_table([_row(value=12345.6)], "decode", results_console())
    printed = capsys.readouterr().out
    assert "12,346 tokens/s" in printed and "2 tokens/s" in printed and "1.50" in printed


# --- scripts/bench_engine.py -----------------------------------------------------------------------------


def test_an_unknown_section_is_one_line(bench_engine, capsys):
    assert bench_engine.main(["--only", "decode,sped"]) == 2
    error = capsys.readouterr().err
    assert error == "error: --only: 'sped' is not a section; they are decode,bandwidth,update,startup\n"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_baseline_names_the_extra(bench_engine, capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, "torch", None if missing == "torch" else object())
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert bench_engine.main(["--only", "startup,decode"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {missing} is not installed")
    assert "dev extra" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((False, ("decode", "bandwidth", "update", "startup")), "engine.json"),
        ((True, ("decode", "bandwidth", "update", "startup")), "engine-quick.json"),
        ((True, ("decode", "startup")), "engine-decode-startup-quick.json"),
    ],
)
def test_only_a_whole_run_replaces_the_published_results(bench_engine, arguments, name):
    assert bench_engine.default_output(*arguments) == Path("benchmarks/results") / name


def test_a_run_prints_and_writes_its_rows(bench_engine, capsys, monkeypatch, tmp_path):
    measurements = [
        bench_engine.Measurement("bandwidth", "tiny", lambda: [_row()]),
        bench_engine.Measurement("startup", "tiny", lambda: pytest.fail("not asked for")),
    ]
    monkeypatch.setattr(bench_engine, "measurements", lambda quick: measurements)
    output = tmp_path / "results.json"
    assert bench_engine.main(["--quick", "--only", "bandwidth", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["section"] == "bandwidth" and "interference" in row
    assert "1 rows are in" in capsys.readouterr().out


def test_responses_have_the_length_asked_for(bench_engine, tiny):
    params = bench_engine.init_params(tiny, seed=0)
    prompts = bench_engine.random_prompts(3, tiny.vocab_size)
    engine = bench_engine.make_engine(tiny, True, slots=3, length=64 + 70)
    sampled = bench_engine.decode(engine, params, prompts, 70)  # more than a host visit
    assert sampled.shape == (3, 70) and np.all(sampled >= 0)


def test_bytes_of_a_step_count_a_tied_embedding_once_and_an_untied_input_not_at_all(bench_engine, tiny):
    untied = dataclasses.replace(tiny, tie_embeddings=False)
    assert bench_engine.step_weight_bytes(tiny) == bench_engine.step_weight_bytes(untied)
    assert bench_engine.step_weight_bytes(tiny) == 4 * bench_engine.num_params(tiny)


def test_bandwidth_rows(bench_engine, tiny, monkeypatch):
    monkeypatch.setattr(bench_engine, "measure_read_bandwidth", lambda repeats: {"a": 1e9, "b": 4e9})
    rows = bench_engine.bandwidth_rows("tiny", tiny, steps=4, repeats=1)
    assert [row.name for row in rows] == [f"bandwidth/tiny/batch 1/row_invariant {s}" for s in ("on", "off")]
    for row in rows:
        assert row.baseline_value == 4.0
        assert row.ratio == pytest.approx(row.value / 4.0)


def test_a_second_process_gets_the_first_ones_cache(bench_engine, tiny, monkeypatch):
    caches = []

    def first_step(command, **options):
        caches.append(command[-1])
        seconds = 1.0 if caches.count(command[-1]) == 2 else 4.0
        now = time.time()
        times = {"created": now + seconds, "decoded": now + 2 * seconds, "compiling_seconds": seconds}
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(times))

    monkeypatch.setattr(subprocess, "run", first_step)
    rows = bench_engine.startup_rows("tiny", tiny, repeats=2)
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


def test_a_process_decodes_its_first_step_and_leaves_its_programs(bench_engine, tiny, tmp_path):
    policy, cache = tmp_path / "policy", tmp_path / "cache"
    bench_engine.huggingface.save_model(policy, tiny, bench_engine.init_params(tiny, seed=0), "float32")
    command = [sys.executable, str(_SCRIPT), "--first-step", str(policy), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parent.parent)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    times = json.loads(output.stdout)
    assert times["created"] < times["decoded"]
    cached = " ".join(file.name for file in cache.iterdir())
    assert all(program in cached for program in ("prefill", "insert", "generate"))


class TestAgainstTransformers:
    """What needs the baseline installed."""

    @pytest.fixture
    def reference(self, bench_engine, tiny, tmp_path):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        return bench_engine.make_reference(tiny, tmp_path / "policy")

    def test_decode_rows(self, bench_engine, tiny, reference):
        rows = bench_engine.decode_rows("tiny", tiny, {2: (3, 1)})
        assert [row.name for row in rows] == [
            f"decode/tiny/batch 2/{what}"
            for what in ("row_invariant on", "row_invariant off", "price of row_invariant")
        ]
        on, off, price = rows
        assert on.baseline_value == off.baseline_value
        assert (price.value, price.baseline_value) == (on.value, off.value)

    def test_generate_is_as_long_as_asked_and_not_cut_to_its_top_k(self, bench_engine, reference):
        model, _ = reference
        prompts = bench_engine.random_prompts(1, 64) * 1024
        sampled = bench_engine.reference_decode(model, prompts, 2)
        assert sampled.shape == (1024, 2)
        # One distribution, nearly uniform over 64 tokens: by default only its best 50 could be sampled.
        assert len(set(sampled[:, 0].tolist())) > 50

    def test_another_policy_is_not_timed(self, bench_engine, tiny, reference):
        model, params = reference
        bench_engine.check_same_policy(model, tiny, params)
        params = params | {"final_norm": -params["final_norm"]}
        with pytest.raises(UserError, match="not the same policy"):
            bench_engine.check_same_policy(model, tiny, params)

    def test_both_sides_do_the_same_update(self, bench_engine, tiny, reference, monkeypatch):
        model, params = reference
        small = bench_engine.TrainingConfig(pack_length=256, rows_per_microbatch=2)
        monkeypatch.setattr(bench_engine, "UPDATE", small)
        sequences = bench_engine.long_tailed_sequences(6, tiny.vocab_size)
        ours = bench_engine.PackedUpdates(tiny, params, sequences, row_invariant=True)
        theirs = bench_engine.PaddedUpdates(model, sequences)
        for _ in range(2):  # the second sees the weights that the first left
            result = ours()
            bench_engine.check_same_update(result, theirs(), "on")
        with pytest.raises(UserError, match="not the same update"):
            bench_engine.check_same_update((result[0], 1.01 * result[1]), result, "on")
        assert 0 < ours.padding < 1 and 0 <= theirs.padding < 1
