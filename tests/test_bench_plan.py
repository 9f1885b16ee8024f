"""scripts/bench_plan.py: its command line, and a plan of the tiny run against the run itself."""

import json

import pytest

from tests.scripts import load_script
from tests.training.tiny_run import write_config

bench_plan = load_script("bench_plan").BENCHMARK


def test_a_pass_breaks_even_where_its_tokens_take_as_long_as_decode_steps(tmp_path, capsys):
    passes = [
        {"slots": 2, "rows": 8, "seconds": 0.03},
        {"slots": 2, "rows": 2, "seconds": 0.02},
        {"slots": 2, "rows": 4, "seconds": 0.025},
        {"slots": 32, "rows": 32, "seconds": 0.1},  # no pass over it: nothing to break even with
    ]
    break_even = load_script("bench_plan")
    assert break_even.break_even(passes) == {2: [(1.0, 1.0), (2.0, 1.25), (4.0, 1.5)]}

    plan, picture = tmp_path / "plan.json", tmp_path / "break_even.png"
    measured = {"decoding": passes[1:2], "verifying": passes[:1]}
    plan.write_text(json.dumps({"hardware": {"kind": "TPU v5e"}, "devices": 4} | measured))
    assert bench_plan.main(["--break-even", str(picture), "--results", str(plan)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    plan.write_text("{}")
    assert bench_plan.main(["--break-even", str(picture), "--results", str(plan)]) == 2
    assert "plan.json: holds no passes" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_is_compared_with_the_run(tmp_path):
    output = tmp_path / "plan.json"
    config = str(write_config(tmp_path))
    drafts = ("speculation.drafter=srt", "speculation.verify_buckets=[8]", "speculation.max_drafts=3")
    assert bench_plan.main(["--config", config, "--output", str(output), *drafts]) == 0
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    named = ("decode step", "verifying pass", "update of a micro-batch", "memory of the update")
    assert {name.split(",")[0] for name in rows} == {f"plan/{name}" for name in (*named, "memory of a run")}
    run = rows["plan/memory of a run"]
    assert run["value"] > run["baseline_value"] > 0  # the process itself is more than this policy's arrays
    assert run["mismatch_logprob_abs_max"] == 0.0
