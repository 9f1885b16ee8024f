"""Signals: what is worth finishing is finished and saved, and whoever insists gets out."""

import itertools
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


def signalling(function, when, number):
    """`function`, with a signal before call `when`, counted from 1."""
    calls = itertools.count(1)

    def wrapped(*arguments, **options):
        if next(calls) == when:
            signal.raise_signal(number)
        return function(*arguments, **options)

    return wrapped


def test_a_warm_start_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    def stop(*_):  # what comes before the rollouts is all that is tested
        raise KeyboardInterrupt

    def warmed_up(name, stopped_by):
        """The weights of a tiny run with a warm start of its own."""
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        with pytest.raises(stopped_by) as stopped:
            train(directory, f"warm_start.cache_dir={directory}/warm_start")
        weights = [path.read_bytes() for path in directory.glob("warm_start/*/model.safetensors")]
        return stopped.value, weights

    monkeypatch.setattr(loop, "compile_programs", stop)
    _, (whole,) = warmed_up("whole", KeyboardInterrupt)
    update, updates = warm_start._update, []
    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "_update", signalling(update, 2, signal.SIGTERM))
        stopped, weights = warmed_up("stopped", Interrupted)
    assert stopped.signal == signal.SIGTERM and "stopped before the first checkpoint" in str(stopped)
    unfinished = tmp_path / "stopped" / "run" / "warm_start"
    assert RunCheckpoints(unfinished, keep=1).latest_step() == 2 and not weights
    monkeypatch.setattr(warm_start, "_update", lambda *given: updates.append(1) or update(*given))
    _, weights = warmed_up("stopped", KeyboardInterrupt)
    assert len(updates) == 1 and weights == [whole]  # one of three
    assert not unfinished.exists()


def test_a_signal_while_compiling_or_evaluating_loses_nothing(tmp_path, monkeypatch):
    """Before the first step at once, with the checkpoint that is resumed named; and in a step after it."""
    options = ("training.steps=2", "evaluation.every=1")
    nothing, saved = "stopped before the first checkpoint", "stopped at step 1, which is saved"
    for where, name, call, number, says in (
        (loop, "compile_programs", 1, signal.SIGINT, nothing),
        (Collector, "collect", 1, signal.SIGTERM, nothing),  # the evaluation before training
        (Collector, "collect", 2, signal.SIGTERM, saved),  # the one after the first step
        (loop, "compile_programs", 1, signal.SIGTERM, saved),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, signalling(getattr(where, name), call, number))
            with pytest.raises(Interrupted, match=f"^{says}$") as stopped:
                train(tmp_path, *options)
        assert stopped.value.signal == number
    lines = train(tmp_path, *options)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("evaluation/reward" in line for line in lines)
