"""What counts as a draft, against a plain loop; whatever a drafter returns, it is sorted out or named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import Drafts, Queries
from drafters.validation import chains, usable_nodes

VOCAB = 8


def queries_of(budgets, nodes):
    n = len(budgets)
    return Queries(np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.asarray(budgets, np.int32), nodes)


def drafts_of(rows, nodes, counts=None):
    """Rows of (token, parent) pairs."""
    drafts = Drafts(
        np.full((len(rows), nodes), 3, np.int32),
        np.full((len(rows), nodes), -1, np.int32),
        np.zeros((len(rows), nodes), np.float32),
        np.asarray([len(row) for row in rows] if counts is None else counts, np.int32),
    )
    for i, row in enumerate(rows):
        for node, (token, parent) in enumerate(row):
            drafts.tokens[i, node], drafts.parents[i, node] = token, parent
            drafts.log_probability[i, node] = -node
    return drafts


def plainly_usable(tokens, parents, count, budget):
    """One row, node by node."""
    usable = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        fits = node < count and node < budget and 0 <= token < VOCAB
        usable.append(fits and (parent == -1 or (0 <= parent < node and usable[parent])))
    return usable


def test_every_reason_to_leave_a_node_out():
    whole = [(1, -1), (2, 0), (3, 1), (4, 2)]
    cases = {
        "all of a chain": (whole, None, 4, [True] * 4),
        "beyond the count": (whole, 2, 4, [True, True, False, False]),
        "beyond the budget": (whole, None, 3, [True, True, True, False]),
        "a count beyond the array": (whole, 99, 4, [True] * 4),
        "a negative count": (whole, -1, 4, [False] * 4),
        "a negative token, and all below it": ([(1, -1), (-1, 0), (3, 1), (4, 0)], None, 4, [1, 0, 0, 1]),
        "a token beyond the vocabulary": ([(VOCAB, -1), (VOCAB - 1, -1)], None, 4, [0, 1, 0, 0]),
        "its own parent": ([(1, 0), (2, -1)], None, 4, [0, 1, 0, 0]),
        "a later parent": ([(1, 1), (2, -1), (3, 1)], None, 4, [0, 1, 1, 0]),
        "a parent below -1": ([(1, -2), (2, 0)], None, 4, [0, 0, 0, 0]),
        "a parent beyond the array": ([(1, -1), (2, 99)], None, 4, [1, 0, 0, 0]),
        "twice the same token": ([(1, -1), (1, -1)], None, 4, [1, 1, 0, 0]),
    }
    rows, counts, budgets, wanted = zip(*cases.values(), strict=True)
    counts = [len(row) if count is None else count for row, count in zip(rows, counts, strict=True)]
    usable = usable_nodes(drafts_of(rows, 4, counts), queries_of(budgets, 4), VOCAB)
    assert usable.dtype == bool
    for name, mine, expected in zip(cases, usable.tolist(), wanted, strict=True):
        assert mine == [bool(each) for each in expected], name


integers = st.integers(-2, VOCAB + 1)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 4), st.integers(1, 6))
def test_usable_nodes_are_those_of_a_plain_loop(data, n, nodes):
    grid = st.lists(integers, min_size=n * nodes, max_size=n * nodes)
    row = st.lists(integers, min_size=n, max_size=n)
    tokens, parents = (np.asarray(data.draw(grid), np.int32).reshape(n, nodes) for _ in range(2))
    if data.draw(st.booleans()):  # a tree for the most part
        parents = np.minimum(parents, np.arange(nodes, dtype=np.int32) - 1)
    counts, budgets = (np.asarray(data.draw(row), np.int32) for _ in range(2))
    drafts = Drafts(tokens, parents, np.zeros((n, nodes), np.float32), counts)
    usable = usable_nodes(drafts, queries_of(budgets, nodes), VOCAB)
    expected = [plainly_usable(*each) for each in zip(tokens, parents, counts, budgets, strict=True)]
    assert usable.shape == (n, nodes) and usable.tolist() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [[1, 2]]}, r"tokens should be an array \[1, 2\], got list"),
        ({"tokens": None}, r"tokens should be an array \[1, 2\], got NoneType"),
        ({"tokens": np.zeros((1, 3), int)}, r"tokens should be an array \[1, 2\], got \(1, 3\)"),
        ({"parents": np.zeros(2, int)}, r"parents should be an array \[1, 2\], got \(2,\)"),
        ({"counts": np.zeros((1, 1), int)}, r"counts should be an array \[1\], got \(1, 1\)"),
        ({"log_probability": np.zeros((2, 2))}, r"log_probability should be an array \[1, 2\]"),
        ({"tokens": np.zeros((1, 2))}, "tokens should be integers, got float64"),
        ({"tokens": np.zeros((1, 2), bool)}, "tokens should be integers, got bool"),
        ({"parents": np.zeros((1, 2), np.uint32)}, "parents should be signed integers, got uint32"),
        ({"counts": np.zeros(1)}, "counts should be integers, got float64"),
        ({"log_probability": np.zeros((1, 2), object)}, "log_probability should be floats, got object"),
        ({"log_probability": np.full((1, 2), "x")}, "log_probability should be floats, got <U1"),
        *((each, r"tokens should be an array \[1, 2\]") for each in (None, [], "drafts", np.zeros(3))),
        *(({"tokens": np.asarray([[1, 2]], t)}, None) for t in (np.int8, np.int64, np.uint16, np.uint64)),
    ],
    ids=str,
)
def test_what_are_no_drafts_is_named_and_any_integers_are_tokens(change, message):
    drafts = change
    if isinstance(change, dict):
        drafts = dataclasses.replace(drafts_of([[(1, -1), (2, 0)]], 2), **change)
    if message is None:
        assert usable_nodes(drafts, queries_of([2], 2), VOCAB).all()
        return
    with pytest.raises(ValueError, match=message):
        usable_nodes(drafts, queries_of([2], 2), VOCAB)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, VOCAB), st.integers(-2, 6)), min_size=1, max_size=7))
def test_chains_are_those_of_a_plain_walk(row):
    """Of first usable children; a chain is a draft like any other."""
    nodes, drafts = len(row), drafts_of([row], len(row))
    usable = usable_nodes(drafts, queries_of([nodes], nodes), VOCAB)
    walk = [-1]
    while children := [node for node in range(nodes) if row[node][1] == walk[-1] and usable[0, node]]:
        walk.append(children[0])
    count = len(walk) - 1
    cut, valid = chains(drafts, usable)
    assert cut.tokens.dtype == cut.parents.dtype == np.int32 and cut.counts.tolist() == [count]
    assert cut.tokens[0, :count].tolist() == [row[node][0] for node in walk[1:]]
    assert cut.log_probability[0, :count].tolist() == [-node for node in walk[1:]]
    assert cut.parents[0].tolist() == list(range(-1, nodes - 1))
    assert valid[0].tolist() == [node < count for node in range(nodes)]
    np.testing.assert_array_equal(usable_nodes(cut, queries_of([nodes], nodes), VOCAB), valid)
