"""Signals: what is worth finishing is finished and saved, and whoever insists gets out."""

import os
import signal

import pytest

from rljax.assembly.checkpoint import RunCheckpoints
from rljax.errors import Interrupted
from rljax.rollout.collector import Collector
from rljax.training import loop, warm_start
from rljax.training.interruption import StopRequest
from tests.training.tiny_run import train


@pytest.fixture
def _python_handles_sigint():
    """Also where the shell has told a command in the background to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_first_signal_is_noted_where_something_is_to_be_finished(_python_handles_sigint):
    said = []
    with StopRequest(said.append, first=None) as stop:
        stop.check()
        with stop.finish_first("this step"):
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM and not stop.insisted
        assert said == ["SIGTERM: stopping after this step; again to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.insisted and stop.signal == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):  # Python's own handler is back
        signal.raise_signal(signal.SIGINT)


def test_a_first_signal_stops_at_once_where_there_is_nothing_to_finish():
    with StopRequest(print, first=None) as stop:
        with stop.finish_first("this step"):
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and not stop.insisted


def test_a_third_signal_ends_the_process(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopRequest(print):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert left == [128 + signal.SIGINT]


# -- a run -------------------------------------------------------------------------------------------------


def signalling(function, when, number=signal.SIGTERM):
    """`function`, with a signal before call `when`, counted from 1."""
    calls = iter(range(1, 1000))

    def wrapped(*arguments, **options):
        if next(calls) == when:
            signal.raise_signal(number)
        return function(*arguments, **options)

    return wrapped


def train_own(directory):
    """The tiny run with a warm start of its own."""
    train(directory, f"warm_start.cache_dir={directory}/warm_start")


def warmed_up(directory):
    (policy,) = (directory / "warm_start").iterdir()
    return (policy / "model.safetensors").read_bytes()


def no_further(monkeypatch):
    """Nothing is compiled for the rollouts: what comes before it is all that is tested."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "compile_programs", stop)


def test_a_warm_start_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    no_further(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_own(tmp_path / "whole")
    update = warm_start._update
    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "_update", signalling(update, 2))
        with pytest.raises(Interrupted, match="stopped before the first checkpoint") as stopped:
            train_own(tmp_path / "stopped")
    assert stopped.value.signal == signal.SIGTERM
    unfinished = tmp_path / "stopped" / "run" / "warm_start"
    assert RunCheckpoints(unfinished, keep=1).latest_step() == 2
    updates = []
    monkeypatch.setattr(warm_start, "_update", lambda *given: updates.append(1) or update(*given))
    with pytest.raises(KeyboardInterrupt):
        train_own(tmp_path / "stopped")
    assert len(updates) == 1  # of three
    assert warmed_up(tmp_path / "stopped") == warmed_up(tmp_path / "whole")
    assert not unfinished.exists()


def test_a_signal_while_compiling_or_evaluating_loses_nothing(tmp_path, monkeypatch):
    """Before the first step at once, with the checkpoint that is resumed named; and in a step after it."""
    options = ("training.steps=2", "evaluation.every=1")
    compile_all = loop.compile_programs
    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_programs", signalling(compile_all, 1, signal.SIGINT))
        with pytest.raises(Interrupted, match=r"^stopped before the first checkpoint$") as stopped:
            train(tmp_path, *options)
    assert stopped.value.signal == signal.SIGINT
    collect = Collector.collect
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "collect", signalling(collect, 1))  # the evaluation before training
        with pytest.raises(Interrupted, match=r"^stopped before the first checkpoint$"):
            train(tmp_path, *options)
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "collect", signalling(collect, 2))  # the one after the first step
        with pytest.raises(Interrupted, match=r"^stopped at step 1, which is saved$"):
            train(tmp_path, *options)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_programs", signalling(compile_all, 1))
        with pytest.raises(Interrupted, match=r"^stopped at step 1, which is saved$"):
            train(tmp_path, *options)
    lines = train(tmp_path, *options)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("evaluation/reward" in line for line in lines)
