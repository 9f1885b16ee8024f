"""The section `losses` of scripts/bench_drafters.py, at a size that takes seconds."""

import jax
import pytest

from rljax.config import load_config
from rljax.errors import UserError
from rljax.training.drafter_warm_up import WarmUp
from tests.scripts import load_script
from tests.training.tiny_run import write_config

acceptance = load_script("drafter_benchmarks.heads")


def test_losses_are_compared_on_the_same_rollouts_and_kept(tmp_path, monkeypatch):
    names = ("LK", "block sampled")
    settings = WarmUp(steps=2, slices_per_round=1, heldout=3, depth=2, draft_vocabulary=40)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        config = load_config(write_config(tmp_path), [])
        rows = acceptance.acceptance_rows(config, settings, 2, names, tmp_path / "work")
        monkeypatch.setattr(acceptance, "make_trainer", None)  # everything is there
        again = acceptance.acceptance_rows(config, settings, 2, names, tmp_path / "work")
        with pytest.raises(UserError, match="--losses: 'lk' is not one"):
            acceptance.acceptance_rows(config, settings, 2, ("lk",), tmp_path / "work")
    assert [row.as_json() for row in again] == [row.as_json() for row in rows]
    assert [row.name for row in rows] == [f"losses/{name}" for name in names]
    assert rows[0].ratio == 1.0 and rows[1].baseline_value == rows[0].value
    for row in rows:
        first, second = row.details["coupled_by_position"]
        assert 0 < second < first < 1 and row.value == pytest.approx(1 + first + second)
        assert row.value <= row.details["rejection_sampling"] + 0.05
