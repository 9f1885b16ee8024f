"""The directory that holds everything a run leaves behind, safe against being killed at any moment.

    config.yaml      the resolved config, rewritten atomically
    metrics.jsonl    one JSON object a line, a line a step, on disk before the next step begins
    decisions.jsonl  a line a step, with drafts: what the rollout manager decided, why, and what came of it
    rollouts.jsonl   a line a step: lengths, requests over time, samples (`rljax.rollout.summary`)
    schedule.jsonl   a line a step, with rollout.max_staleness: its groups, and which weights sampled what
    workers.jsonl    a line a step, with rollout workers: what each did when (`rljax.cluster.timeline`)
    sessions.jsonl   a line a process that worked on the run: when, with which command, commit, machine and
                     changes to the config
    tokenizer/       of a policy that is made on the spot (`rljax.assembly.policy`)
    warm_start/      a warm start that is in progress (`rljax.training.warm_start`)
    checkpoints/     written by `rljax.assembly.checkpoint`
    .lock            held by the process that works on the run

Of several processes only the first writes, and the methods that write do nothing in the others.

JSON has no NaN and no infinities. In a metrics line such a value is null, and the line's extra key
`nonfinite` says which keys were what, as in `{"step": 3, "entropy": null, "nonfinite": {"entropy": "nan"}}`:
every JSON reader can read the file, and `RunDirectory.read_metrics` gives the floats back.
"""

import contextlib
import datetime
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.config import ExperimentConfig, load_config, to_yaml
from rljax.config.changes import Change, config_changes
from rljax.durable_files import locked, write_durably, writing
from rljax.errors import CheckpointError, ConfigError, RunDirectoryError
from rljax.hub import local_directory
from rljax.provenance import command_line, git_commit, machine_facts

# Files that get a line of JSON with a `step` at a time, and that resuming cuts back to its checkpoint's.
_BY_STEP = ("metrics.jsonl", "decisions.jsonl", "rollouts.jsonl", "schedule.jsonl", "workers.jsonl")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_NONFINITE = "nonfinite"

Metrics = dict[str, Any]


class RunDirectory:
    """One run's files.

    Args:
      writes: whether this process writes them; false in all but the first of several processes.

    Attributes:
      writes: see above.
      path: the directory; created when missing.
      config_path: the resolved config.
      metrics_path: one JSON object a line.
      decisions_path: log of the manager's decisions, likewise.
      rollouts_path: summaries of rollouts for the report, likewise.
      workers_path: what workers did, likewise.
      sessions_path: the processes that worked on the run.
      checkpoints_path: for the checkpointer to fill; not created here.
    """

    def __init__(self, path: str | os.PathLike[str], writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.decisions_path = self.path / "decisions.jsonl"
        self.rollouts_path = self.path / "rollouts.jsonl"
        self.workers_path = self.path / "workers.jsonl"
        self.sessions_path = self.path / "sessions.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.warm_start_path = self.path / "warm_start"
        self._changes: list[Change] = []
        self._metrics_left: list[Metrics] = []
        if not writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir: cannot create {self.path}: {error.strerror}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from working on the run; the lock goes with the process, however it ends.

        Raises:
          ConfigError: another process has it.
        """
        with contextlib.ExitStack() as stack:
            if not self.writes:
                yield
                return
            with _writing(self.path / ".lock"):
                free = stack.enter_context(locked(self.path / ".lock"))
            if not free:
                raise ConfigError(
                    f"run_dir: another process works on the run in {self.path}; let it end, or choose another"
                )
            yield

    def begin(self, config: ExperimentConfig, allow_changes: bool = False) -> list[Change]:
        """A process is about to work on the run. A new one gets its config now; that of one that goes on is
        only compared: `write_config` replaces it once there is something to go on from.

        A start that failed before its first line of metrics, at a path that was mistyped for example, does
        not bind the next one: where the config is another, the old one goes, with the tokenizer.

        Args, Returns, Raises: as `write_config`.
        """
        if not self.writes:
            return []
        if not self._has_progress() and any(not each.harmless for each in self._compare(config)):
            with _writing(self.config_path):
                for name in _TOKENIZER:
                    (self.path / "tokenizer" / name).unlink(missing_ok=True)
                self.config_path.unlink()
        if not self.config_path.exists():
            return self.write_config(config)
        self._changes = self._compare(config, allow_changes)
        return self._changes

    def recorded_config(self) -> ExperimentConfig | None:
        """Returns the config of the run that goes on here; None if none does, or if its config is unreadable,
        which `begin` says.
        """
        if not self._has_progress() or not self.config_path.exists():
            return None
        try:
            return load_config(self.config_path)
        except ConfigError:
            return None

    def write_config(self, config: ExperimentConfig, allow_changes: bool = False) -> list[Change]:
        """Writes the resolved config, and returns what differs from the one that was there.

        Args:
          config: config of the run that begins or resumes.
          allow_changes: whether it may be another experiment than the one that the directory holds.

        Raises:
          ConfigError: it is another one, and may not be.
        """
        if not self.writes:
            return []
        self._changes = self._compare(config, allow_changes)
        with _writing(self.config_path):
            write_durably(self.config_path, to_yaml(config).encode())
        return self._changes

    def _has_progress(self) -> bool:
        """Whether there is anything that another start could lose."""
        started = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        return started or self.checkpoints_path.exists() or self.warm_start_path.exists()

    def _compare(self, config: ExperimentConfig, allow_changes: bool = True) -> list[Change]:
        if not self.config_path.exists():
            return []
        try:
            held = load_config(self.config_path)
        except ConfigError as error:
            raise ConfigError(
                f"run_dir: {self.path} holds a run with an unreadable config ({error}); choose another"
            ) from error
        changes = config_changes(held, config)
        others = [change for change in changes if not change.harmless]
        if others and not allow_changes:
            first = others[0]
            more = ", ".join(map(str, others[1:]))
            raise ConfigError(
                f"{first.name}: is {first.new!r}, but the run in {self.path} has {first.old!r}"
                + (f" (and {more})" if more else "")
                + "; choose another run_dir, set it back to resume that run, or go on with --allow-changes"
            )
        return changes

    def record_session(self, step: int, numerics: str | None = None) -> None:
        """Notes who works on the run from `step` on: date, command, commit, machine, the fingerprint of its
        numerics (`rljax/engine/invariance.py`), and what `begin` or `write_config` found changed. It comes
        before the changed config is written: killed in between, the next start finds the changes again.
        """
        if not self.writes:
            return
        session = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": step,
            "command": command_line(),
            "commit": git_commit(),
            "machine": machine_facts(),
        }
        if numerics is not None:
            session["numerics"] = numerics
        if self._changes:
            session["changed"] = {change.name: [change.old, change.new] for change in self._changes}
        lines = [*self.read_sessions(), session]
        with _writing(self.sessions_path):
            write_durably(self.sessions_path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def read_sessions(self) -> list[dict[str, Any]]:
        """Returns the records of `record_session`, oldest first."""
        if not self.sessions_path.exists():
            return []
        sessions = []
        for number, line in enumerate(self.sessions_path.read_bytes().splitlines(), start=1):
            try:
                sessions.append(json.loads(line))
            except ValueError as error:
                raise RunDirectoryError(
                    f"{self.sessions_path}:{number}: not a line of JSON; delete the line to go on"
                ) from error
        return sessions

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Adds a line and waits until it is on disk.

        Args:
          metrics: flat; numbers (0-d arrays too), text, booleans or None. `step`, an int, is required.

        Raises:
          RunDirectoryError: the disk does not take it. The line is kept, and written before the next one or
            by `write_metrics_left`.
        """
        if self.writes:
            self._metrics_left.append(_jsonable(metrics))
            self.write_metrics_left()

    def write_metrics_left(self) -> None:
        """Writes the lines that `append_metrics` could not write; raises as it does."""
        while self._metrics_left:
            _append_line(self.metrics_path, self._metrics_left[0])
            del self._metrics_left[0]

    def extend_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Adds to the newest line, which must be of the same step, as `append_metrics` does to the file."""
        if not self.writes:
            return
        *before, (_, line) = _complete_lines(self.metrics_path)
        if line["step"] != metrics["step"]:
            raise ValueError(f"the newest line is of step {line['step']}, not {metrics['step']}")
        raw = json.dumps(_jsonable({**line, **metrics}), allow_nan=False).encode() + b"\n"
        with _writing(self.metrics_path):
            write_durably(self.metrics_path, b"".join(old for old, _ in before) + raw)

    def read_metrics(self) -> list[Metrics]:
        """All complete lines, oldest first; a half-written last line is left out."""
        return [metrics for _, metrics in _complete_lines(self.metrics_path)]

    def append_decisions(self, step: int, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Adds the rollout manager's decisions of a step, if any (`rljax/speculation/pass_record.py`)."""
        if self.writes and decisions:
            _append_line(self.decisions_path, {"step": step, "decisions": decisions})

    def read_decisions(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """The decisions of every step that has some, oldest first."""
        return [(line["step"], line["decisions"]) for _, line in _complete_lines(self.decisions_path)]

    def append_rollout(self, step: int, summary: Mapping[str, Any]) -> None:
        """Adds what a step's rollout leaves for the report (`rljax/rollout/summary.py`)."""
        if self.writes:
            _append_line(self.rollouts_path, {"step": step, **summary})

    def read_rollouts(self) -> list[dict[str, Any]]:
        """Returns the records of `append_rollout`, oldest first."""
        return [line for _, line in _complete_lines(self.rollouts_path)]

    def append_schedule(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Adds the groups of a step's batch (`rljax/training/arrival.py`)."""
        if self.writes:
            _append_line(self.path / "schedule.jsonl", {"step": step, "groups": groups})

    def append_workers(self, step: int, record: Mapping[str, Any]) -> None:
        """Adds what the rollout workers did in a step (`rljax/cluster/timeline.py`)."""
        if self.writes:
            _append_line(self.workers_path, {"step": step, **record})

    def read_workers(self) -> list[dict[str, Any]]:
        """Returns the records of `append_workers`, oldest first."""
        return [line for _, line in _complete_lines(self.workers_path)]

    def truncate_after(self, step: int) -> int:
        """Drops, atomically, the lines after `step` and a half-written last line, of all files that have a
        line a step.

        Args:
          step: step of the checkpoint that the run resumes from; -1 empties the files for a run that starts
            over.

        Returns:
          How many complete lines of metrics were dropped.
        """
        if not self.writes:
            return 0
        self._metrics_left = [line for line in self._metrics_left if line["step"] <= step]
        dropped = {name: _truncate_lines(self.path / name, step) for name in _BY_STEP}
        return dropped[self.metrics_path.name]


def _append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Adds a line of JSON and waits until it is on disk."""
    raw = json.dumps(line, allow_nan=False).encode() + b"\n"
    with _writing(path), open(path, "ab+") as file:
        size = file.tell()
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # the half-written line of a killed run must not swallow this one
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _truncate_lines(path: Path, step: int) -> int:
    """Drops, atomically, what is after `step` or half-written; how many complete lines that were."""
    if not path.exists():
        return 0
    lines = list(_complete_lines(path))
    kept = [raw for raw, line in lines if line["step"] <= step]
    with _writing(path):
        write_durably(path, b"".join(kept))
    return len(lines) - len(kept)


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    return writing(path, RunDirectoryError, "started again, the run goes on from its newest checkpoint")


def _complete_lines(path: Path) -> Iterator[tuple[bytes, Metrics]]:
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = json.loads(raw)
                for name, value in line.pop(_NONFINITE, {}).items():
                    line[name] = float(value)
                if not isinstance(line["step"], int):
                    raise TypeError
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunDirectoryError(
                    f"{path}:{number}: not a {path.stem} line (a JSON object with a step);"
                    " delete the line to go on"
                ) from error
            yield raw, line


def _jsonable(metrics: Mapping[str, Any]) -> Metrics:
    """Plain Python scalars, with NaN and infinities moved to the `nonfinite` entry."""
    line: Metrics = {}
    nonfinite: dict[str, str] = {}
    for name, value in metrics.items():
        if hasattr(value, "item"):  # NumPy scalars and 0-d arrays, JAX's included
            value = value.item()
        if not isinstance(value, str | bool | int | float | None):
            raise TypeError(f"metric {name}: {type(value).__name__} is not a number, text, boolean or None")
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
            value = None
        line[name] = value
    if type(line.get("step")) is not int:
        raise TypeError(f"metrics need an int step, got {line.get('step')!r}")
    if nonfinite:
        line[_NONFINITE] = nonfinite
    return line


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a run's, which contains its config."""
    return (Path(path) / "config.yaml").is_file()


def check_holds_policy(path: str | os.PathLike[str]) -> None:
    """Raises a CheckpointError unless a path is a run directory or a Hugging Face directory, or names a model
    of the hub. Commands call it before they import JAX.
    """
    path = local_directory(path, weights=False)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give a run directory or a Hugging Face model directory")
    if is_run(path) or (path / "config.json").is_file():
        return
    # Checkpoints of a run are often given in its place.
    parent = next((parent for parent in path.resolve().parents[:2] if is_run(parent)), None)
    raise CheckpointError(
        f"{path} is neither a run (no config.yaml) nor a Hugging Face model directory (no config.json)"
        + (f"; the run is {parent}, and --step chooses a checkpoint" if parent is not None else "")
    )
