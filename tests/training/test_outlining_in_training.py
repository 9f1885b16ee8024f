"""A run with decoder layers compiled once: the numbers of one with layers written out."""

import pytest

from rljax.run_directory import RunDirectory
from tests.training.test_loop import _numbers
from tests.training.tiny_run import train

# How much is drafted follows from measured times; tokens and updates do not.
_FROM_TIMES = ("speculation/", "rollout/occupancy", "rollout/decode_steps")
_DEEPER = ("policy.shape.num_layers=2", "speculation.drafter=srt", "speculation.verify_buckets=[8]")


@pytest.mark.long
def test_a_run_resumes_with_the_other_setting(tmp_path):
    whole, mixed = tmp_path / "whole", tmp_path / "mixed"
    for directory in (whole, mixed):
        directory.mkdir()
    expected = train(whole, *_DEEPER, "policy.outline_layers=off")
    train(mixed, *_DEEPER, "policy.outline_layers=off", "training.steps=1")
    lines = train(mixed, *_DEEPER, "policy.outline_layers=on", "training.steps=2")
    _, session = RunDirectory(mixed / "run").read_sessions()
    assert session["changed"]["policy.outline_layers"] == ["off", "on"]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line, other in zip(_numbers(lines), _numbers(expected), strict=True):
        shared = {key for key in set(line) & set(other) if not key.startswith(_FROM_TIMES)}
        assert line["step"] == 0 or {"reward/mean", "rollout/tokens", "loss/policy"} <= shared
        for key in shared:
            assert line[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
    for line in lines[1:]:
        assert line["mismatch/logprob_abs_max"] == 0.0
