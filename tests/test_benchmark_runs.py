"""Runs of a benchmark: which sections are measured, what is printed, where results go."""

import contextlib
import json
import os
import types
from pathlib import Path

import pytest

from rljax import benchmark_runs
from rljax.benchmark_runs import Benchmark, Measurement, in_fresh_process
from rljax.benchmarking import Row
from rljax.errors import UserError


def _row(name: str, **details) -> Row:
    return Row(name, 3.0, "GB/s", "theirs", 2.0, 1.5, details)


def _raise(error: BaseException) -> list[Row]:
    raise error


BENCHMARK = Benchmark(
    name="sums",
    description="Sums of much.",
    plan=[
        Measurement("sum", "1M", lambda: [_row("sum/1M", rounds=4)]),
        Measurement("mean", "1M", lambda: [_row("mean/1M")]),
        Measurement("sum", "2M", lambda: [_row("sum/2M"), _row("sum/2M/again")], disturbed=False),
        Measurement("refused", "1M", _raise, (UserError("no such thing"),)),
        Measurement("stopped", "1M", _raise, (KeyboardInterrupt(),)),
    ],
    packages=("numpy",),
)


@pytest.fixture(autouse=True)
def _garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_runs.gc, "collect", lambda: None)  # slow among so many objects


def run(*arguments: object, benchmark: Benchmark = BENCHMARK) -> int:
    return benchmark.main([str(argument) for argument in arguments])


def names(path: Path) -> list[str]:
    return [row["name"] for row in json.loads(path.read_text())["rows"]]


def test_sections_are_measured_in_the_order_of_the_plan(capsys, tmp_path):
    output = tmp_path / "results.json"
    assert run("--only", "mean,sum", "--output", output) == 0
    assert names(output) == ["sum/1M", "mean/1M", "sum/2M", "sum/2M/again"]
    written = json.loads(output.read_text())
    row = written["rows"][0]  # with its section beside its own details
    assert row["section"] == "sum" and "interference" in row and row["rounds"] == 4
    assert "numpy" in written["machine"]
    printed = capsys.readouterr().out
    assert printed.index("sum, 1M (0 s)") < printed.index("mean, 1M (0 s)") < printed.index("sum, 2M (0 s)")
    assert printed.endswith(f"ratios above 1 mean that rljax is better; 4 rows are in {output}\n")


def test_what_was_measured_before_an_error_is_written(capsys, tmp_path):
    output = tmp_path / "results.json"
    assert run("--output", output) == 2
    assert names(output) == ["sum/1M", "mean/1M", "sum/2M", "sum/2M/again"]
    assert capsys.readouterr().err == "error: no such thing\n"


@pytest.mark.parametrize(
    ("only", "status", "message"),
    [
        ("stopped", 130, "interrupted\n"),
        ("sum,maen", 2, "error: --only: 'maen' is not a section; they are sum,mean,refused,stopped\n"),
    ],
)
def test_what_ends_a_run_is_one_line(only, status, message, capsys):
    assert run("--only", only) == status
    assert capsys.readouterr().err == message


def test_only_a_whole_run_replaces_the_published_results():
    sections = ("sum", "mean", "refused", "stopped")
    for only, name in ((sections, "sums.json"), (("sum", "mean"), "sums-sum-mean.json")):
        assert BENCHMARK.default_output(only, sections) == Path("benchmarks/results") / name


def test_after_some_seconds_nothing_begins_but_the_first(capsys, tmp_path):
    output = tmp_path / "results.json"
    assert run("--only", "mean,sum", "--seconds", 0, "--output", output) == 0
    assert names(output) == ["sum/1M"]
    assert "left out after 0 s: mean, 1M" in capsys.readouterr().out
    nothing = Benchmark("none", "Of nothing.", [Measurement("sum", "1M", list)])
    assert run("--output", output, benchmark=nothing) == 2
    assert "error: nothing could be measured" in capsys.readouterr().err


def test_what_cannot_run_is_refused_before_anything_is_measured(capsys):
    asked = []

    def prepare(sections):
        asked.append(sections)
        raise UserError("not here")

    plan = [Measurement("sum", "1M", lambda: pytest.fail("measured"))]
    assert run("--only", "sum", benchmark=Benchmark("sums", "Sums.", plan, prepare=prepare)) == 2
    assert asked == [("sum",)] and capsys.readouterr().err == "error: not here\n"


def test_a_busy_machine_is_a_warning_where_it_matters(capsys, monkeypatch, tmp_path):
    half_is_of_others = contextlib.nullcontext(types.SimpleNamespace(share=0.5))
    monkeypatch.setattr(benchmark_runs, "Interference", lambda: half_is_of_others)
    benchmark = Benchmark("sums", "Sums.", BENCHMARK.plan[:3], disturbance="sums suffer most")
    assert run("--only", "sum", "--output", tmp_path / "results.json", benchmark=benchmark) == 0
    warning = "other processes took 50% of the cores; sums suffer most: repeat on a quiet machine"
    assert capsys.readouterr().out.count(warning) == 1  # for sum/1M, and not for sum/2M


def test_a_plan_is_made_of_the_arguments_and_of_the_config_with_keys_set(tmp_path):
    seen = []

    def rows(*given):
        seen.append(given)
        return [_row("sum")]

    benchmark = Benchmark(
        "sums",
        "Sums.",
        lambda a: [Measurement("sum", "1M", rows, (a.config, a.file, a.overrides, a.size))],
        config="configs/quickstart.yaml",
        settings=("seed=3", "training.steps=2"),
        options={"--size": {"default": 4, "help": "of a sum"}},  # whose type is its default's
    )
    output = ["--output", tmp_path / "results.json"]
    assert run("training.steps=7", "--size", 5, *output, benchmark=benchmark) == 0
    ((config, file, overrides, size),) = seen
    assert (config.seed, config.training.steps, size) == (3, 7, 5)  # the command line's keys come last
    assert (file, overrides) == ("configs/quickstart.yaml", ["training.steps=7"])
    assert run("seeds=1", *output, benchmark=benchmark) == 2


def told(*texts: str) -> list[str | None]:
    """What the other process is asked for."""
    return [*texts, os.environ.get("SAID"), os.environ.get("UNSAID")]


def test_a_fresh_process_has_its_arguments_and_its_environment(monkeypatch):
    monkeypatch.setenv("UNSAID", "here")
    assert in_fresh_process(told, "a", "b c", SAID="yes", UNSAID="") == ["a", "b c", "yes", None]
