"""All trackers of a run. They cannot stop it: after its first error, a tracker is dropped with a warning."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from rljax.config import ExperimentConfig
from rljax.errors import Interrupted
from rljax.run_directory import RunDirectory
from rljax.tracking import mlflow, weights_and_biases
from rljax.tracking.mlflow import MLflow
from rljax.tracking.weights_and_biases import WeightsAndBiases


class Tracker(Protocol):
    """A display of metrics."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Takes a line of metrics.jsonl."""
        ...

    def close(self, failed: bool) -> None:
        """Ends the session; `failed` if an error ended the run."""
        ...


class Trackers:
    """Context manager that passes metrics to all trackers.

    Args:
      say: called with a line for the user.

    Raises:
      ConfigError: a package that `tracking.mode` or `tracking.mlflow` needs is not installed.
    """

    def __init__(self, config: ExperimentConfig, directory: RunDirectory, say: Callable[[str], None]) -> None:
        if config.tracking.mode != "disabled":
            weights_and_biases.check_installed()
        if config.tracking.mlflow is not None:
            mlflow.check_installed()
        self._config, self._directory, self._say = config, directory, say
        self._trackers: dict[str, Tracker] = {}

    def begin(self) -> None:
        """Opens the trackers. Call it once metrics.jsonl ends where the run continues. Only the process that
        writes the run's files has any.
        """
        config, directory = self._config, self._directory
        if not directory.writes:
            return
        self._guarded("TensorBoard", lambda: self._open("TensorBoard", _tensorboard(directory)))
        if config.tracking.mode != "disabled":
            name = "Weights & Biases"
            self._guarded(name, lambda: self._open(name, WeightsAndBiases(config, directory)))
        if config.tracking.mlflow is not None:
            self._guarded("MLflow", lambda: self._open("MLflow", MLflow(config, directory)))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Passes on a line that was just written to metrics.jsonl."""
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


def _tensorboard(directory: RunDirectory) -> Tracker:
    """tensorboardX imports PyTorch where that is installed, which takes seconds: not before it is needed."""
    from rljax.tracking.tensorboard import TensorBoard

    return TensorBoard(directory)
