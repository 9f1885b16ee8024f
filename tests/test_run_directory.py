"""The run directory: what is written survives a kill, and a run never mixes with another."""

import json
import math

import numpy as np
import pytest

from rljax.config import ExperimentConfig, load_config
from rljax.errors import UserError
from rljax.run_directory import RunDirectory


def make_config(**sections) -> ExperimentConfig:
    shape = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    shape |= {"head_dim": 4, "mlp_size": 8}
    base = {"run_dir": "runs/x", "policy": {"shape": shape}, "task": {"name": "t", "args": {"a": 1}}}
    return ExperimentConfig.model_validate({**base, **sections})


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "runs" / "one")


def test_config_is_written_resolved_and_every_session_is_noted(run):
    config = make_config(seed=3)
    run.write_config(config)
    assert load_config(run.config_path) == config
    run.write_config(config)  # starting again is fine
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    for step in (0, 7):
        run.record_session(step)
    assert [session["step"] for session in run.read_sessions()] == [0, 7]
    assert all({"date", "command", "commit", "machine"} <= each.keys() for each in run.read_sessions())


def test_metrics_round_trip(run):
    assert run.read_metrics() == []
    metrics = {"step": 0, "reward/mean": 0.5, "rollout/tokens": 12, "note": "ü\n", "flag": True, "none": None}
    run.append_metrics(metrics)
    run.append_metrics({"step": np.int32(1), "loss/policy": np.float32(0.25), "entropy": np.array(2.0)})
    assert run.read_metrics() == [metrics, {"step": 1, "loss/policy": 0.25, "entropy": 2.0}]
    assert len(run.metrics_path.read_bytes().splitlines()) == 2


def test_nonfinite_metrics_are_strict_json_and_come_back(run):
    run.append_metrics({"step": 1, "a": math.nan, "b": np.float32(np.inf), "c": -math.inf, "d": 1.0})
    refuse = lambda constant: pytest.fail(f"{constant} is not JSON")  # noqa: E731
    line = json.loads(run.metrics_path.read_text(), parse_constant=refuse)
    nothing = {"a": None, "b": None, "c": None}
    assert line == {"step": 1, "d": 1.0} | nothing | {"nonfinite": {"a": "nan", "b": "inf", "c": "-inf"}}
    (metrics,) = run.read_metrics()
    assert math.isnan(metrics.pop("a"))
    assert metrics == {"step": 1, "b": math.inf, "c": -math.inf, "d": 1.0}


def test_what_is_no_metric_is_refused_and_leaves_no_trace(run):
    for wrong in ({"step": 1, "a": [1]}, {"a": 1.0}, {"step": 1.0}, {"step": True}):
        with pytest.raises(TypeError):
            run.append_metrics(wrong)
    assert run.read_metrics() == []


DECISIONS = [{"drafter": "srt", "tokens": 12, "seconds": 0.5}, {"drafter": "plain", "tokens": 1}]


def test_decisions_round_trip_in_a_file_of_their_own(run):
    assert run.read_decisions() == []
    run.append_decisions(1, DECISIONS)
    run.append_decisions(2, [])  # no line
    assert run.read_decisions() == [(1, DECISIONS)] and run.read_metrics() == []
    with pytest.raises(ValueError, match="JSON compliant"):
        run.append_decisions(3, [{"seconds": math.nan}])
    assert len(run.decisions_path.read_bytes().splitlines()) == 1


def test_a_resumed_run_drops_the_lines_after_its_step(run):
    """To the byte, in every file that has a line a step; what is counted is metrics alone."""
    assert run.truncate_after(3) == 0 and not run.metrics_path.exists()
    for step in range(5):
        run.append_metrics({"step": step, "x": math.nan})
        run.append_decisions(step, DECISIONS)
    paths = run.metrics_path, run.decisions_path
    kept = [b"".join(path.read_bytes().splitlines(keepends=True)[:3]) for path in paths]
    with open(run.decisions_path, "ab") as file:
        file.write(b'{"step": 4, "dec')
    assert run.truncate_after(2) == 2
    assert [path.read_bytes() for path in paths] == kept
    assert run.truncate_after(2) == 0
    run.append_metrics({"step": 3})
    run.append_decisions(3, DECISIONS)
    assert [metrics["step"] for metrics in run.read_metrics()] == [0, 1, 2, 3]
    assert [step for step, _ in run.read_decisions()] == [0, 1, 2, 3]
    assert run.truncate_after(-1) == 4
    assert run.read_metrics() == run.read_decisions() == []


@pytest.mark.parametrize("half", [b'{"st', b'{"step": 2}', b"\x00\x00"])
def test_a_half_written_line_disappears(run, half):
    run.append_metrics({"step": 0})
    run.append_metrics({"step": 1})
    whole = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(whole + half)
    assert [metrics["step"] for metrics in run.read_metrics()] == [0, 1]
    assert run.truncate_after(5) == 0
    assert run.metrics_path.read_bytes() == whole

    run.metrics_path.write_bytes(whole + half)
    run.append_metrics({"step": 2, "x": 1})
    assert run.read_metrics() == [{"step": 0}, {"step": 1}, {"step": 2, "x": 1}]
    run.metrics_path.write_bytes(half)
    run.append_metrics({"step": 0})
    assert run.read_metrics() == [{"step": 0}]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"x": 1}', '{"step": "1"}', "3"])
def test_a_corrupt_line_is_named(run, line):
    for path, read in ((run.metrics_path, run.read_metrics), (run.decisions_path, run.read_decisions)):
        path.write_text('{"step": 0, "decisions": []}\n' + line + '\n{"step": 2}\n')
        with pytest.raises(UserError, match=f"{path.name}:2: not a {path.stem} line"):
            read()


def test_writing_is_atomic(run, monkeypatch):
    """A crash before the renaming leaves the old file whole."""
    for step in range(3):
        run.append_metrics({"step": step})
    before = run.metrics_path.read_bytes()

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        run.truncate_after(0)
    assert run.metrics_path.read_bytes() == before
