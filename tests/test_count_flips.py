"""The count of flips: it finds none, finds those of a broken verification, and goes on where it stopped."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine import programs
from rljax.errors import UserError
from rljax.requests import Completion
from tests.scripts import load_script

count_flips = load_script("count_flips")

_TINY = (
    "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_response_length=32",
    "engine.cache_buckets=[128]", "engine.compilation_cache=null", "policy.shape.num_layers=1",
    "warm_start=null", "task.problems=4",
)  # fmt: skip


def count(directory, monkeypatch, tokens, mixes, mechanisms="SRT;quantized"):
    """Runs the script with mixes of fewer buckets than its own; its exit status and what it wrote."""
    monkeypatch.setattr(count_flips, "BUCKET_MIXES", mixes)
    arguments = ["--tokens", str(tokens), "--steps", "2", "--dtypes", "float32", "--mechanisms", mechanisms]
    arguments += ["--parts", str(directory / "parts.jsonl"), "--output", str(directory / "flips.json")]
    status = count_flips.main([*arguments, *_TINY])
    return status, json.loads((directory / "flips.json").read_text())


@pytest.mark.long
def test_nothing_flips_and_a_second_start_goes_on(tmp_path, monkeypatch):
    count_all = functools.partial(
        count, tmp_path, monkeypatch, 600, {"a": ((2, 8), (16, 24), (3, 8)), "b": ((8,), (20,), (8, 5))}
    )
    status, result = count_all()
    assert status == 0 and [row["mechanism"] for row in result["rows"]] == ["SRT", "quantized"]
    assert all(row["tokens"] >= 300 and row["flips"] == row["logprobs"] == 0 for row in result["rows"])
    assert all(row["drafted"] > 0 for row in result["rows"])
    lines = (tmp_path / "parts.jsonl").read_text().splitlines()
    assert count_all()[0] == 0
    assert (tmp_path / "parts.jsonl").read_text().splitlines() == lines  # nothing is counted twice
    (tmp_path / "parts.jsonl").write_text("\n".join(lines[:2]) + "\n")  # stopped before the second mechanism
    status, again = count_all()
    assert status == 0 and again["rows"] == result["rows"]


@pytest.mark.long
def test_a_broken_verification_is_counted(tmp_path, monkeypatch):
    def first_child(rooted, sampled):
        """Accepts a node whatever the policy sampled."""
        path, number = programs_accepted(rooted, sampled)
        return path, jnp.maximum(number, jnp.minimum(2, rooted.valid.sum(axis=1, dtype=jnp.int32)))

    programs_accepted = programs.accepted_path
    monkeypatch.setattr(programs, "accepted_path", first_child)
    status, result = count(tmp_path, monkeypatch, 300, {"a": ((8,), (24,), (8, 5))}, "SRT")
    (row,) = result["rows"]
    assert status == 1 and row["flips"] > 0
    assert {"step", "request", "position", "tokens", "drift_before"} <= row["shown"][0].keys()


def completion(tokens, logprobs):
    return Completion(np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), "eos")


def test_a_response_counts_up_to_its_first_difference():
    counted = count_flips.Count()
    plain = completion([5, 6, 7, 8], [-1.0, -1.0, -1.0, -1.0])
    counted.compare(plain, completion([5, 6, 9, 9], [-1.0, -1.5, -1.0, -1.0]), {"step": 0, "request": 3})
    assert (counted.tokens, counted.logprobs, len(counted.flips)) == (3, 1, 1)
    found = {"step": 0, "request": 3, "position": 2, "tokens": [7, 9], "drift_before": 0.5}
    assert counted.flips[0] == found
    counted.compare(plain, completion([5, 6], [-1.0, -1.0]), {"step": 0, "request": 4})
    assert (counted.tokens, len(counted.flips)) == (6, 2) and counted.flips[1]["tokens"] == [7, None]
    counted.compare(plain, plain, {})
    assert (counted.tokens, len(counted.flips)) == (10, 2)


def test_parts_of_another_workload_are_refused(tmp_path):
    path = tmp_path / "parts.jsonl"
    count_flips.PartsFile(path, {"steps": 1}).append({"tokens": 1})
    with pytest.raises(UserError, match="give another --parts"):
        count_flips.PartsFile(path, {"steps": 2})
    assert count_flips.main(["--mechanisms", "nonsense"]) == 2
