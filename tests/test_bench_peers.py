"""The comparison with other libraries, without them: a stand-in plays the peer."""

import sys
from pathlib import Path

import pytest

from rljax.config import load_config
from rljax.errors import UserError
from tests.scripts import load_script
from tests.training.tiny_run import write_config

PEER = """
import json, sys
job = json.load(open(sys.argv[1]))
assert (job["steps"], job["samples_per_prompt"], job["dtype"]) == (3, 2, "float32")
assert job["micro_batch"] == 2
assert len(job["prompts"]) == 6 and job["prompts"][0]["prompt"].endswith("assistant\\n")
calls = [{"at": 10.0 * call, "tokens": 8, "reward": 0.5} for call in range(4)]
json.dump({"calls": calls, "versions": {"peer": "1.0"}}, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def script():
    return load_script("bench_peers")


@pytest.mark.long
def test_steps_here_are_set_against_the_peers(script, tmp_path, monkeypatch):
    (tmp_path / "trl_grpo.py").write_text(PEER)
    monkeypatch.setattr(script, "_PEER", tmp_path / "trl_grpo.py")
    settings = [*script._OVERRIDES, "training.steps=3"]
    settings += ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    file, python = write_config(tmp_path), Path(sys.executable)
    config = load_config(file, settings)
    time, tokens, *whole = script.rows_of(config, settings, python, file, micro_batch=2)
    names = [row.name for row in whole]
    assert names == ["step without skipping/trl/time", "step without skipping/trl/tokens"]
    assert (time.name, time.baseline_value) == ("step/trl/time", 10.0)
    assert time.ratio == pytest.approx(10.0 / time.value)
    assert (tokens.name, tokens.baseline_value) == ("step/trl/tokens", 0.8)
    assert tokens.ratio == pytest.approx(tokens.value / 0.8)
    assert time.details["steps"] == 2  # of four calls, three intervals, the first of which compiles
    assert time.details["our_steps"] == 4  # two before and two after
    assert time.details["versions"] == {"peer": "1.0"}
    assert time.details["peer_micro_batch"] == 2


def test_a_peer_that_fails_is_one_line(script, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(UserError, match="trl ended with status 1: no such model"):
        script.run_process([sys.executable, tmp_path / "fails.py"], "trl")


def test_the_last_number_is_the_answer(script):
    rewards = load_script("trl_grpo").rewards
    texts = ["31+6=37#37", "37 or 38", "none", "007"]
    assert rewards(texts, ["37", "37", "1", "7"]) == [1.0, 0.0, 0.0, 1.0]
    assert rewards(["5"], ["x"]) == [0.0]
