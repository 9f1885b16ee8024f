"""scripts/bench_suffix_cache.py: its traces, its rows with arctic-inference and without, what it counts."""

import types

import numpy as np
import pytest

from drafters.suffix_automaton import Proposals
from tests.scripts import load_script

bench = load_script("bench_suffix_cache")


class _Tree:
    """Stands for the C++ tree: always drafts 1, 2."""

    def __init__(self, depth):
        self.inserted = []

    def extend_ndarray(self, sequence, tokens):
        self.inserted += tokens.tolist()

    def speculate_ndarray(self, context, budget, factor, offset, least_probability, tree):
        return types.SimpleNamespace(token_ids=[1, 2], parents=[-1, 0])

    def estimate_memory(self):
        return 100 * len(self.inserted)


@pytest.fixture(params=[False, True], ids=["without arctic-inference", "with it"])
def arctic(request, monkeypatch):
    monkeypatch.setattr(bench, "SuffixTree", _Tree if request.param else None)
    return request.param


def test_responses_share_long_stretches_and_come_from_the_seed():
    responses = bench.rl_like_responses(3, 8, 400)
    assert responses.shape == (8, 400) and responses.dtype == np.int32
    assert responses.min() >= 0 and responses.max() < bench.VOCABULARY
    np.testing.assert_array_equal(responses, bench.rl_like_responses(3, 8, 400))
    assert not np.array_equal(responses, bench.rl_like_responses(4, 8, 400))
    seen = {tuple(row[i : i + 10]) for row in responses[:-1].tolist() for i in range(391)}
    last = responses[-1].tolist()
    assert 0.3 < np.mean([tuple(last[i : i + 10]) in seen for i in range(391)]) < 0.95


def test_rows(arctic):
    inserted = bench.insert_rows(4, 64, prompts=2, repeats=1)
    queried = bench.query_rows(4, 128, repeats=1)
    assert (len(inserted), len(queried)) == (3, 2)
    for row in inserted:
        assert row.unit == "us" and row.value > 0
        assert (row.baseline == bench.MISSING) is not arctic
        assert row.ratio == (pytest.approx(row.baseline_value / row.value) if arctic else 1.0)
    for row in queried:
        assert 0 < row.details["accepted"] <= row.details["draft_tokens"] <= bench.BUDGET
        assert row.details.get("baseline_draft_tokens", 2.0) == 2.0
        assert row.details["amount"] == 4 * len(range(4, 112, 4))
    for row in bench.memory_rows(4, 64, prompts=2):
        assert row.unit == "bytes/token" and 0 < row.details["used"] <= row.value
        assert row.baseline_value == (100.0 if arctic else row.value)
    (row,) = bench.begin_rows(3, 2, 40, repeats=2)
    assert (row.details["prompts"], row.details["indexed_ahead"], row.details["tokens"]) == (3, 3, 240)
    assert row.unit == "ms" and row.value > 0


def test_quality_counts_what_the_response_goes_on_with():
    responses = np.array([[*range(4), *range(100, 116)], [*range(4), *range(100, 116)]], np.int32)
    queries = bench.Queries(responses, range(4, 5))
    # 100 with children 7 and 101, and 102 behind the wrong one; nothing in the second row.
    tokens = np.array([[100, 7, 101, 102], [100, 101, 102, 103]], np.int32)
    parents = np.array([[-1, 0, 0, 1], [-1, 0, 1, 2]], np.int32)
    counts = np.array([4, 0], np.int32)
    drafts = [Proposals(tokens, parents, np.zeros((2, 4), np.float32), counts, counts)]
    assert queries.quality(bench.nodes_of(drafts)) == (2.0, 1.0)
    assert queries.quality(zip(tokens.tolist(), parents.tolist(), strict=True)) == (4.0, 3.0)
