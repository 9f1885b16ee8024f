"""Draft trees: ancestors, depths and the accepted path against loops over single nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.draft_tree import MAX_NODES, DraftTree, all_rows, empty_tree, pack_rows, with_root
from rljax.engine.verification import accepted_path

ROOTED = jax.jit(with_root)
ACCEPTED = jax.jit(lambda tree, last, sampled: accepted_path(with_root(tree, last), sampled))


def random_trees(rng, batch, nodes, vocab_size=4, chain=0.4, valid=0.9):
    """Trees that mix chains with random branches; few tokens, so that siblings often repeat each other."""
    tree = empty_tree(batch, nodes)
    tree.tokens[:] = rng.integers(vocab_size, size=(batch, nodes))
    tree.valid[:] = rng.random((batch, nodes)) < valid
    for node in range(nodes):
        branch = rng.integers(-1, node, size=batch) if node else np.full(batch, -1)
        tree.parents[:, node] = np.where(rng.random(batch) < chain, node - 1, branch)
    return tree


def path_to(parents, node):
    """Rooted nodes from node 0 to rooted `node`, whose parents are `parents` [N] of the draft nodes."""
    path = [node]
    while path[-1] > 0:
        path.append(int(parents[path[-1] - 1]) + 1)
    return path[::-1]


def walk(tree, sampled, slot):
    """The accepted path of one slot, from the root down: all nodes that continue it, level by level."""
    level = [0]
    while True:
        deeper = [
            node + 1
            for node in range(tree.nodes)
            if tree.valid[slot, node]
            and tree.parents[slot, node] + 1 in level
            and tree.tokens[slot, node] == sampled[slot, tree.parents[slot, node] + 1]
        ]
        if not deeper:
            return path_to(tree.parents[slot], min(level))
        level = deeper


SHAPES = [(1, 1.0), (7, 0.4), (32, 0.4), (33, 0.6), (63, 0.0), (63, 1.0)]


@pytest.mark.default_cases("63-0.0", "7-0.4", "1-1.0")
@pytest.mark.parametrize(("nodes", "chain"), SHAPES)
def test_ancestors_and_depths(nodes, chain):
    rng = np.random.default_rng(nodes)
    tree = random_trees(rng, 16, nodes, chain=chain)
    last = rng.integers(4, size=16).astype(np.int32)
    rooted = ROOTED(tree, last)
    expected = np.zeros((16, nodes + 1, nodes + 1), bool)
    depth = np.zeros((16, nodes + 1), np.int32)
    for slot in range(16):
        for node in range(nodes + 1):
            path = path_to(tree.parents[slot], node)
            expected[slot, node, path] = True
            depth[slot, node] = len(path) - 1
    np.testing.assert_array_equal(rooted.ancestors, expected)
    np.testing.assert_array_equal(rooted.depth, depth)
    if chain == 1.0:
        assert depth.max() == nodes
    np.testing.assert_array_equal(rooted.tokens[:, 0], last)
    np.testing.assert_array_equal(rooted.tokens[:, 1:], tree.tokens)
    np.testing.assert_array_equal(rooted.parents[:, 0], 0)
    np.testing.assert_array_equal(rooted.parents[:, 1:], tree.parents + 1)
    assert np.asarray(rooted.valid)[:, 0].all()
    np.testing.assert_array_equal(rooted.valid[:, 1:], tree.valid)


def test_empty_trees_and_too_large_ones():
    rooted = ROOTED(empty_tree(3, 0), np.array([5, 6, 7], np.int32))  # a root alone
    np.testing.assert_array_equal(rooted.tokens, [[5], [6], [7]])
    np.testing.assert_array_equal(rooted.ancestors, np.ones((3, 1, 1), bool))
    np.testing.assert_array_equal(rooted.depth, [[0], [0], [0]])
    tree = empty_tree(3, 5)
    assert tree.nodes == 5 and not tree.valid.any() and (tree.parents == -1).all()
    path, count = ACCEPTED(tree, np.zeros(3, np.int32), np.zeros((3, 6), np.int32))  # all tokens agree
    np.testing.assert_array_equal(count, [1, 1, 1])
    np.testing.assert_array_equal(path, np.zeros((3, 6)))
    with pytest.raises(ValueError, match=f"{MAX_NODES + 1} nodes"):
        with_root(empty_tree(2, MAX_NODES), np.zeros(2, np.int32))


@pytest.mark.default_cases("63-0.0-*", "7-0.4-*", "1-*")
@pytest.mark.parametrize("vocab_size", [1, 2, 4])
@pytest.mark.parametrize(("nodes", "chain"), SHAPES)
def test_accepted_path(nodes, chain, vocab_size):
    """Random trees, half-random samples, siblings with the same token, and invalid nodes: in between, or a
    drafter's leftovers, whose parents are behind them, out of range or below -1.
    """
    rng = np.random.default_rng(100 * nodes + vocab_size)
    batch = 64
    tree = random_trees(rng, batch, nodes, vocab_size, chain)
    sampled = rng.integers(vocab_size, size=(batch, nodes + 1)).astype(np.int32)
    for node in range(nodes):  # most nodes sample one of their children
        agrees = rng.random(batch) < 0.7
        parent = tree.parents[:, node] + 1
        sampled[agrees, parent[agrees]] = tree.tokens[agrees, node]
    used = nodes * 2 // 3 + 1
    tree.valid[::2, used:] = False
    tree.parents[::2, used:] = rng.integers(-20, 99, size=tree.parents[::2, used:].shape)
    last = rng.integers(vocab_size, size=batch).astype(np.int32)
    path, count = map(np.asarray, ACCEPTED(tree, last, sampled))
    counts = []
    for slot in range(batch):
        expected = walk(tree, sampled, slot)
        counts.append(len(expected))
        assert count[slot] == len(expected)
        assert path[slot, : count[slot]].tolist() == expected
        assert (path[slot, count[slot] :] == 0).all()
    assert max(counts) > 1 and (nodes == 1 or chain == 0.0 or max(counts) > 2)


def test_of_repeated_siblings_the_one_that_goes_on_is_taken():
    tree = DraftTree(
        tokens=np.array([[3, 3, 9, 8]], np.int32),
        parents=np.array([[-1, -1, 0, 1]], np.int32),
        valid=np.ones((1, 4), bool),
    )
    last = np.array([1], np.int32)
    for sampled, expected in (
        ([3, 9, 8, 5, 6], [0, 1, 3]),  # both go on: the first
        ([3, 9, 9, 5, 6], [0, 1, 3]),
        ([3, 8, 8, 5, 6], [0, 2, 4]),
        ([3, 0, 0, 5, 6], [0, 1]),  # neither: the first
        ([9, 9, 8, 5, 6], [0]),
    ):
        path, count = ACCEPTED(tree, last, np.array([sampled], np.int32))
        assert np.asarray(path)[0, : int(count[0])].tolist() == expected


def test_rows_are_the_nodes_of_the_slots_that_take_part():
    rng = np.random.default_rng(0)
    for _ in range(12):
        tree = empty_tree(5, 6)
        tree.valid[:] = rng.random((5, 6)) < 0.5
        slots = rng.permutation(5)[: rng.integers(1, 6)]
        count = len(slots) + int(tree.valid[slots].sum())
        rows = pack_rows(tree, slots, count + int(rng.integers(0, 4)))
        nodes = np.concatenate([np.ones((5, 1), bool), tree.valid], axis=1)
        for slot in range(5):
            for node in range(7):
                row = rows.row_of[slot, node]
                if slot in slots and nodes[slot, node]:
                    assert (rows.slots[row], rows.nodes[row]) == (slot, node)
                else:
                    assert row == rows.rows
        values = rng.random((5, 7, 2))
        there = np.asarray(rows.take(values))
        back = np.asarray(rows.scatter(jnp.asarray(there)))
        computed = rows.row_of < rows.rows
        np.testing.assert_array_equal(back[computed], values.astype(np.float32)[computed])
        with pytest.raises(ValueError, match=f"{count} nodes, expected at most {count - 1}"):
            pack_rows(tree, slots, count - 1)
    values = np.arange(24).reshape(4, 6)
    rows = all_rows(4, 6)  # of all nodes
    np.testing.assert_array_equal(rows.take(values), values.ravel())
    np.testing.assert_array_equal(rows.scatter(jnp.asarray(values.ravel())), values)
