"""Which checkpoints stay."""

import math

import jax.numpy as jnp
import pytest

from rljax.assembly.checkpoint import RunCheckpoints
from rljax.assembly.retention import Retention
from rljax.errors import CheckpointError


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(1), {60}),
        (Retention(2), {50, 60}),
        (Retention(9), {10, 20, 30, 40, 50, 60}),
        (Retention(1, every=20), {20, 40, 60}),
        (Retention(1, best=1), {30, 60}),
        (Retention(1, best=2), {20, 30, 60}),
        (Retention(1, best=3), {20, 30, 40, 60}),
        (Retention(1, best=9), {10, 20, 30, 40, 60}),
        (Retention(2, every=40, best=1), {30, 40, 50, 60}),
    ],
)
def test_what_any_rule_wants_stays(retention, kept):
    scores = {10: -1.0, 20: 0.5, 30: 0.5, 40: 0.25, 50: math.nan, 60: None}
    assert retention.kept(scores) == kept


def test_the_newest_must_stay():
    with pytest.raises(ValueError, match="keep: 0; at least the newest checkpoint must stay"):
        Retention(0)
    with pytest.raises(ValueError, match="must not be negative"):
        Retention(1, best=-1)


def test_scores_are_remembered_by_later_processes(tmp_path):
    rewards = {1: 0.1, 2: 0.9, 3: None, 4: 0.2, 5: math.nan, 6: 0.3, 7: 0.3}
    for step, reward in rewards.items():
        checkpoints = RunCheckpoints(tmp_path, keep=1, keep_every=3, keep_best=2)
        checkpoints.save(step, {"weight": jnp.full(3, float(step))}, {}, score=reward)
        checkpoints.close()
    assert checkpoints.steps() == [2, 3, 6, 7] == sorted(int(path.name) for path in tmp_path.iterdir())
    assert checkpoints.restore({"weight": jnp.zeros(3)}, step=2)[1]["weight"].tolist() == [2.0] * 3


def test_a_failure_is_known_before_the_next_save(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.check()
    with monkeypatch.context() as patch:
        patch.setattr("rljax.assembly.checkpoint.write_durably", full)
        checkpoints.save(1, {"weight": jnp.zeros(3)}, {})
        checkpoints._thread.join()
    with pytest.raises(CheckpointError, match=r"step 1 could not be written \(No space left on device\)"):
        checkpoints.check()
    checkpoints.check()  # told once
    checkpoints.save(1, {"weight": jnp.zeros(3)}, {})
    checkpoints.close()
    assert checkpoints.steps() == [1]
