"""Trackers cannot stop a run: what fails is left out, with one warning."""

import contextlib
import importlib.util
import sys

import pytest

from rljax.errors import ConfigError, Interrupted
from rljax.run_directory import RunDirectory
from rljax.tracking import Trackers
from tests.test_run_directory import make_config


class Failing:
    """Raises at the second line."""

    def __init__(self):
        self.lines, self.closed = [], None

    def write(self, metrics):
        self.lines.append(metrics["step"])
        if len(self.lines) == 2:
            raise OSError(28, "No space\nleft on device")

    def close(self, failed):
        self.closed = failed


def session(path, service, *lines):
    """A process that works on the run, with these keys of `tracking`; returns what was said to the user."""
    said = []
    config = make_config(tracking={"project": "chains", "name": "first try"} | service)
    with Trackers(config, RunDirectory(path), said.append) as trackers:
        trackers.begin()
        for line in lines:
            trackers.write(line)
    return said


@pytest.fixture
def said():
    return []


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "run")


def test_one_that_fails_is_left_out_and_the_others_go_on(directory, said):
    trackers = Trackers(make_config(), directory, said.append)
    failing = Failing()
    with trackers:
        trackers.begin()
        trackers._trackers["failing"] = failing
        for step in range(4):
            trackers.write({"step": step, "x": 1.0})
    assert failing.lines == [0, 1] and failing.closed is None
    assert said == ["warning: failing failed, the run goes on without it: [Errno 28] No space left on device"]
    (file,) = (directory.path / "tensorboard").iterdir()
    assert file.read_bytes().count(b"\x01x") == 4  # TensorBoard has all of them


def test_a_tracker_that_cannot_begin_is_a_warning(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # is not asked for, and so not imported
    (directory.path / "tensorboard").write_text("a file is in the way")
    said = session(directory.path, {}, {"step": 0})
    assert len(said) == 1 and said[0].startswith("warning: TensorBoard failed, the run goes on without it: ")


def test_closing_says_whether_the_run_failed(directory, said):
    """One that was asked to stop has not failed."""
    for error, failed in ((None, False), (Interrupted("stopped", 15), False), (RuntimeError("no"), True)):
        trackers, tracker = Trackers(make_config(), directory, said.append), Failing()
        trackers._trackers["one"] = tracker
        with contextlib.suppress(Interrupted, RuntimeError), trackers:
            if error is not None:
                raise error
        assert tracker.closed is failed


def test_the_missing_extra_is_a_config_error_before_anything_begins(directory, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tracking.mode: needs wandb; .*pip install 'rljax\[wandb\]'"):
        Trackers(make_config(tracking={"mode": "offline"}), directory, print)
    with pytest.raises(ConfigError, match=r"^tracking.mlflow: needs mlflow; .*pip install 'rljax\[mlflow\]'"):
        Trackers(make_config(tracking={"mlflow": "sqlite:///x.db"}), directory, print)
    Trackers(make_config(), directory, print)
