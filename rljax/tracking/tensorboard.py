"""Event files for TensorBoard, without TensorFlow.

They are a view of metrics.jsonl: whoever opens them writes all its lines anew, so that steps that a resumed
run repeats are there once, whatever was killed when.
"""

import datetime
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from rljax.run_directory import RunDirectory


class TensorBoard:
    """The event file in `tensorboard/` of a run directory.

    Every number of a metrics line is a scalar of the same name; text and None are left out.

    tensorboardX's own writer hands events to a thread, which a full disk ends and which then blocks the run;
    this one writes at once and raises.
    """

    def __init__(self, directory: RunDirectory) -> None:
        folder = directory.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventsWriter(str(folder / "events"))
        # A TensorBoard that is running drops what it has read before.
        self._writer.write_event(
            Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START))
        )
        for line, wall_time in _with_wall_times(directory):
            self._write(line, wall_time)
        self._writer.flush()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Adds a line of metrics, and waits until the system has it."""
        self._write(metrics, time.time())
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Ends the file."""
        del failed
        self._writer.close()

    def _write(self, metrics: Mapping[str, Any], wall_time: float) -> None:
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if name != "step" and (isinstance(value, int | float) or hasattr(value, "item"))
        ]
        self._writer.write_event(
            Event(wall_time=wall_time, step=metrics["step"], summary=Summary(value=values))
        )


def _with_wall_times(directory: RunDirectory) -> Iterator[tuple[dict[str, Any], float]]:
    """The lines so far, each with about the time it was written: its session's date plus what had elapsed."""
    sessions = directory.read_sessions()
    dates = [datetime.datetime.fromisoformat(session["date"]).timestamp() for session in sessions]
    for line in directory.read_metrics():
        # Of the sessions that began before the line's step the last one wrote it.
        earlier = [
            date
            for date, session in zip(dates, sessions, strict=True)
            if session["step"] < max(line["step"], 1)
        ]
        yield line, (earlier[-1] if earlier else time.time()) + line.get("time/elapsed", 0.0)
