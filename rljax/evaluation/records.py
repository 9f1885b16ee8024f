"""The files of an evaluation. An evaluation that was stopped continues where it was.

    evaluation.json     the settings; an evaluation with other settings is refused in the same directory
    responses.jsonl     one line per response, appended as it finishes; finally sorted by problem and sample
    judgements.jsonl    one line per response: its rewards and answer; written likewise
    results.json        the metrics
    .lock               held by the process that evaluates

A response is a pure function of the policy, the problem and the number of the sample. So a recorded response
equals the one that sampling again would give.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rljax.durable_files import locked, write_durably, writing
from rljax.errors import ConfigError, UserError

ResponseKey = tuple[int, int]
"""(index of the problem in its split, number of the sample)."""


def default_output(path: Path, step: int | None, split: str) -> Path:
    """Returns the directory of a policy's evaluation: inside the run; for a Hugging Face directory, in the
    folder `evaluations` of the working directory.

    Args:
      path: directory of the policy.
      step: step of a run's checkpoint; None for other policies.
    """
    suffix = "" if split == "heldout" else f"-{split}"
    if step is None:
        return Path("evaluations") / f"{path.resolve().name}{suffix}"
    return path / "evaluation" / f"step-{step}{suffix}"


class JsonLog:
    """Lines of JSON by (problem, sample). It is a context manager in which lines are appended.

    Args:
      path: path of the file. An incomplete last line, left by a killed process, is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[ResponseKey, dict[str, Any]] = {}
        self._file = None
        if path.exists():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            self.lines = dict(self._parsed(whole))
            if whole != content:
                with _writing(path):
                    write_durably(path, whole)

    def _parsed(self, content: bytes) -> Iterator[tuple[ResponseKey, dict[str, Any]]]:
        for number, raw in enumerate(content.splitlines(), start=1):
            try:
                line = json.loads(raw)
                yield (line["problem"], line["sample"]), line
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path}:{number}: not a line of an evaluation (a JSON object with problem and"
                    " sample); delete the line to go on"
                ) from error

    def __enter__(self) -> "JsonLog":
        with _writing(self.path):
            self._file = open(self.path, "ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError) if error is not None else _writing(self.path), file:
            os.fsync(file.fileno())

    def append(self, key: ResponseKey, content: Mapping[str, Any]) -> None:
        """Adds a line, which survives if the process is killed afterwards."""
        line = {"problem": key[0], "sample": key[1], **content}
        with _writing(self.path):
            self._file.write(_encoded(line))
            self._file.flush()
        self.lines[key] = line

    def sort(self) -> None:
        """Rewrites the file in the order of problems and samples, so that its bytes depend on no timing."""
        with _writing(self.path):
            write_durably(self.path, b"".join(_encoded(self.lines[key]) for key in sorted(self.lines)))


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    return writing(path, UserError, "started again, it continues where it was")


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


class EvaluationDirectory:
    """The files of one evaluation, locked for this process until the context manager exits.

    Args:
      path: the directory; created if it is missing.
      identity: settings that responses depend on, besides problem and sample, as JSON values.

    Raises:
      ConfigError: the directory holds the responses of another evaluation, or another process uses it.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.results_path = self.path / "results.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output: cannot create {self.path}: {error.strerror}") from error
        with contextlib.ExitStack() as stack:
            with _writing(self.path / ".lock"):
                free = stack.enter_context(locked(self.path / ".lock"))
            if not free:
                raise ConfigError(
                    f"--output: another process evaluates in {self.path}; let it end, or choose another"
                )
            self._claim(json.loads(json.dumps(identity)))
            self.responses = JsonLog(self.path / "responses.jsonl")
            self.judgements = JsonLog(self.path / "judgements.jsonl")
            self._lock = stack.pop_all()

    def __enter__(self) -> "EvaluationDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def write_results(self, results: Mapping[str, Any]) -> None:
        with _writing(self.results_path):
            write_durably(self.results_path, json.dumps(results, indent=1, allow_nan=False).encode() + b"\n")

    def _claim(self, identity: dict[str, Any]) -> None:
        file = self.path / "evaluation.json"
        if not file.exists():
            with _writing(file):
                write_durably(file, json.dumps(identity, indent=1).encode() + b"\n")
            return
        try:
            recorded = json.loads(file.read_bytes())
            differing = [name for name in identity | recorded if recorded.get(name) != identity.get(name)]
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: damaged; delete {self.path} to evaluate again") from error
        if differing:
            name = differing[0]
            if name == "policy":
                raise ConfigError(f"{self.path} evaluates other weights; give another --output, or delete it")
            raise ConfigError(
                f"{name}: is {identity.get(name)!r}, but the evaluation in {self.path} has"
                f" {recorded.get(name)!r}; give another --output, or delete that one"
            )
