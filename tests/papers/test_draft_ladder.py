"""The draft ladder: predictions by hand, rankings, and its choice at every batch size."""

import dataclasses

import numpy as np
import pytest

from rljax.papers.specactor.ladder import AcceptanceHistory, Costs, profile
from rljax.speculation.window_costs import Affine
from tests.speculation.test_saved_state import through_a_file


def test_speedups_by_hand():
    """Batch 2, plain step 1 s; passes over 4, 6 and 8 rows: windows of 1, 2 and 3."""
    costs = Costs(
        {"free": Affine(0, 0), "dear": Affine(0.2, 0.1)}, {2: 1.0}, {4: 1.25, 6: 2.0, 8: 2.0}, max_window=9
    )
    ladder = profile(costs, [0.0, 0.5, 1.0])
    # a = 0: one token a pass, best with the smallest. a = 0.5: 1.5, 1.75, 1.875 tokens. a = 1: 2, 3, 4.
    np.testing.assert_allclose(ladder.speedups[0, :, 0], [1 / 1.25, 1.5 / 1.25, 4 / 2.0])
    assert ladder.windows[0, :, 0].tolist() == [1, 1, 3]
    # Drafting takes 0.1 + 2 * 0.2 s a token.
    np.testing.assert_allclose(ladder.speedups[1, :, 0], [1 / 1.75, 1.5 / 1.75, 2 / 1.75])
    assert ladder.speedup("free", 0.75, 2) == pytest.approx((1.5 / 1.25 + 2.0) / 2)
    assert (ladder.window("free", 0.6, 2), ladder.window("free", 0.9, 2)) == (1, 3)
    assert ladder.first({"free": 0.0, "dear": 0.5}, 2) is None  # 0.8 and 0.86
    assert ladder.first({"free": 0.25, "dear": 1.0}, 2) == "dear"  # 1.0 and 1.14
    assert ladder.ranking({"free": 0.0, "dear": 0.5}, 2) == ["dear", "free"]
    assert ladder.ranking({"free": 0.5, "dear": 0.5}, 2) == ["free", "dear"]


def test_rows_are_rounded_up_to_what_is_compiled_and_windows_that_do_not_fit_are_none():
    costs = Costs({"free": Affine(0, 0)}, {1: 1.0, 4: 1.0, 9: 1.0}, {8: 1.0, 16: 2.0}, max_window=5)
    ladder = profile(costs, [1.0])
    assert ladder.windows[0, 0].tolist() == [5, 1, 0]  # 6 of 8 rows; 8 of 8 (2 a second, 16 rows give 4 in 2)
    np.testing.assert_allclose(ladder.speedups[0, 0], [6.0, 2.0, 0.0])
    assert ladder.first({"free": 1.0}, 9) is None
    assert [ladder.speedup("free", 1.0, batch) for batch in (1, 2, 4, 5, 99)] == [6.0, 2.0, 2.0, 0.0, 0.0]


def random_costs(rng, drafters):
    """A machine: passes that cost more beyond some rows, drafters between looking up and a model."""
    rows = [2**k for k in range(11)]
    limit = rng.uniform(16, 256)
    verification = {size: 0.02 * (1.05 + max(size / limit - 1, 0) + 0.001 * size) for size in rows}
    plain = {size: verification[size] / 1.05 for size in (1, 2, 4, 8, 16, 32, 64)}
    costs = {
        f"d{i}": Affine(
            fixed=0.02 * 10 ** rng.uniform(-4, -0.8), per_request=0.02 * 10 ** rng.uniform(-6, -3)
        )
        for i in range(drafters)
    }
    return Costs(costs, plain, verification, max_window=12)


def test_more_acceptance_never_ranks_a_drafter_lower():
    rng = np.random.default_rng(0)
    ladder = profile(random_costs(rng, drafters=5), np.linspace(0.0, 1.0, 11))
    assert (np.diff(ladder.speedups, axis=1) >= 0).all()
    for _ in range(100):
        history = dict(zip(ladder.drafters, rng.random(5), strict=True))
        drafter, batch = rng.choice(ladder.drafters), int(rng.integers(1, 80))
        better = history | {drafter: rng.uniform(history[drafter], 1.0)}
        assert ladder.ranking(better, batch).index(drafter) <= ladder.ranking(history, batch).index(drafter)


def test_a_drafter_without_history_is_tried_and_its_acceptance_remembered():
    history = AcceptanceHistory(["a", "b"])
    assert history.rates == {"a": 0.8, "b": 0.8}
    history.record("a", 84, 7)
    assert history.rates == {"a": pytest.approx((7 + 12.8) / 100), "b": 0.8}
    history.record("a", 0, 0)
    assert history.rates["a"] == pytest.approx((3.5 + 12.8) / 58)
    remembered = AcceptanceHistory(("a", "b", "new"))
    remembered.load_state(through_a_file(history.state()))
    assert remembered.rates == history.rates | {"new": 0.8}


def test_what_cannot_be_is_refused():
    costs = random_costs(np.random.default_rng(0), drafters=3)
    for acceptances in ([], [0.5, 0.5], [-0.1, 0.5], [0.5, 1.1]):
        with pytest.raises(ValueError, match="acceptances"):
            profile(costs, acceptances)
    for name in ("drafters", "plain", "verification"):
        with pytest.raises(ValueError, match=name):
            profile(dataclasses.replace(costs, **{name: {}}), [0.5])
    ladder = profile(costs, [0.5])
    with pytest.raises(ValueError, match="no acceptance of d2"):
        ladder.ranking({"d0": 0.1, "d1": 0.2}, 1)
