"""Real runs predicted by the simulator: by hand, and in the order of what was recorded.

`recorded_runs.json` has six steps of the quickstart with one, two and three workers, on two
cores that many other processes used as well: its seconds are chance, who waits longer is not.
"""

import json
from pathlib import Path

import pytest

from rljax.config import load_config, to_yaml
from rljax.simulation.calibration import measured, predicted, read_run, seconds_of
from rljax.simulation.command import main

RECORDED = json.loads(Path(__file__).with_name("recorded_runs.json").read_text())


def write_run(directory, lines, *overrides):
    directory.mkdir()
    config = load_config("configs/quickstart.yaml", overrides)
    (directory / "config.yaml").write_text(to_yaml(config))
    numbered = [{"step": step, **line} for step, line in enumerate(lines, 1)]
    (directory / "workers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in numbered))
    return directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Directories of the recorded runs, by number of workers."""
    root = tmp_path_factory.mktemp("recorded")
    return {
        int(workers): write_run(
            root / workers,
            [line | {"groups": groups} for line, groups in zip(lines, RECORDED["groups"], strict=True)],
            f"cluster.workers={workers}",
        )
        for workers, lines in RECORDED["workers"].items()
    }


def test_what_was_recorded_is_predicted_in_its_order(recorded):
    base = read_run(recorded[1])
    runs = {workers: read_run(path) for workers, path in recorded.items()}
    seconds = seconds_of(base)
    for figures in (
        {workers: measured(run) for workers, run in runs.items()},
        {workers: predicted(run, seconds, cores=2) for workers, run in runs.items()},
    ):
        # Two workers are faster than one, and three on two cores are slower than two.
        assert figures[2].rollout < figures[1].rollout
        assert figures[2].rollout < figures[3].rollout
        # The first prompts are expected to be the longest ones, and one worker gets them: of two workers one
        # is idle for most of the time, of three two are.
        idle = {workers: each.idle for workers, each in figures.items()}
        assert idle[3][0] > idle[2][0] > idle[1][0] + 0.1
        assert idle[3][1] > idle[3][2] + 0.1
        assert idle[2][0] > idle[2][1] + 0.1
    assert predicted(runs[3], seconds, float("inf")).rollout < figures[2].rollout  # with cores of their own


def step(seconds, waiting, decoding, passes, groups, cpu=0.0):
    """A line of workers.jsonl: the trainer waits first, and workers decode from one second on."""
    rows = {"trainer": {"spans": [[0.0, waiting, "waiting"], [waiting, seconds, "training"]]}}
    for number, (busy, mine) in enumerate(zip(decoding, passes, strict=True)):
        spans = [[0.0, 1.0, "loading"], [1.0, 1.0 + busy, "decoding"], [1.0 + busy, seconds, "idle"]]
        rows[f"worker-{number}"] = {"spans": spans, "cpu": cpu, "passes": mine}
    return {"seconds": seconds, "rows": rows, "groups": groups}


PASSES = [[1, 4, 4.0, 0], [4, 4, 8.0, 0], [4, 1, 3.0, 10]]
ONE = step(19.0, 16.0, [15.0], [PASSES], [[10, [5, 9]]], cpu=30.0)


def test_figures_by_hand(tmp_path):
    """Passes of one row take a second and of four rows two, a prefilled token a tenth of a second, weights
    one, updates three.
    """
    one = read_run(write_run(tmp_path / "one", [ONE, ONE], "cluster.workers=1"))
    seconds = seconds_of(one)
    assert seconds.passes == {1: 1.0, 4: 2.0}
    assert (seconds.prefill, seconds.update, seconds.weights, seconds.latency) == (0.1, 3.0, 1.0, 0.0)
    assert seconds.cores == 2.0
    # Each of two workers prefills a prompt, and decodes its two responses in one batch, until one is alone.
    line = step(15.0, 12.0, [11.0, 6.0], [[], []], [[10, [2, 8]], [10, [1, 3]]])
    two = read_run(write_run(tmp_path / "two", [line, line], "cluster.workers=2"))
    figures = predicted(two, seconds, float("inf"))
    first, second = 1 + 2 * 2 + 6, 1 + 2 + 2
    assert figures.rollout == pytest.approx(1 + first)
    assert figures.step == pytest.approx(1 + first + 3)
    assert figures.idle == pytest.approx((1 - second / 15, 1 - first / 15))
    assert measured(two).idle == pytest.approx((1 - 6 / 15, 1 - 11 / 15))
    shared = predicted(two, seconds, 2.0)  # each uses two cores: both at half the speed until one is done
    assert shared.rollout == pytest.approx(1 + first + second)


@pytest.mark.parametrize(
    ("overrides", "lines", "said"),
    [
        (["cluster.workers=0"], [ONE, ONE], "has cluster.workers: 0"),
        (["cluster.workers=2", "rollout.staleness=1"], [ONE, ONE], "has rollout.staleness"),
        (["cluster.workers=2"], [ONE], "has 1 steps, and the first is warm-up"),
        (["cluster.workers=2"], [{**ONE, "groups": None}] * 2, "has no records of workers"),
        (["cluster.workers=2"], [ONE, ONE], "--base: has 2 workers"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(tmp_path, overrides, lines, said, capsys):
    path = str(write_run(tmp_path / "run", lines, *overrides))
    assert main(["--calibrate", path, "--base", path]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_command_prints_and_writes_figures(recorded, tmp_path, capsys):
    assert main(["--calibrate", str(recorded[2])]) == 2
    assert "--base with the run with one worker" in capsys.readouterr().err
    runs = ["--calibrate", str(recorded[2]), str(recorded[3]), "--base", str(recorded[1]), "--cores", "2"]
    assert main([*runs, "--json", str(tmp_path / "out.json")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 5
    content = json.loads((tmp_path / "out.json").read_text())
    assert set(content["seconds"]["passes"]) == {"4", "16", "64"}
    assert content["runs"][str(recorded[3])][0]["name"] == "step seconds"
