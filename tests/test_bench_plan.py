"""scripts/bench_plan.py: its command line, and a plan of the tiny run against the run itself."""

import json

import pytest

from tests.scripts import load_script
from tests.training.tiny_run import write_config

bench_plan = load_script("bench_plan").BENCHMARK


def test_an_unknown_section_is_one_line(capsys):
    assert bench_plan.main(["--only", "pases"]) == 2
    assert capsys.readouterr().err == "error: --only: 'pases' is not a section; they are passes,update,run\n"


@pytest.mark.long
def test_a_plan_is_compared_with_the_run(tmp_path):
    output = tmp_path / "plan.json"
    config = str(write_config(tmp_path))
    drafts = ("speculation.drafter=srt", "speculation.verify_buckets=[8]", "speculation.max_drafts=3")
    assert bench_plan.main(["--config", config, "--output", str(output), *drafts]) == 0
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert {name.split(",")[0] for name in rows} == {
        "plan/decode step",
        "plan/verifying pass",
        "plan/update of a micro-batch",
        "plan/memory of the update",
        "plan/memory of a run",
    }
    run = rows["plan/memory of a run"]
    assert run["value"] > run["baseline_value"] > 0  # the process itself is more than this policy's arrays
    assert run["mismatch_logprob_abs_max"] == 0.0
