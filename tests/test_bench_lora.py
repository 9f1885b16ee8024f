"""scripts/bench_lora.py: its command line and its rows; the process whose peak counts is a small update."""

from pathlib import Path

import jax
import pytest

from rljax.config import load_config
from rljax.reports.decisions import RunDecisions
from rljax.reports.runs import RunData
from tests.scripts import load_script

bench_lora = load_script("bench_lora")
from engine_benchmarks.policies import qwen3  # noqa: E402  (the script's folder is on the path now)
from training_benchmarks import lora_learning, lora_memory  # noqa: E402

PATH = Path("nowhere")
POLICY = qwen3(vocab=64, hidden=32, layers=1, heads=2, kv_heads=1, mlp=64)


def run_of(reward):
    steps = [
        {"step": i + 1, "reward/mean": reward, "time/update": 2.0, "mismatch/logprob_abs_max": 0.0}
        for i in range(3)
    ]
    heldout = [{"step": 0, "evaluation/reward": 0.25}, {"step": 3, "evaluation/reward": reward}]
    return RunData(PATH, "run", steps, heldout, [{"commit": "abc"}], [], RunDecisions(PATH, {}), "")


def test_a_row_compares_what_both_ways_have_learned():
    row = lora_learning.row_of({"all weights": run_of(0.5), "LoRA": run_of(0.75)})
    assert (row.value, row.baseline_value, row.ratio) == (0.75, 0.5, 1.5)
    details = row.as_json()
    assert (details["steps"], details["before"]) == (3, 0.25)
    assert details["seconds_of_updates"] == {"all weights": 6.0, "LoRA": 6.0}
    assert details["heldout"]["LoRA"] == [[0, 0.25], [3, 0.75]]


@pytest.mark.parametrize("what", lora_learning.RUNS)
def test_both_ways_are_a_config(what):
    load_config(lora_learning.CONFIG, lora_learning.RUNS[what])


@pytest.mark.long
def test_an_adapter_holds_less_and_trains_less(monkeypatch):
    """The adapter's moments are those of its factors; its base is there twice."""
    asked = []
    monkeypatch.setattr(
        lora_memory.subprocess, "check_output", lambda command, env: asked.append(command) or b"1000000\n"
    )
    rows = {row.name: row for row in lora_memory.memory_rows("small", POLICY)}
    assert [command[-3:] for command in asked] == [
        ["--updates", "small", kind] for kind in lora_memory.UPDATES
    ]
    half = rows["memory/small/LoRA, bfloat16/held"]
    assert half.value < rows["memory/small/LoRA/held"].value
    assert half.details["trained"] == rows["memory/small/LoRA/held"].details["trained"] > 0
    assert rows["memory/small/LoRA/peak of a process"].ratio == 1.0


def test_a_process_says_the_peak_of_its_updates(monkeypatch, capsys):
    monkeypatch.setitem(bench_lora.POLICIES, "small", POLICY)
    assert bench_lora.main(["--updates", "small", "LoRA"]) == 0
    assert int(capsys.readouterr().out) > 0


def test_an_accelerator_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert bench_lora.main(["--only", "memory"]) == 2
    assert "error: JAX runs on gpu, the figures are a CPU's" in capsys.readouterr().err
