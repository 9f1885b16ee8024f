"""Runs in several processes, over gloo: the numbers of one process, resuming, the end of one of them."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rljax.run_directory import RunDirectory
from tests.configs import NEEDS_PAPERS
from tests.fork_server import Process, shared
from tests.training.tiny_run import train, write_config

PATIENCE = 600.0  # seconds
STEPS = 3


# scripts/train.py as users start it: with JAX's own promotions, and an end for which processes wait.
_TRAIN = """
import atexit, os, sys
import jax
from tests.scripts import load_script

jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
status = load_script("train").main_of_process(sys.argv[1:])
atexit._run_exitfuncs()
sys.exit(status)
"""


def _start(directory: Path, index: int, overrides: Sequence[str], devices: int = 1) -> Process:
    counted = f"--xla_force_host_platform_device_count={devices}"
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {counted}",
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
    }
    arguments = ["--config", directory / "config.yaml", "training.rows_per_microbatch=2", *overrides]
    output = directory / f"output{index}.txt"
    output.write_text("")  # the last start's
    return shared().start(_TRAIN, arguments, output, output, environment)


@contextlib.contextmanager
def _processes(directory: Path, count: int, *overrides: str) -> Iterator[list[Process]]:
    """The processes of the tiny run; killed at the end, if they still run."""
    directory.mkdir(exist_ok=True)
    write_config(directory)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = [f"distributed.coordinator=127.0.0.1:{port}", f"distributed.processes={count}", *overrides]
    started = [_start(directory, i, [*place, f"distributed.process={i}"]) for i in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.send(signal.SIGKILL)
            process.wait()


def _output(directory: Path, index: int) -> str:
    return (directory / f"output{index}.txt").read_text()


def _train(directory: Path, count: int, *overrides: str) -> list[dict]:
    with _processes(directory, count, *overrides) as started:
        for index, process in enumerate(started):
            assert process.wait(PATIENCE) == 0, _output(directory, index)
    return RunDirectory(directory / "run").read_metrics()


def _agree(lines: Sequence[dict], expected: Sequence[dict]) -> None:
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, other in zip(lines[1:], expected[1:], strict=True):
        for name in ("reward/mean", "rollout/tokens", "response_length/max", "update/tokens"):
            assert line[name] == other[name]
        for name in ("loss/policy", "gradient_norm", "entropy"):
            assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> list[dict]:
    """The metrics of one process with one device."""
    return train(tmp_path_factory.mktemp("one"), f"training.steps={STEPS}")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Two processes, two steps."""
    directory = tmp_path_factory.mktemp("two")
    _train(directory, 2, "mesh.data=2")
    return directory


def test_two_processes_have_the_metrics_of_one(one, two):
    _agree(RunDirectory(two / "run").read_metrics(), one[:STEPS])
    # Everything is written once.
    assert len(RunDirectory(two / "run").read_sessions()) == 1
    assert len(RunDirectory(two / "run").read_rollouts()) == 2
    assert "train 2/2" in _output(two, 0) and "train" not in _output(two, 1)


@pytest.mark.long
def test_one_process_goes_on_with_the_run_of_two(one, two, tmp_path):
    shutil.copytree(two / "run", tmp_path / "run")
    write_config(tmp_path)
    process = _start(tmp_path, 0, ["mesh.data=2", f"training.steps={STEPS}"], devices=2)
    assert process.wait(PATIENCE) == 0, _output(tmp_path, 0)
    assert "resumed from step 2" in _output(tmp_path, 0)
    _agree(RunDirectory(tmp_path / "run").read_metrics(), one)


@pytest.mark.long
def test_four_processes_go_on_with_the_run_of_two(one, two, tmp_path):
    shutil.copytree(two / "run", tmp_path / "run")
    overrides = ("--allow-changes", "mesh.data=2", "mesh.tensor=2", f"training.steps={STEPS}")
    _train(tmp_path, 4, *overrides)
    assert "resumed from step 2" in _output(tmp_path, 0)
    _agree(RunDirectory(tmp_path / "run").read_metrics(), one)


@NEEDS_PAPERS
@pytest.mark.long
def test_drafts_change_nothing_over_processes(one, tmp_path, monkeypatch):
    """Each process has a clock of its own, and would ask other drafters for other numbers of rows. The
    default manager chooses, and a head is trained as long as the clock allows.
    """
    # Where programs are stored, rollouts leave no time to train the head.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    head = "{variant: eagle, depths: [2], pack_length: 128, train_below: 8, train_share: 1.0}"
    drafts = ("speculation.drafter=srt", f"speculation.others={{eagle: {head}}}")
    ahead = ("speculation.run_ahead_below=2", "speculation.run_ahead_share=1.0")
    lines = _train(tmp_path, 2, "mesh.data=2", *drafts, *ahead)
    _agree(lines, one[:STEPS])
    assert sum(line["speculation/eagle/head/slices"] for line in lines[1:]) > 0


@pytest.mark.ray
@pytest.mark.long
def test_rollout_workers_decode_for_two_processes(one, tmp_path):
    """Each process has half of the weights' heads; workers get all, and decode what one process samples."""
    pytest.importorskip("ray", reason="the cluster extra is not installed")
    drafts = ("speculation.drafter=srt", "speculation.others={quantized: {}}")
    lines = _train(tmp_path, 2, "mesh.tensor=2", "cluster.workers=2", *drafts)
    _agree(lines, one[:STEPS])
    assert [line["cluster/workers"] for line in lines[1:]] == [2, 2]
    assert all(line["speculation/history_tokens"] > 0 for line in lines[1:])


@pytest.mark.long
def test_the_end_of_one_process_ends_all_and_the_same_command_goes_on(tmp_path):
    """A signal stops all after the same step; who is killed, the first or another, ends the others."""
    steps = 12
    overrides = ("mesh.data=2", "warm_start=null", "evaluation.problems=0", f"training.steps={steps}")

    def newest():
        saved = tmp_path.glob("run/checkpoints/*/checkpoint.json")
        return max((int(seal.parent.name) for seal in saved), default=0)

    @contextlib.contextmanager
    def past_a_checkpoint():
        before, deadline = newest(), time.monotonic() + PATIENCE
        with _processes(tmp_path, 2, *overrides) as started:
            while newest() == before and time.monotonic() < deadline:
                assert all(process.wait(0) is None for process in started), _output(tmp_path, 0)
                time.sleep(0.01)
            yield started

    with past_a_checkpoint() as started:
        started[1].send(signal.SIGTERM)
        assert [process.wait(PATIENCE) for process in started] == [128 + signal.SIGTERM] * 2
    assert "which is saved" in _output(tmp_path, 0)
    for killed in (1, 0):
        with past_a_checkpoint() as started:
            started[killed].send(signal.SIGKILL)
            assert started[1 - killed].wait(PATIENCE) == 2
        errors = [line for line in _output(tmp_path, 1 - killed).splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and "has ended" in errors[0] and "same command" in errors[0]
    lines = _train(tmp_path, 2, *overrides)
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert "resumed from step" in _output(tmp_path, 0)
    sessions = (tmp_path / "run" / "sessions.jsonl").read_text().splitlines()
    resumed = [json.loads(session)["step"] for session in sessions]
    assert len(resumed) == 4 and 0 == resumed[0] < resumed[1] < resumed[2] < resumed[3]
