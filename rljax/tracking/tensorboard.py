"""Event files for TensorBoard, without TensorFlow.

They mirror metrics.jsonl: every session rewrites all lines when it opens the file, so a step that a resumed
run repeats occurs once, even after a kill.
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

    The writer of tensorboardX passes events to a thread. A full disk ends that thread, and the run then
    blocks. This writer writes synchronously and raises.
    """

    def __init__(self, directory: RunDirectory) -> None:
        folder = directory.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventsWriter(str(folder / "events"))
        # This event makes a running TensorBoard drop the events that it has read before.
        self._writer.write_event(
            Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START))
        )
        for line, wall_time in _with_wall_times(directory):
            self._write(line, wall_time)
        self._writer.flush()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Adds a line of metrics and flushes it."""
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
    """Yields the lines so far with the approximate time of writing: date of the session plus elapsed time."""
    sessions = directory.read_sessions()
    dates = [datetime.datetime.fromisoformat(session["date"]).timestamp() for session in sessions]
    for line in directory.read_metrics():
        # The last session that began before the line's step wrote it.
        earlier = [
            date
            for date, session in zip(dates, sessions, strict=True)
            if session["step"] < max(line["step"], 1)
        ]
        yield line, (earlier[-1] if earlier else time.time()) + line.get("time/elapsed", 0.0)
