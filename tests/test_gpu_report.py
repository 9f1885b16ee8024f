"""The report's script, with an interpreter that only notes what it is asked to run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts import SCRIPTS

_PYTHON = """#!/usr/bin/env bash
if [[ "$1" == -c ]]; then echo "$DEVICE"; exit; fi
echo "$*" >> "$CALLS"
for failing in $FAILING; do [[ "$*" == *"$failing"* ]] && exit 3; done
[[ "$*" == *--ignore* ]] && exit 5  # no test was selected
exit 0
"""


@pytest.fixture
def report(tmp_path):
    """Runs the script in a repository of its own: (status, calls, what it wrote to stderr)."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "gpu_report.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)

    def run(*arguments, device="gpu nvidia-h200", failing=""):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            **os.environ,
            "PYTHON": str(python),
            "CALLS": str(calls),
            "DEVICE": device,
            "FAILING": failing,
        }
        done = subprocess.run(
            ["bash", str(Path("scripts") / "gpu_report.sh"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, calls.read_text().splitlines(), done.stderr

    return run


def test_every_part_runs_and_names_the_device(report):
    status, calls, _ = report()
    assert status == 0
    assert calls == [
        "-m pytest -q -m accelerator tests/kernels",
        "-m pytest -q -m accelerator tests --ignore=tests/kernels",
        "scripts/bench_kernels.py --output benchmarks/results/kernels-nvidia-h200.json",
        "scripts/bench_device.py --kernels xla --output benchmarks/results/device-nvidia-h200-xla.json",
        "scripts/bench_device.py --kernels mosaic_gpu,xla"
        " --output benchmarks/results/device-nvidia-h200-mosaic_gpu.json",
    ]


def test_a_failure_is_reported_and_stops_nothing(report):
    status, calls, errors = report(failing="tests/kernels bench_kernels")
    assert status == 1 and len(calls) == 5
    assert "failed: native tests of kernels (status 3)" in errors
    assert "failed: kernels (status 3)" in errors and "failed: engine" not in errors


def test_without_a_gpu_only_a_look(report):
    status, calls, errors = report(device="cpu cpu")
    assert status == 2 and not calls and "JAX runs on cpu, not on a GPU" in errors
    status, calls, _ = report("--quick", device="cpu cpu")
    assert status == 0 and len(calls) == 4
    assert calls[2] == "scripts/bench_kernels.py --quick --output benchmarks/results/kernels-cpu.json"


def test_its_parts_take_less_than_25_minutes():
    lines = (SCRIPTS / "gpu_report.sh").read_text().splitlines()
    parts = [line.split('"')[2].split()[0] for line in lines if line.lstrip().startswith('part "')]
    limits = [int(limit) for limit in parts]
    assert sum(limits) + limits[-1] <= 25 * 60  # the last runs twice
