"""scripts/bench_cluster.py: what it simulates is a whole rollout."""

import pytest

from rljax.errors import UserError
from tests.scripts import load_script

bench = load_script("bench_cluster")


def test_simulated_workers_decode_everything():
    events, seconds = bench.simulate(workers=3, slots=4, requests=64)
    pieces = 64 * 64 // 8  # of 64 responses of 64 tokens; a host sync has those of four slots
    assert events > pieces / 4
    assert seconds > 0


def test_rows():
    rows = bench.coordinator_rows([(2, 4, 32), (5, 4, 32)], repeats=1)
    assert len({row.name for row in rows}) == 2
    assert all(row.value > 0 and row.ratio > 0 for row in rows)


def test_rollouts_with_the_same_tokens_are_compared_one_by_one():
    (row,) = bench.compared("two", ([100, 300], [1.0, 2.0]), "none", ([100, 300], [2.0, 3.0]))
    assert (row.value, row.baseline_value, row.ratio) == (400 / 3, 80.0, 1.75)
    details = row.as_json()
    assert (details["ratio_low"], details["ratio_high"], details["rounds"]) == (1.5, 2.0, 2)
    with pytest.raises(UserError, match=r"two: .* tokens in its rollouts"):
        bench.compared("two", ([100, 301], [1.0, 2.0]), "none", ([100, 300], [2.0, 3.0]))
