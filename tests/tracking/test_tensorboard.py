"""TensorBoard's files: read back, they are metrics.jsonl, whatever happened to the process in between."""

import datetime
import json
import math
import struct

import numpy as np
import pytest

from rljax.run_directory import RunDirectory


def events(directory):
    """All events of a run, by reading the record format: a length, its checksum, the data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    read_events = []
    for file in sorted((directory.path / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            read_events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return read_events


def scalars(directory):
    """Values by (step, name); asserts that no step occurs twice."""
    values = {}
    for event in events(directory):
        for value in event.summary.value:
            assert (event.step, value.tag) not in values
            values[event.step, value.tag] = value.simple_value
    return values


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "run")


def begun(directory):
    from rljax.tracking.tensorboard import TensorBoard  # which imports PyTorch

    return TensorBoard(directory)


def train(directory, *lines):
    """What a session does: metrics to both."""
    tensorboard = begun(directory)
    for line in lines:
        directory.append_metrics(line)
        tensorboard.write(line)
    return tensorboard


def test_every_number_of_the_metrics_is_there(directory):
    line = {"step": 3, "reward/mean": 0.5, "rollout/tokens": 12, "flag": True, "note": "text", "none": None}
    train(directory, line, {"step": 4, "entropy": np.float32(0.25), "x": math.nan})
    values = scalars(directory)  # while the run goes on
    assert math.isnan(values.pop((4, "x")))
    expected = {(3, "reward/mean"): 0.5, (3, "rollout/tokens"): 12.0, (3, "flag"): 1.0, (4, "entropy"): 0.25}
    assert values == expected


def test_a_resumed_run_has_no_step_twice(directory):
    """Killed after step 3 without closing, it goes on from step 1's checkpoint with other numbers."""
    train(directory, *({"step": step, "x": step} for step in range(4)))
    (file,) = (directory.path / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.1000000000.host"))  # a session of another time
    directory.truncate_after(1)
    train(directory, {"step": 2, "x": 20}, {"step": 3, "x": 30})
    assert scalars(directory) == {(0, "x"): 0, (1, "x"): 1, (2, "x"): 20, (3, "x"): 30}
    # A TensorBoard that is looking on is told to forget what it has read.
    assert [event.session_log.status for event in events(directory)].count(1) == 1  # SessionLog.START
    assert len(list((directory.path / "tensorboard").iterdir())) == 1


def test_what_is_lost_comes_back_from_the_metrics(directory):
    """As after a power cut, or of a run that was begun before there were such files."""
    for step in range(3):
        directory.append_metrics({"step": step, "x": step})
    (directory.path / "tensorboard").mkdir()
    (directory.path / "tensorboard" / "events.out.tfevents.1.host").write_bytes(b"half a rec")
    begun(directory).close(failed=True)
    assert scalars(directory) == {(0, "x"): 0, (1, "x"): 1, (2, "x"): 2}


def test_lines_that_are_written_anew_keep_about_their_time(directory):
    dates = ("2026-11-01T10:00:00+00:00", "2026-11-02T10:00:00+00:00")
    sessions = [{"step": step, "date": date} for step, date in zip((0, 2), dates, strict=True)]
    directory.sessions_path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    for step in range(5):
        directory.append_metrics({"step": step, "time/elapsed": 60.0})
    begun(directory).close(failed=False)
    first, second = (datetime.datetime.fromisoformat(date).timestamp() + 60 for date in dates)
    times = [event.wall_time for event in events(directory) if event.summary.value]
    assert times == [first, first, first, second, second]
