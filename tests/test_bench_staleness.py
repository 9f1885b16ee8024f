"""scripts/bench_staleness.py: its command line, its rows and its picture; nothing is trained here."""

import json
from pathlib import Path

import pytest

from rljax.config import load_config
from rljax.reports.decisions import RunDecisions
from rljax.reports.runs import RunData
from tests.scripts import SCRIPTS, load_script

bench_staleness = load_script("bench_staleness")
PATH = Path("nowhere")
CONFIG = str(SCRIPTS.parent / "configs/bench_algorithms.yaml")


def run_of(seed, seconds=2.0):
    steps = [
        {"step": i + 1, "reward/mean": 0.1 * i + seed, "entropy": 1.0, "rollout/lag_mean": 1.0}
        | {"rollout/lag_max": 1, "policy/clip_fraction_low": 0.01, "policy/clip_fraction_high": 0.02}
        | {"policy/rollout_kl": 0.001, "mismatch/logprob_abs_max": 0.0, "cluster/idle_share": 0.25}
        | {"time/step": seconds, "time/rollout": 1.0, "time/update": 0.5}
        for i in range(6)
    ]
    heldout = [{"step": 0, "evaluation/reward": 0.25 + seed}, {"step": 6, "evaluation/reward": 0.5 + seed}]
    return RunData(PATH, "run", steps, heldout, [{"commit": "abc"}], [], RunDecisions(PATH, {}), "")


def test_rows_say_what_was_learned_and_how_long_steps_took():
    row = bench_staleness.curve_row("1", [run_of(0), run_of(1)])
    assert (row.name, row.value, row.baseline_value) == ("staleness/1", 1.0, 0.75)
    details = row.as_json()
    assert (details["before"], details["after"]) == ([0.25, 1.25], [0.5, 1.5])
    assert (details["lag_mean"], details["lag_max"]) == ([1.0, 1.0], 1.0)
    row = bench_staleness.time_row(run_of(0, 3.0), run_of(0, 2.0))
    assert (row.value, row.baseline_value, row.ratio) == (2.0, 3.0, 1.5)


def test_what_was_written_is_drawn(tmp_path, capsys):
    results, picture = tmp_path / "results.json", tmp_path / "picture.png"
    arguments = ["--config", CONFIG, "--output", str(results), "--plot", str(picture)]
    assert bench_staleness.main(arguments) == 2
    assert f"error: {results}: holds no results" in capsys.readouterr().err
    row = bench_staleness.curve_row("1", [run_of(0), run_of(1)]).as_json()
    results.write_text(json.dumps({"rows": [row] * 3}))
    assert bench_staleness.main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", bench_staleness.MODES)
def test_every_mode_is_a_config(name):
    load_config(CONFIG, bench_staleness.MODES[name])
