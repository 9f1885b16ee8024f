"""The report on a GPU or TPU: its driver with parts that are stand-ins, without JAX, and once on a CPU."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.scripts import SCRIPTS, load_script

engines = load_script("gpu_parts.engines")
gpu_report = load_script("gpu_report")
SHAPES = load_script("workloads").SHAPES

_PART = """
import json, os, subprocess, sys, time
output, variant = sys.argv[sys.argv.index("--output") + 1], sys.argv[-1]
name = __spec__.name.partition(".")[2]
rows = json.load(open(output))["rows"] if os.path.exists(output) else []
rows.append({"name": "flags " + os.environ["XLA_FLAGS"], "value": 1.0, "unit": "s", "variant": ""})
json.dump({"part": name, "rows": rows, "notes": [name + " says"]}, open(output, "w"))
print("part", name, "prints")
"""
_HANGS = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '600'])
print('child', child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def report(tmp_path):
    """Runs the report of a repository of its own: (status, standard output, standard error). Its results are
    in `report.output`.
    """
    parts = tmp_path / "scripts" / "gpu_parts"
    parts.mkdir(parents=True)
    shutil.copy(SCRIPTS / "gpu_report.py", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    (tmp_path / "site" / "jax_plugins").mkdir(parents=True)  # JAX's for a GPU, which need not be here

    def run(*arguments, gpu="NVIDIA H100 80GB HBM3, 80000", **behind):
        for part in gpu_report.PARTS:
            (parts / f"{part.name}.py").write_text(_PART + behind.get(part.name, ""))
        nvidia_smi = tmp_path / "bin" / "nvidia-smi"
        nvidia_smi.write_text(f"#!/bin/sh\necho '{gpu}'\n")
        nvidia_smi.chmod(0o755)
        paths = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": ""}
        environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        command = [sys.executable, "scripts/gpu_report.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    run.output = tmp_path / "benchmarks" / "results" / "gpu-nvidia-h100-80gb-hbm3"
    return run


@pytest.fixture
def with_tpu(report, tmp_path, monkeypatch):
    """Runs the report in this process, where there seems to be a TPU that JAX, a stand-in, knows: status."""

    def run(*arguments, jax="devices = lambda: [type('Device', (), {'device_kind': 'TPU v5 lite'})]"):
        (tmp_path / "site" / "jax.py").write_text(jax)
        stand_in = _PART.replace('"flags " +', 'os.environ["JAX_PLATFORMS"] + " flags " +')
        for part in gpu_report.PARTS:
            (tmp_path / "scripts" / "gpu_parts" / f"{part.name}.py").write_text(stand_in)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("JAX_PLATFORMS", "tpu")
        monkeypatch.setenv("XLA_FLAGS", "")
        monkeypatch.setattr(gpu_report, "_ROOT", tmp_path)
        nodes = {"/dev/vfio/[0-9]*": ["/dev/vfio/0"]}
        monkeypatch.setattr(gpu_report.glob, "glob", lambda pattern: nodes.get(pattern, []))
        monkeypatch.setattr(gpu_report.signal, "signal", lambda *_: None)
        return gpu_report.main(arguments)

    return run


def test_on_a_tpu_parts_run_once_without_flags_of_a_gpu(with_tpu, tmp_path, capsys):
    assert with_tpu() == 0
    printed = capsys.readouterr().out
    output = tmp_path / "benchmarks" / "results" / "tpu-v5-lite"
    for part in gpu_report.PARTS:
        (row,) = content(output, part.name)["rows"]
        assert row["name"] == "tpu,cpu flags "  # the processor beside it computes references
    assert "TPU v5 lite: 1800 s for ceilings, kernels" in printed
    said = "measured once on a TPU; left out, with flags of a GPU"
    assert f"== exactness: {said}: no autotuning" in printed
    assert f"== decode: {said}: command buffers" in printed and printed.count(said) == 2


def test_a_tpu_that_jax_cannot_use_is_one_line(with_tpu, capsys):
    assert with_tpu(jax="raise RuntimeError('The TPU is already in use by process 7')") == 2
    errors, why = capsys.readouterr().err, "RuntimeError: The TPU is already in use by process 7"
    assert errors.startswith(f"error: JAX cannot use the TPU ({why})") and errors.count("\n") == 1


def content(output, name):
    return json.loads((output / f"{name}.json").read_text())


def test_all_parts_run_in_order_and_their_files_are_few(report):
    status, printed, errors = report()
    assert status == 0 and not errors
    names = [part.name for part in gpu_report.PARTS]
    assert sorted(os.listdir(report.output)) == sorted([*(f"{name}.json" for name in names), "log.txt"])
    assert len(names) + 1 <= 8
    begun = [line.split()[1] for line in printed.splitlines() if line.startswith("== ") and "at most" in line]
    assert list(dict.fromkeys(line.rstrip(",") for line in begun)) == names
    assert all(content(report.output, name)["outcome"] == "complete" for name in names)
    # A part is started once for each set of flags, and each start adds to its file.
    flags = [row["name"] for row in content(report.output, "exactness")["rows"]]
    assert flags == ["flags --xla_gpu_autotune_level=0", "flags "]
    assert (report.output / "log.txt").read_text() == printed and "part decode prints" in printed
    assert "exactness          2 rows" in printed and "update: update says" in printed


def test_time_is_shared_and_what_is_left_goes_to_the_parts_behind(report):
    _, printed, _ = report("--parts", "verify,kernels,update", "--budget", "353")
    begun = [line.split() for line in printed.splitlines() if "at most" in line]
    limits = [(words[1].rstrip(","), float(words[words.index("most") + 1])) for words in begun]
    # 3 s are to end the last one: 350 s for 60, 45 and 70 s of the table.
    assert [name for name, _ in limits] == ["kernels", "verify", "update"]
    for (_, limit), expected in zip(limits, (350 * 60 / 175, 350 * 45 / 115, 350), strict=True):
        assert expected - 5 < limit <= expected + 1  # the stand-ins take next to nothing


def test_a_part_that_fails_leaves_its_rows_and_the_others_run(report):
    """One that writes nothing has a file that says so."""
    nothing = {"verify": "os.remove(output); sys.exit(1)"}
    parts = ("--parts", "kernels,verify,decode,update")
    status, printed, _ = report(*parts, kernels="sys.exit(3)", decode="1 / 0", **nothing)
    assert status == 1
    kernels, decode = content(report.output, "kernels"), content(report.output, "decode")
    assert kernels["outcome"] == "failed with status 3" and len(kernels["rows"]) == 1
    assert "failed with status 1" in decode["outcome"] and "ZeroDivisionError" in printed
    assert content(report.output, "update")["outcome"] == "complete"
    verify = content(report.output, "verify")
    assert (verify["outcome"], verify["rows"]) == ("failed with status 1", [])


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path):
    log = gpu_report.Log(tmp_path / "log.txt")
    command = [sys.executable, "-c", _HANGS]
    start = time.monotonic()
    outcome = gpu_report.run_process(command, dict(os.environ), 1.0, log)
    assert outcome == "cut short after 1 s" and time.monotonic() - start < 60
    child = int((tmp_path / "log.txt").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        for _ in range(200):  # until whoever adopted it has waited for it
            os.kill(child, 0)
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "gpu", "message"),
    [
        (["--budget", "200"], None, "--budget: 200 s is below the minimum of these parts, 235 s"),
        (["--parts", "update,kernel"], None, "--parts: 'kernel' is no part; they are ceilings, kernels,"),
        (["--parts", "update", "--preflight"], None, "--parts: --preflight has parts of its own"),
        ([], "NVIDIA T4, 15000", "NVIDIA T4: 15 GiB are free, and 40 GiB are needed"),
        ([], "No devices were found", "no GPU and no TPU ("),
    ],
)
def test_what_cannot_work_is_one_line(report, arguments, gpu, message):
    status, printed, errors = report(*arguments, **({} if gpu is None else {"gpu": gpu}))
    assert status == 2 and not printed and len(errors.splitlines()) == 1
    assert errors.startswith(f"error: {message}")


def test_a_missing_wheel_is_named_with_its_command():
    gpu_report.check_packages(gpu_report.WHEELS)
    with pytest.raises(gpu_report.Misuse) as raised:
        gpu_report.check_packages(["json", "not_there_at_all.inner", "tensorboardX_"])
    assert "not installed: not_there_at_all.inner, tensorboardX_; where" in str(raised.value)
    assert "-d wheels not-there-at-all tensorboardX-; here" in str(raised.value)


def test_bytes_that_a_step_reads():
    params = engines.random_params(SHAPES["tiny"])
    every = engines.read_bytes(params)
    assert engines.read_bytes(params | {"lm_head": params["embed"]}) == every
    assert engines.cache_bytes(SHAPES["tiny"], 3) == 3 * 2 * 128 * 2


@pytest.mark.long
def test_the_whole_report_on_a_cpu(tmp_path):
    """Every part measures something, and nothing differs, where plain JAX computes on a CPU."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_report.py", "--quick", "--budget", "1200", "--output", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for part in gpu_report.PARTS:
        written = content(tmp_path, part.name)
        assert written["outcome"] == "complete" and written["rows"], part.name
        for row in written["rows"]:
            assert row["value"] is not None and row["device"] == "cpu" and "xla_flags" in row
            assert {"jax", "compile_seconds", "repeats"} <= row.keys()
    assert all(row["value"] < 5e-3 for row in content(tmp_path, "kernels")["rows"] if row["unit"] == "error")
    exactness = {row["name"]: row for row in content(tmp_path, "exactness")["rows"]}
    assert exactness["flips, with drafts"]["accepted"] > 0
    for name in ("flips, alone", "flips, with drafts", "the training pass from the rollout"):
        assert exactness[name]["value"] == 0 and exactness[name]["tokens"] > 0
