"""scripts/report_runs.py: figures and a plot from what runs leave."""

import json
import sys
from pathlib import Path

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def report_runs():
    return load_script("report_runs")


def write_run(directory: Path, steps: int, first: float = 0.25, commits=("abc",)) -> Path:
    directory.mkdir()
    lines = [{"step": 0, "evaluation/reward": first}]
    for step in range(1, steps + 1):
        lines.append(
            {
                "step": step,
                "reward/mean": 0.1 * step,
                "response_length/mean": 40.0,
                "response_length/p75": 50.0,
                "response_length/max": 100 + 50 * step,
                "rollout/tokens_per_second": 1000.0,
                "time/step": 2.0,
                "time/rollout": 1.5,
                "time/update": 0.5,
                "time/elapsed": 60.0 * step,
                "update/padding": 0.05,
                "mismatch/logprob_abs_max": 0.0,
            }
        )
    lines[-1]["evaluation/reward"] = 0.5
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sessions = [{"step": 0, "commit": commit} for commit in commits]
    (directory / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sessions))
    return directory


def test_figures_and_plot(report_runs, tmp_path, capsys):
    runs = [write_run(tmp_path / "one", 2), write_run(tmp_path / "two", 9, 0.0, ("old", "new"))]
    out, picture = tmp_path / "new" / "runs.json", tmp_path / "plots" / "runs.png"
    assert report_runs.main([*map(str, runs), "--json", str(out), "--plot", str(picture)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    reward = rows["one/held-out reward"]
    assert (reward["baseline_value"], reward["value"], reward["ratio"]) == (0.25, 0.5, 2.0)
    assert rows["two/held-out reward"]["gain"] == 0.5
    tail = rows["one/longest response"]
    assert (tail["value"], tail["baseline_value"], tail["ratio"]) == (175.0, 50.0, 3.5)
    assert tail["rollout_seconds"] == 1.5
    assert (tail["minutes"], tail["commits"]) == (2.0, ["abc"])
    resumed = rows["two/longest response"]
    assert (resumed["minutes"], resumed["commits"]) == (
        None,
        ["new", "old"],
    )  # one process's time is not the run's
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "one/held-out reward" in capsys.readouterr().out


def test_no_run_there_is_one_line(report_runs, tmp_path, capsys):
    assert report_runs.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no run there (metrics.jsonl is missing)\n"
    assert not (tmp_path / "none").exists()


def test_a_run_without_a_step_is_one_line(report_runs, tmp_path, capsys):
    write_run(tmp_path / "new", 0)
    assert report_runs.main([str(tmp_path / "new")]) == 2
    assert "has not finished a step yet" in capsys.readouterr().err


def test_a_missing_library_names_the_extra(report_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = write_run(tmp_path / "run", 1)
    assert report_runs.main([str(run), "--plot", str(tmp_path / "a.png")]) == 2
    assert "plot extra" in capsys.readouterr().err
