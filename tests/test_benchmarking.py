"""Benchmarks: what is computed from timings, and what is written."""

import json
import time
from pathlib import Path

import pytest

from rljax.benchmarking import (
    Interference,
    Row,
    counted_row,
    print_table,
    results_console,
    speed_row,
    timed_row,
    write_results,
)
from rljax.errors import UserError
from rljax.timing import compare, interleave


def _row(**changes) -> Row:
    fields = {"name": "decode", "value": 3.0, "unit": "tokens/s"}
    fields |= {"baseline": "theirs", "baseline_value": 2.0, "ratio": 1.5}
    return Row(**(fields | changes))


# --- timing ----------------------------------------------------------------------------------------------


def test_actions_alternate_in_both_orders_after_the_warm_up():
    calls = []
    actions = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = interleave(actions, repeats=3, warmups=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    with pytest.raises(ValueError, match="repeats: 0"):
        interleave({"a": lambda: None}, repeats=0)


def test_time_to_free_is_not_counted(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Result:
        def __del__(self):
            clock[0] += 100.0

    def work():
        clock[0] += 2.0
        return Result()

    assert interleave({"ours": work, "theirs": work}, 3) == {"ours": [2.0] * 3, "theirs": [2.0] * 3}


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # The second round ran on a machine ten times slower, the third was disturbed on one side only.
    comparison = compare(seconds=[1.0, 10.0, 9.0], baseline_seconds=[2.0, 20.0, 2.0])
    assert comparison.ratio == 2.0
    assert (comparison.ratio_low, comparison.ratio_high) == (2.0 / 9.0, 2.0)
    assert (comparison.seconds, comparison.baseline_seconds) == (9.0, 2.0)


# --- machine ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's counters")
def test_interference_counts_others_and_not_ourselves(monkeypatch):
    # Of 8 core-seconds 5 were busy, 2 of them ours: others took 3 / 8.
    clocks = iter([(100.0, 10.0, 1000.0), (105.0, 12.0, 1008.0)])
    monkeypatch.setattr(Interference, "_clocks", staticmethod(lambda: next(clocks)))
    with Interference() as interference:
        assert interference.share is None
    assert interference.share == 3 / 8


# --- results ---------------------------------------------------------------------------------------------


def test_results_file(tmp_path):
    path = tmp_path / "new" / "engine.json"
    write_results(path, [_row(details={"batch": 8})], "python scripts/bench_engine.py", ("numpy",))
    content = json.loads(path.read_text())
    assert list(content) == ["command", "commit", "date", "machine", "rows"]
    assert {"cpu", "vectors", "cores", "accelerator", "jax", "python", "numpy"} == content["machine"].keys()
    told = {"name": "decode", "value": 3.0, "unit": "tokens/s", "baseline": "theirs"}
    assert content["rows"] == [told | {"baseline_value": 2.0, "ratio": 1.5, "batch": 8}]
    assert [file.name for file in path.parent.iterdir()] == ["engine.json"]


def test_results_that_say_nothing_or_two_things_are_refused(tmp_path):
    path = tmp_path / "engine.json"
    with pytest.raises(ValueError, match="no rows"):
        write_results(path, [], "command")
    with pytest.raises(ValueError, match="decode: details repeat \\['ratio'\\]"):
        write_results(path, [_row(details={"ratio": 2.0})], "command")
    with pytest.raises(ValueError):  # JSON has no NaN
        write_results(path, [_row(value=float("nan"))], "command")
    assert not path.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"engine\.json: cannot be written"):
        write_results(tmp_path / "file" / "engine.json", [_row()], "command")


def test_table(capsys):
    print_table([_row(value=12345.6)], "decode", results_console())
    printed = capsys.readouterr().out
    assert "12,346 tokens/s" in printed and "2 tokens/s" in printed and "1.50" in printed


def test_rows_of_what_was_timed_or_counted():
    timing = compare([1.0, 2.0, 4.0], [2.0, 6.0, 4.0])
    row = timed_row("step", timing, "theirs", "ms", 1e3, batch=8).as_json()
    assert (row["value"], row["baseline_value"], row["ratio"]) == (2000.0, 4000.0, 2.0)
    details = [row[key] for key in ("unit", "rounds", "ratio_low", "ratio_high", "batch")]
    assert details == ["ms", 3, 1, 3, 8]
    row = speed_row("step", 100, timing, "theirs")
    assert (row.value, row.baseline_value, row.ratio, row.unit) == (50.0, 25.0, 2.0, "tokens/s")
    assert counted_row("bytes", 2.0, 8.0, "MB", "theirs", less=True).ratio == 4.0
    assert counted_row("reward", 2.0, 8.0, "reward", "theirs").ratio == 0.25
