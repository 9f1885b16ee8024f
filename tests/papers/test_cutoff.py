"""RhymeRL's cut-off: the table by hand, what it decides in rollouts, and that it changes no token."""

from types import SimpleNamespace

import numpy as np
import pytest

from drafters.base import Drafter
from rljax.engine.buckets import Buckets
from rljax.papers.rhymerl.cutoff import CutoffManager, viable_batches
from rljax.speculation.speculative_pass import HostProposer
from tests.speculation.speculators import (
    BUCKETS,
    FEW,
    active_slots,
    device_proposer,
    learn,
    make_speculator,
    roll_out,
)
from tests.tiny_policy import FixedTimes, assert_same, strategy_choice

CUTOFF = strategy_choice("cutoff")


def table(by_rows, max_batch=8, drafting=0.0):
    """Batches 2, 4 and 8 with passes of 8, 16 and 32 rows, up to 7 drafts each."""
    buckets = Buckets((2, 4, 8), (128,), (8, 16, 32), 7)
    times = FixedTimes(by_rows)
    return viable_batches(times, buckets, 128, max_batch, lambda batch: drafting).tolist()


def test_the_table_by_hand():
    # Batch 8 has 3 drafts a slot in 32 rows: they pay where 1 + 3 p > 2.45. Batch 4 has 3 in 16 rows: where
    # 1 + 3 p > 1.65. Batch 2 has 7 in 16 rows: where 1 + 7 p > 1.65.
    seconds = {0: 1.0, 8: 1.3, 16: 1.65, 32: 2.45}
    assert table(seconds) == [0] * 2 + [2] * 3 + [4] * 5 + [8] * 11
    assert table(seconds, max_batch=4) == [0] * 2 + [2] * 3 + [4] * 16
    assert table(seconds, drafting=7.0) == [0] * 21  # 8 tokens in 8.65 seconds
    assert table({0: 1.0, 8: 9.0, 16: 9.0, 32: 9.0}) == [0] * 21


def manager_of(proposer, by_rows, draft=None):
    return CUTOFF.manager([proposer], BUCKETS, FixedTimes(by_rows, draft), 4)


def decide(manager, batch):
    state = SimpleNamespace(batch=batch, cache=SimpleNamespace(length=128))
    return manager.choose(state, active_slots(batch), None)[1]


def test_acceptance_decides_up_to_which_batch_is_drafted(monkeypatch):
    """Batch 2 has 7 drafts a slot in 16 rows: where 1 + 7 p > 3.5. Batch 4 has them in 32: 1 + 7 p > 4.5."""
    manager = manager_of(HostProposer("srt", Drafter(), None), {0: 1.0, 16: 3.5, 32: 4.5})
    asked = []
    monkeypatch.setattr(
        "rljax.papers.rhymerl.cutoff.draft",
        lambda *arguments: asked.append(1) or (arguments[2], SimpleNamespace(rows=0, seconds=0.0)),
    )
    assert manager.acceptance == pytest.approx(0.8)  # before anything was drafted
    assert "had nothing to verify" in decide(manager, 4).reason and len(asked) == 1
    manager.load_state({"cutoff_drafts": np.asarray([84, 1]), "other": np.zeros(1)})  # 13.8 of 100
    choice = decide(manager, 4)
    assert choice.reason == "with 14% of the drafts accepted they pay up to batch 0" and len(asked) == 1
    manager.load_state({"cutoff_drafts": np.asarray([84, 27.5])})  # 40.3 of 100
    assert decide(manager, 4).reason.endswith("they pay up to batch 2") and len(asked) == 1
    decide(manager, 2)
    assert len(asked) == 2


def test_the_time_of_drafting_counts_on_the_device():
    for seconds, on in ((0.1, True), (1e9, False)):
        manager = manager_of(device_proposer("small_model", (3, 7)), {0: 1.0, 16: 1.1, 32: 1.2}, seconds)
        assert (manager._table(128)[-1] > 0) == on


def test_a_head_that_is_not_trained_is_waited_for():
    choice = decide(manager_of(device_proposer("eagle", (3,), trained=False), {0: 1.0, 16: 1.1, 32: 1.2}), 4)
    assert choice.reason == "eagle is not trained yet"


@pytest.mark.parametrize("drafter", ["histospec", "quantized"])
def test_no_token_changes_and_a_checkpoint_keeps_the_acceptance(params, requests, expected, drafter):
    arguments = {"histospec": {"min_match": 1}}
    speculator = make_speculator((drafter,), CUTOFF, FEW, **arguments)
    assert isinstance(speculator.manager, CutoffManager)
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        learn(speculator, requests, completions)
    assert statistics.verified > 0
    again = make_speculator((drafter,), CUTOFF, FEW, **arguments)
    again.load_state(speculator.state())
    assert again.manager.acceptance == speculator.manager.acceptance != pytest.approx(0.8)
