"""All trackers of a run. None of them can stop it: the first error of one is a warning, and its last word."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from rljax.config import ExperimentConfig
from rljax.errors import Interrupted
from rljax.run_directory import RunDirectory
from rljax.tracking.tensorboard import TensorBoard
from rljax.tracking.weights_and_biases import WeightsAndBiases, check_installed


class Tracker(Protocol):
    """Something that shows metrics."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        ...

    def close(self, failed: bool) -> None:
        """The process is done with the run; `failed` if an error ended it."""
        ...


class Trackers:
    """Context manager that passes metrics on.

    Args:
      config: config of the run.
      directory: files of the run.
      say: called with a line for the user.

    Raises:
      ConfigError: what `tracking.mode` needs is not installed.
    """

    def __init__(self, config: ExperimentConfig, directory: RunDirectory, say: Callable[[str], None]) -> None:
        if config.tracking.mode != "disabled":
            check_installed()
        self._config, self._directory, self._say = config, directory, say
        self._trackers: dict[str, Tracker] = {}

    def begin(self) -> None:
        """Opens them, once metrics.jsonl holds what the run goes on from."""
        config, directory = self._config, self._directory
        self._guarded("TensorBoard", lambda: self._open("TensorBoard", TensorBoard(directory)))
        if config.tracking.mode != "disabled":
            name = "Weights & Biases"
            self._guarded(name, lambda: self._open(name, WeightsAndBiases(config, directory)))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl that was just written."""
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda tracker=tracker: tracker.write(metrics))

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = kind is not None and not issubclass(kind, Interrupted)
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda tracker=tracker: tracker.close(failed))

    def _open(self, name: str, tracker: Tracker) -> None:
        self._trackers[name] = tracker

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._trackers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._say(f"warning: {name} failed, the run goes on without it: {reason}")
