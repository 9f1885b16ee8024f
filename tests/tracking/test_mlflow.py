"""MLflow in a file: a run directory is one run there, and no step is there twice."""

import json
import math
from importlib.util import find_spec

import pytest

from tests.tracking.test_trackers import session

# Importing it takes a second.
pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="the mlflow extra is not installed")


def test_sessions_of_a_run_directory_are_one_run_without_doubled_steps(tmp_path):
    from mlflow.tracking import MlflowClient

    path, service = tmp_path / "run", {"mlflow": f"sqlite:///{tmp_path}/mlflow.db"}
    first = {"step": 0, "reward/mean": 0.5, "note": "n"}
    said = session(path, service, first, {"step": 1, "reward/mean": math.nan})
    said += session(path, service, {"step": 1, "reward/mean": 2.0}, {"step": 2, "reward/mean": 3.0})
    assert said == []
    client = MlflowClient(service["mlflow"])
    experiment = client.get_experiment_by_name("chains")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first try" and run.info.status == "FINISHED"
    assert run.info.run_id == json.loads((path / "mlflow.json").read_text())["id"]
    assert run.data.params["tracking.project"] == "chains"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((each.step, each.value) for each in history) == [(0, 0.5), (2, 3.0)]  # NaN is on no axis


def test_a_server_that_does_not_answer_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    lines = [{"step": step, "x": 1.0} for step in range(2)]
    said = session(tmp_path / "run", {"mlflow": "http://127.0.0.1:9"}, *lines)
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("warning: MLflow failed, the run goes on without it: ")
