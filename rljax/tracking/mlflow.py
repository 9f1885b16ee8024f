"""MLflow (the `mlflow` extra): a run directory is one run there, over all its sessions."""

import importlib.util
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from rljax.config import ExperimentConfig
from rljax.config.changes import flattened
from rljax.errors import ConfigError
from rljax.run_directory import RunDirectory
from rljax.tracking.sent_steps import SentSteps

_SECONDS, _RETRIES = "10", "2"  # of a request to a server; the run waits for it
_LONGEST_PARAMETER = 6000  # characters that MLflow takes


def check_installed() -> None:
    """Raises a ConfigError if the extra is missing."""
    if importlib.util.find_spec("mlflow") is None:
        raise ConfigError(
            "tracking.mlflow: needs mlflow; install the mlflow extra (pip install 'rljax[mlflow]'), or set it"
            " to null"
        )


class MLflow:
    """One run of MLflow. `mlflow.json` in the run directory keeps its id and its newest step."""

    def __init__(self, config: ExperimentConfig, directory: RunDirectory) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _SECONDS)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs its tables as it makes them
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._client = MlflowClient(config.tracking.mlflow)
        self._sent = SentSteps(directory.path / "mlflow.json", lambda: self._create(config, directory))
        self._client.update_run(self._sent.id, status="RUNNING")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Sends the numbers of a line of metrics, unless its step was sent before."""
        from mlflow.entities import Metric

        step = metrics["step"]
        if not self._sent.is_new(step):
            return
        now = int(time.time() * 1000)
        numbers = {name: _number(value) for name, value in metrics.items() if name != "step"}
        self._client.log_batch(
            self._sent.id,
            metrics=[Metric(name, value, now, step) for name, value in numbers.items() if value is not None],
        )
        self._sent.sent(step)

    def close(self, failed: bool) -> None:
        """Ends the session."""
        self._client.set_terminated(self._sent.id, "FAILED" if failed else "FINISHED")

    def _create(self, config: ExperimentConfig, directory: RunDirectory) -> str:
        """Makes the run, with every key of the config as a parameter, and returns its id."""
        from mlflow.entities import Param

        tracking = config.tracking
        experiment = self._client.get_experiment_by_name(tracking.project)
        identity = (
            self._client.create_experiment(tracking.project)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(identity, run_name=tracking.name or directory.path.name)
        keys = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in flattened(config.model_dump())]
        for start in range(0, len(keys), 100):  # MLflow takes 100 at a time
            self._client.log_batch(run.info.run_id, params=keys[start : start + 100])
        return run.info.run_id


def _number(value: Any) -> float | None:
    """Returns a number of Python, NumPy or JAX as a float; None for text and for what no axis can show."""
    if isinstance(value, (str, type(None))):
        return None
    return float(value) if math.isfinite(float(value)) else None
