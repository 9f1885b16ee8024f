"""A run that is killed at random moments, over and over, ends as one that never was: bit for bit."""

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rljax.run_directory import RunDirectory
from tests.fork_server import Process, shared
from tests.training.tiny_run import digests, numbers, write_config

ROOT = Path(__file__).parents[2]
STEPS = 30
ANY_TIME, BETWEEN_LINES, SAVING = "any time", "between lines", "saving"
KILLS = 2 * (ANY_TIME, SAVING, BETWEEN_LINES, SAVING, ANY_TIME, SAVING)
SMALL = 30_000  # bytes: not even one matrix of a checkpoint fits into files of this size, all metrics do
PATIENCE = 120.0  # seconds, for anything


# scripts/train.py, with a reward that every response has of its own: so small a policy never earns one.
TRAIN = """
import resource, sys, zlib
from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.scripts import load_script

ChainArithmetic.reward = lambda self, problem, text: {"reward": zlib.crc32(text.encode()) % 1000 / 1000}
file_size, *arguments = sys.argv[1:]
if file_size != "None":
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_size), hard))
sys.exit(load_script("train").main(arguments))
"""


class Sessions:
    """Starts, watches and kills the process that works on a run.

    Args:
      world: a directory for what runs share, and the file of their errors.
    """

    def __init__(self, world: Path) -> None:
        self.world, self.errors = world, world / "errors.txt"
        self._process: Process | None = None

    def close(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def start(self, run: Path, *overrides: str, file_size: int | None = None) -> None:
        arguments = [
            "--config",
            str(self.world / "config.yaml"),
            f"run_dir={run}",
            f"training.steps={STEPS}",
            "policy.shape.mlp_size=2048",
            "rollout.max_response_length=24",
            "evaluation.every=5",
            "evaluation.problems=2",
            "checkpoint.keep_every=7",
            "checkpoint.keep_best=1",
            *overrides,
        ]
        self._process = shared().start(TRAIN, [file_size, *arguments], Path(os.devnull), self.errors)

    def end(self, kill: bool = False) -> int:
        """The exit status, when the process is over."""
        if kill:
            self._process.send(signal.SIGKILL)  # where it has ended by itself, its status says how
        return self._process.wait()

    def wait_until(self, happened, beginning: float) -> float:
        """Seconds from the beginning until it has happened."""
        while not happened():
            assert time.perf_counter() - beginning < PATIENCE, self.errors.read_text()
            time.sleep(0.001)
        return time.perf_counter() - beginning


def unfinished(run: Path) -> bool:
    """Whether a checkpoint is being written, or was when the process died."""
    try:
        entries = [entry for entry in (run / "checkpoints").iterdir() if entry.name.isdecimal()]
    except FileNotFoundError:
        return False
    return not all((entry / "checkpoint.json").exists() for entry in entries)


def complete(run: Path) -> list[int]:
    return sorted(int(seal.parent.name) for seal in run.glob("checkpoints/*/checkpoint.json"))


def num_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(run: Path) -> list[dict]:
    return numbers(RunDirectory(run).read_metrics())


def rollouts(run: Path) -> list[dict]:
    """Lengths and samples; `running` holds times."""
    return [{k: v for k, v in line.items() if k != "running"} for line in RunDirectory(run).read_rollouts()]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    world = tmp_path_factory.mktemp("world")
    write_config(world)
    sessions = Sessions(world)
    yield sessions
    sessions.close()


@pytest.fixture(scope="module")
def whole(sessions):
    """The run that nothing happens to; and the seconds it takes to its first line, programs being kept."""
    run = sessions.world / "whole"
    sessions.start(run)
    assert sessions.end() == 0, sessions.errors.read_text()
    again = sessions.world / "again"
    sessions.start(again)
    seconds = sessions.wait_until(lambda: num_lines(again) > 1, time.perf_counter())
    sessions.end(kill=True)
    return run, seconds


@pytest.mark.long
def test_a_run_that_is_killed_at_random_ends_as_one_that_was_not(sessions, whole):
    expected, to_first_line = whole
    # Were a checkpoint's optimizer, weights or position lost, this is what would be seen.
    lines = metrics(expected)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert len({line["reward/mean"] for line in lines[1:]}) > 3
    assert len({line["gradient_norm"] for line in lines[1:]}) > STEPS / 2
    assert len(digests(expected, STEPS)) > 20
    run = sessions.world / "killed"
    rng = np.random.default_rng(6)
    parts = itertools.count()
    while_saving, before_a_step, reached = 0, 0, []
    for kill in KILLS:
        beginning, known = time.perf_counter(), num_lines(run)
        sessions.start(run)
        if kill == ANY_TIME:  # loading, restoring, training, but not for many steps: one in each part
            part = (next(parts) + rng.uniform()) / KILLS.count(ANY_TIME)
            most = beginning + 1.5 * to_first_line * part
            most_lines = known + rng.integers(0, 3)
            sessions.wait_until(
                lambda t=most, n=most_lines: time.perf_counter() > t or num_lines(run) > n, beginning
            )
        elif kill == BETWEEN_LINES:
            sessions.wait_until(lambda known=known: num_lines(run) not in (0, known), beginning)
            time.sleep(rng.uniform(0.0, 0.2))
        else:
            leftover = complete(run)
            sessions.wait_until(lambda old=leftover: complete(run) != old, beginning)
            sessions.wait_until(lambda: unfinished(run), beginning)
            time.sleep(rng.uniform(0.0, 0.05))
        assert sessions.end(kill=True) == -signal.SIGKILL, sessions.errors.read_text()
        while_saving += unfinished(run)
        before_a_step += num_lines(run) <= known
        reached.append(max(complete(run), default=0))
    assert while_saving >= 3 and before_a_step >= 2, (while_saving, before_a_step, reached)
    assert 5 < reached[-1] < STEPS and len(set(reached)) > 5, reached
    sessions.start(run)
    assert sessions.end() == 0, sessions.errors.read_text()
    assert sessions.errors.read_text() == ""
    assert metrics(run) == metrics(expected)
    assert rollouts(run) == rollouts(expected) and len(rollouts(run)) == STEPS
    assert digests(run, STEPS) == digests(expected, STEPS)
    assert complete(run) == complete(expected)
    assert len(RunDirectory(run).read_sessions()) > len(KILLS) // 2


def test_a_killed_run_goes_on_and_a_full_disk_may_cost_checkpoints_only(sessions):
    """Both have the numbers of a run that nothing happens to: the second, before it is started again."""
    killed, full = sessions.world / "killed once", sessions.world / "going on"
    # Of the shapes of other tiny runs, whose programs are there.
    shapes = ("policy.shape.mlp_size=64", "rollout.max_response_length=48")
    short = ("training.steps=4", "warm_start=null", *shapes)
    sessions.start(killed, *short)
    sessions.wait_until(lambda: complete(killed), time.perf_counter())
    assert sessions.end(kill=True) == -signal.SIGKILL, sessions.errors.read_text()
    assert num_lines(killed) < 5
    sessions.start(killed, *short)
    assert sessions.end() == 0, sessions.errors.read_text()
    assert RunDirectory(killed).read_sessions()[-1]["step"] > 0

    sessions.errors.unlink(missing_ok=True)
    sessions.start(full, *short, "checkpoint.on_failure=go_on", file_size=SMALL)
    assert sessions.end() == 2  # what counts is that the last one is there
    assert "the checkpoint of step 4 could not be written" in sessions.errors.read_text()
    assert sessions.errors.read_text().count("\n") == 1
    assert num_lines(full) == 5 and complete(full) == []
    assert metrics(full) == metrics(killed)
    sessions.start(full, *short)
    assert sessions.end() == 0
    assert num_lines(full) == 5 and complete(full) == complete(killed) == [3, 4]
