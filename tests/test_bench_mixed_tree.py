"""scripts/bench_mixed_tree.py: its baseline merges alike, and its rows say what they compare."""

import numpy as np
import pytest

from drafters.mixed import mix
from tests.scripts import load_script

bench = load_script("bench_mixed_tree")


def test_the_baseline_merges_alike():
    rng = np.random.default_rng(0)
    proposals, probabilities = zip(*(bench.random_drafts(rng, 2, 12, 3) for _ in range(3)), strict=True)
    mixture = mix(proposals, probabilities, np.full(2, 9), 9, np.ones(8))
    for query in range(2):
        paths = []
        for token, parent in zip(mixture.drafts.tokens[query], mixture.drafts.parents[query], strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert paths == bench.merged_in_python(proposals, probabilities, query, 9)


@pytest.mark.parametrize("kind", ["independent", "one knows", "the same"])
def test_each_drafter_is_calibrated(kind):
    """What it says is the mean over all that it cannot tell apart."""
    sampled, said = bench.world(kind, np.random.default_rng(0))
    np.testing.assert_allclose(sampled.sum(axis=-1), 1.0)
    for prediction in said:
        for value in np.unique(prediction[..., 0]):
            np.testing.assert_allclose(sampled[prediction[..., 0] == value][:, 0].mean(), value)


def test_rows():
    rows = bench.worth_rows(rounds=4, queries=32) + bench.merge_rows(2, 4, repeats=1)
    assert all(row.value > 0 and row.ratio > 0 for row in rows)
    assert len({row.name for row in rows}) == len(rows) == 11
