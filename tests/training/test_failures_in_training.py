"""What a run does when an evaluation, a disk or its user gives up: what was finished is kept, and
the first error is the one that is told. Nothing is compiled; steps and evaluations are made up.
"""

import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from rljax import run_directory
from rljax.config import load_config
from rljax.errors import CheckpointError, Interrupted, RunDirectoryError, UserError
from rljax.learning.accumulation import TrainState
from rljax.run_directory import RunDirectory
from rljax.speculation.no_drafts import NoDrafts
from rljax.training import loop, reporting, session
from rljax.training.batches import Batches
from rljax.training.interruption import StopRequest
from rljax.training.run_state import RunState
from rljax.training.training_run import TrainingRun
from tests.training.tiny_run import write_config

LOST = UserError("task.rewards.0: took more than 10 seconds")


def made_up_state():
    return TrainState({"w": jnp.zeros(2)}, (), jnp.int32(0))


class Checkpoints:
    """Those of a run, in memory; `state` is what the run holds while one is read."""

    def __init__(self, full=False):
        self.saved, self.directory, self.full = {}, None, full

    def latest_step(self):
        return max(self.saved, default=None)

    def save(self, step, state, host_state, drafter, score):
        if self.full:
            raise CheckpointError("no space left")
        self.saved[step] = dict(host_state)

    def restore(self, template):
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(template))
        assert self.run.state.trained is None  # one state is all that there may be room for
        step = self.latest_step()
        return step, made_up_state(), self.saved[step]

    def host_arrays(self, step):
        return {}

    def wait(self):
        pass

    check = wait


def make_run(directory, checkpoints, said, *overrides, evaluate):
    """A run whose steps are made up, as `train` finds it."""
    run = object.__new__(TrainingRun)
    run.config = load_config(write_config(directory), ["tracking.report=true", *overrides])
    run.directory, run.checkpoints, checkpoints.run = RunDirectory(directory / "run"), checkpoints, run
    quiet = lambda *_, **__: None  # noqa: E731
    run.progress = SimpleNamespace(message=said.append, stage=quiet, step=quiet)
    run.stop, run.start, run.state = StopRequest(said.append), 0.0, RunState(made_up_state())
    run.trackers = SimpleNamespace(begin=quiet, write=quiet)
    run.learner = SimpleNamespace(reference_digest=None)
    run.scheduler = SimpleNamespace(speculator=NoDrafts())
    run.invariance = run.curriculum = run.evaluation_sampling = None
    run.data_digests, run.extras, run.cluster, run.base_digest = {}, [], None, None
    run.batches = Batches(run.config, run.state, None, None, None)

    def training_step():
        run.state.data_position += 2
        reporting.keep_for_report(run.progress, run.directory.append_rollout, run.state.step + 1, {})
        names = ("reward/mean", "rollout/tokens_per_second", "response_length/mean")
        return dict.fromkeys(names, 0.5)

    run.training_step, run.evaluate = training_step, lambda: evaluate(run.state.step)
    return run


@pytest.fixture(autouse=True)
def _made_up(monkeypatch):
    """Steps and evaluations are those of `make_run`."""
    monkeypatch.setattr(loop, "compile_programs", lambda run: None)
    monkeypatch.setattr(loop, "training_step", lambda run: run.training_step())
    monkeypatch.setattr(loop, "evaluate", lambda run: run.evaluate())


@pytest.fixture
def reports(monkeypatch):
    written = []
    monkeypatch.setattr(reporting, "write_report_of_run", lambda path, say: written.append(path))
    return written


def test_an_evaluation_that_fails_costs_no_step_and_is_made_up_for(tmp_path, reports):
    checkpoints, said = Checkpoints(), []

    def failing(step):
        if step == 2:
            raise LOST
        return {"evaluation/reward": 0.25 * step}

    run = make_run(tmp_path, checkpoints, said, "checkpoint.every=0", evaluate=failing)
    with pytest.raises(UserError) as error:
        loop.train(run)
    assert error.value is LOST and said[-1] == "step 2 is saved"
    assert checkpoints.saved[2]["owes_evaluation"] and reports == [run.directory.path]
    before = run.directory.read_metrics()
    assert [line["step"] for line in before] == [0, 1, 2] and "evaluation/reward" not in before[2]

    again = make_run(tmp_path, checkpoints, said, evaluate=lambda step: {"evaluation/reward": 0.25 * step})
    loop.train(again)
    after = again.directory.read_metrics()
    assert after == [*before[:2], before[2] | {"evaluation/reward": 0.5}]


def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path, reports, monkeypatch):
    """With checkpoint.on_failure: go_on. No checkpoint is made whose lines of metrics are not there."""
    checkpoints, said, append, full = Checkpoints(), [], run_directory._append_line, []

    def append_line(path, line):
        if full:
            raise RunDirectoryError(f"{path}: cannot be written (No space left on device)")
        append(path, line)

    def evaluate(step):
        full[:] = [True] if step in (1, 2) else []
        return {}

    monkeypatch.setattr(run_directory, "_append_line", append_line)
    overrides = ("training.steps=4", "evaluation.every=1", "checkpoint.on_failure=go_on")
    run = make_run(tmp_path, checkpoints, said, *overrides, evaluate=evaluate)
    loop.train(run)
    assert [line["step"] for line in run.directory.read_metrics()] == [0, 1, 2, 3, 4]
    assert sorted(checkpoints.saved) == [3, 4]
    warnings = [line for line in said if line.startswith("warning: ")]
    assert sum("metrics.jsonl" in line for line in warnings) == 4  # two lines, two checkpoints
    assert any("rollouts.jsonl" in line for line in warnings)  # which only reports read

    # By default it stops; and so does one whose last line is not there.
    for step, option in ((1, "checkpoint.on_failure=stop"), (4, "checkpoint.on_failure=go_on")):
        (tmp_path / option).mkdir()
        full.clear()
        evaluate = lambda now, step=step: full.extend([True] * (now == step)) or {}  # noqa: E731
        run = make_run(tmp_path / option, Checkpoints(), said, *overrides, option, evaluate=evaluate)
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl: cannot be written"):
            loop.train(run)
        assert run.state.step == step
    (tmp_path / "checkpoints").mkdir()
    full.clear()
    run = make_run(tmp_path / "checkpoints", Checkpoints(full=True), said, evaluate=lambda step: {})
    with pytest.raises(CheckpointError, match="no space left"):
        loop.train(run)
    assert run.state.step == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named_with_the_way_on(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.metrics_path.symlink_to("/dev/full")
    full = r"cannot be written \(No space left on device\); started again, the run goes on from its newest"
    with pytest.raises(RunDirectoryError, match=rf"metrics\.jsonl: {full} checkpoint$"):
        directory.append_metrics({"step": 2})


def test_a_run_that_is_stopped_twice_tells_the_signal(tmp_path, monkeypatch):
    def stopped(config, directory, checkpoints, progress, start, stop, cluster):
        with stop.finish_first("this step"):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(session, "make_run", stopped)
    with pytest.raises(Interrupted, match="stopped at once") as error:
        session.run(load_config(write_config(tmp_path)))
    assert error.value.signal == signal.SIGTERM
