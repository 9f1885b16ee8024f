"""The report's script, with an interpreter that only notes what it is asked to run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts import SCRIPTS

_PYTHON = """#!/usr/bin/env bash
if [[ "$1" == -c ]]; then echo "$DEVICE"; exit; fi
echo "$*" >> "$CALLS"
if [[ "$*" =~ (--output |--junitxml=)([^ ]*) ]]; then touch "${BASH_REMATCH[2]}"; fi
for failing in $FAILING; do [[ "$*" == *"$failing"* ]] && exit 3; done
[[ -n "$UNSELECTED" && "$*" == *"$UNSELECTED"* ]] && exit 5  # as pytest says it
exit 0
"""


@pytest.fixture
def report(tmp_path):
    """Runs the script in a repository of its own: (status, calls, what it wrote to stderr). Results are in
    `report.results`.
    """
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "gpu_report.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)

    def run(*arguments, device="gpu nvidia-h200", failing="", unselected=""):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            **os.environ,
            "PYTHON": str(python),
            "CALLS": str(calls),
            "DEVICE": device,
            "FAILING": failing,
            "UNSELECTED": unselected,
        }
        done = subprocess.run(
            ["bash", str(Path("scripts") / "gpu_report.sh"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, calls.read_text().splitlines(), done.stderr

    run.results = tmp_path / "benchmarks" / "results"
    return run


def test_every_part_runs_and_names_the_device(report):
    status, calls, _ = report()
    assert status == 0
    assert calls[0] == (
        "-m pytest -v -p no:cacheprovider -m accelerator"
        " --junitxml=benchmarks/results/tests-tree_attention-nvidia-h200.unfinished.xml"
        " tests/kernels/test_tree_attention.py"
    )
    assert (
        "scripts/bench_kernels.py --op token_logprobs --seconds 60"
        " --output benchmarks/results/kernels-token_logprobs-nvidia-h200.unfinished.json"
    ) in calls
    assert (
        "scripts/bench_device.py --only Qwen2.5-7B --kernels mosaic_gpu,xla --seconds 120"
        " --output benchmarks/results/engine-Qwen2.5-7B-mosaic_gpu-nvidia-h200.unfinished.json"
    ) in calls
    assert any(
        "bench_rollout.py --only rollout --variants SRT,prompt lookup,quantized" in call for call in calls
    )
    assert len(calls) == len(limits()) == len(set(calls))
    assert sorted(os.listdir(report.results)) == sorted(
        f"{name.replace('/', '-')}-nvidia-h200.{'xml' if name.startswith('tests/') else 'json'}"
        for name in limits()
    )


def test_parts_by_name_and_once(report):
    status, calls, _ = report("--parts", "rollout,kernels/compaction,engine/Qwen2.5-1.5B")
    assert status == 0 and [call.split()[0] for call in calls] == [
        "scripts/bench_rollout.py",
        "scripts/bench_kernels.py",
        "scripts/bench_device.py",
    ]
    status, calls, _ = report("--parts", "rollout,kernels")
    assert status == 0 and [call.split()[2] for call in calls] == [
        "tree_attention",
        "quantized_product",
        "noisy_argmax",
        "token_logprobs",
        "round_to_nearest",
    ]
    status, calls, _ = report("--again", "--parts", "kernels")
    assert status == 0 and len(calls) == 6
    assert report("--parts")[0] == 2
    status, calls, errors = report("--parts", "kernel")
    assert status == 2 and not calls and "error: --parts kernel: no such part" in errors


def test_a_failure_is_reported_and_stops_nothing(report):
    status, calls, errors = report(
        failing="tests/kernels/test_compaction bench_rollout", unselected="test_engine"
    )
    assert status == 1 and len(calls) == len(limits())
    assert errors.splitlines() == [
        "failed: tests/compaction (status 3)",
        "failed: rollout (status 3)",
        "failed: tests/engine (no test was selected)",
    ]
    # What there is of them stays, and they run again the next time.
    assert (report.results / "rollout-nvidia-h200.unfinished.json").exists()
    status, calls, _ = report()
    assert status == 0 and len(calls) == 3


def test_without_a_gpu_only_a_look(report):
    status, calls, errors = report(device="cpu cpu")
    assert status == 2 and not calls and "JAX runs on cpu, not on a GPU" in errors
    status, calls, _ = report("--quick", device="cpu cpu")
    assert status == 0 and not report.results.exists()
    assert all(("--quick" in call) == ("bench_kernels" in call or "bench_device" in call) for call in calls)
    assert any("--only tiny --kernels xla" in call for call in calls)


def limits():
    """Seconds by part, from the script."""
    lines = re.findall(r'^    "(\S+) (\d+)"$', (SCRIPTS / "gpu_report.sh").read_text(), re.MULTILINE)
    return {name: int(seconds) for name, seconds in lines}


def test_its_parts_take_less_than_25_minutes():
    to_stop, to_begin = 5, 15
    assert max(limits().values()) < 10 * 60
    assert sum(limits().values()) + to_stop * len(limits()) + to_begin < 25 * 60


def test_files_of_tests_have_some_for_an_accelerator():
    """Else a part would run nothing."""
    named = re.findall(r"^ +(tests/\w+/\w+\.py)$", (SCRIPTS / "gpu_report.sh").read_text(), re.MULTILINE)
    files = [f"tests/kernels/test_{name.removeprefix('tests/')}.py" for name in limits() if "tests/" in name]
    files = [*named, *(file for file in files if not file.endswith("test_engine.py"))]
    assert len(files) == 9
    for file in files:
        assert "mark.accelerator" in (SCRIPTS.parent / file).read_text(), file
