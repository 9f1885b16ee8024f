"""scripts/report.py: figures, a plot and a page from what runs leave."""

import dataclasses
import json
from pathlib import Path

import pytest

from rljax.commands import report
from rljax.reports import page
from rljax.reports.decisions import accept_length, by_position
from rljax.reports.figures import COLORS, new_figure
from rljax.reports.learning import draw_rewards
from rljax.reports.runs import read_runs, series_of
from rljax.run_directory import RunDirectory
from rljax.speculation.pass_record import PLAIN, Decision


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the page of several runs is written where one is


def write_run(directory: Path, steps: int, first: float = 0.25, commits=("abc",)) -> Path:
    directory.mkdir()
    same = {"response_length/mean": 40.0, "response_length/p75": 50.0, "rollout/tokens_per_second": 1000.0}
    same |= {"time/step": 2.0, "time/rollout": 1.5, "time/update": 0.5, "update/padding": 0.05}
    same |= {"mismatch/logprob_abs_max": 0.0}
    lines = [{"step": 0, "evaluation/reward": first}]
    for step in range(1, steps + 1):
        lengths = {"response_length/max": 100 + 50 * step, "time/elapsed": 60.0 * step}
        lines.append({"step": step, "reward/mean": 0.1 * step, **lengths, **same})
    lines[-1]["evaluation/reward"] = 0.5
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sessions = [{"step": 0, "commit": commit} for commit in commits]
    (directory / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sessions))
    return directory


@pytest.fixture
def no_page(monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda *_: None)


def test_figures_and_plot(tmp_path, capsys):
    runs = [write_run(tmp_path / "one", 2), write_run(tmp_path / "two", 9, 0.0, ("old", "new"))]
    out, picture = tmp_path / "new" / "runs.json", tmp_path / "plots" / "runs.png"
    assert report.main([*map(str, runs), "--json", str(out), "--plot", str(picture)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    reward = rows["one/held-out reward"]
    assert (reward["baseline_value"], reward["value"], reward["ratio"]) == (0.25, 0.5, 2.0)
    assert rows["two/held-out reward"]["gain"] == 0.5
    tail = rows["one/longest response"]
    assert (tail["value"], tail["baseline_value"], tail["ratio"]) == (175.0, 50.0, 3.5)
    assert tail["rollout_seconds"] == 1.5
    assert (tail["minutes"], tail["commits"]) == (2.0, ["abc"])
    resumed = rows["two/longest response"]
    # One process's time is not the run's.
    assert (resumed["minutes"], resumed["commits"]) == (None, ["new", "old"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "one/held-out reward" in out and out.endswith("report: report.html\n")
    assert "<title>one, two</title>" in (tmp_path / "report.html").read_text()


def test_what_a_run_lacks_is_null_in_the_figures(tmp_path, no_page):
    run = write_run(tmp_path / "run", 3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    del lines[1]["update/padding"], lines[2]["update/padding"], lines[3]["update/padding"]
    lines[2] |= {"mismatch/logprob_abs_max": None, "nonfinite": {"mismatch/logprob_abs_max": "inf"}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.main([str(run), "--json", "runs.json"]) == 0
    _, row = json.loads(Path("runs.json").read_text())["rows"]
    assert (row["padding"], row["mismatch_logprob_abs_max"], row["step_seconds"]) == (None, None, 2.0)


def test_more_runs_than_colours_are_all_drawn(tmp_path):
    runs = read_runs([write_run(tmp_path / str(number), 1) for number in range(len(COLORS) + 1)])
    axes = new_figure(4, 3).subplots()
    draw_rewards(axes, series_of(runs))
    assert len(axes.get_legend_handles_labels()[1]) == len(runs)


def test_where_the_page_goes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "report_html", lambda runs: "<title>run</title>")  # which takes a second
    run = write_run(tmp_path / "run", 1)
    assert report.main([str(run)]) == 0
    assert (run / "report.html").exists()
    assert report.main([str(run), "--html", str(tmp_path / "new" / "page.html")]) == 0
    assert capsys.readouterr().out.endswith(f"report: {tmp_path / 'new' / 'page.html'}\n")
    (tmp_path / "file").write_text("")
    assert report.main([str(run), "--html", str(tmp_path / "file" / "page.html")]) == 2
    assert "the report cannot be written there" in capsys.readouterr().err


def test_no_run_or_no_step_is_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no run there (metrics.jsonl is missing)\n"
    assert not (tmp_path / "none").exists()
    write_run(tmp_path / "new", 0)
    assert report.main([str(tmp_path / "new")]) == 2
    assert "has not finished a step yet" in capsys.readouterr().err


def decide(drafter, tokens, seconds, expected, plain, reason="why", at=0.0, rows=16, turns=4):
    rows = 0 if drafter == PLAIN else rows
    return Decision(at, 4, 4, drafter, rows, reason, 1, turns, tokens, seconds, expected, plain)


def write_decisions(directory: Path, *steps: list[Decision]) -> Path:
    for step, decisions in enumerate(steps, start=1):
        RunDirectory(directory).append_decisions(step, [dataclasses.asdict(each) for each in decisions])
    return directory


FAST = [
    dataclasses.replace(decide("srt", 60, 1.0, 50.0, 20.0), verified=[4, 4], accepted=[4, 3]),
    decide(PLAIN, 20, 1.0, 20.0, 20.0, at=1.0),
]
SLOW = [
    decide("srt", 10, 1.0, 40.0, 20.0, at=0.5),
    decide("eagle", 15, 1.0, 30.0, 20.0, at=1.5),
    decide("eagle", 60, 1.0, 90.0, 20.0, rows=32, at=2.5),
    decide(PLAIN, 4, 2.0, 0.0, 40.0, "the largest median, 12.5 tokens/s against 12 plain", at=3.5),
    decide(PLAIN, 5, 2.0, 0.0, 0.0, "the largest median, 1e+03 tokens/s against 9 plain", at=5.5),
    decide(PLAIN, 5, 3.0, 45.0, 60.0, "explores (epsilon 0.1)", at=7.5),
]


def test_decisions_are_told(tmp_path, capsys, no_page):
    """In words: shares of tokens, and of the steps that were not faster than plain, why."""
    run = write_decisions(write_run(tmp_path / "run", 2), FAST, SLOW)
    assert report.main([str(run)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run: ")]
    assert told == [
        "run: of 179 tokens that were decided on, 42% with drafts of eagle, 39% with drafts of srt,"
        " 19% plain",
        # 94 tokens where 160 were predicted of plain decoding; the others had no prediction to compare with
        "run: step 2 brought 0.59 of what was predicted of plain decoding; plain for 40% of the time because:"
        " the largest median, .. tokens/s against .. plain; furthest off: srt with 16 rows: predicted"
        " 2.00 times plain and brought 0.50",
    ]


def test_acceptance_by_position_by_hand():
    """Two turns each; what is logged without depths, as plain steps are, does not count."""
    short = dataclasses.replace(decide("srt", 3, 1.0, 1.0, 1.0, turns=2), verified=[2, 1], accepted=[1])
    long = dataclasses.replace(short, verified=[2, 2, 2], accepted=[2, 1, 1], tokens=6)
    decisions = [short, long, decide("srt", 9, 1.0, 1.0, 1.0)]
    assert by_position(decisions, "verified").tolist() == [4 / 4, 3 / 4, 2 / 4]
    assert by_position(decisions, "accepted").tolist() == [3 / 4, 1 / 4, 1 / 4]
    assert 1 + by_position(decisions, "accepted").sum() == accept_length([short, long])
    assert by_position([], "accepted").tolist() == []


def test_of_many_slow_steps_the_slowest_are_told(tmp_path, capsys, no_page):
    steps = [[decide("srt", tokens, 1.0, 50.0, 50.0)] for tokens in range(40, 51)]
    assert report.main([str(write_decisions(write_run(tmp_path / "run", 11), *steps))]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run: ")]
    assert [line.split(";")[0] for line in told[1:3]] == [
        "run: step 1 brought 0.80 of what was predicted of plain decoding",
        "run: step 2 brought 0.82 of what was predicted of plain decoding",
    ]
    assert told[6:] == ["run: 6 more of 11 steps brought no more than that either"]


def test_a_run_without_decisions_has_no_words_of_them(tmp_path, capsys, no_page):
    run = write_run(tmp_path / "run", 1)
    for _ in range(2):
        assert report.main([str(run)]) == 0
        assert "decided" not in capsys.readouterr().out
        write_decisions(run, [])
