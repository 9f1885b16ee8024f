"""Draft trees: a drafter proposes one for every slot, and one forward pass verifies them.

A tree continues the last token of a slot, which is sampled but not in the cache yet. A chain is a tree. In
the verifying pass the last token is node 0, so that N draft nodes make M = N + 1 nodes (`with_root`).

Trees differ in size, and a slot may have none. A pass computes only the nodes that `pack_rows` lists: those
of all slots, one after the other.
"""

import dataclasses

import numpy as np
from flax import struct
from jax import Array
from jax import numpy as jnp

from rljax.models.outlining import computed_once

MAX_NODES = 64
"""Largest number of nodes of a slot in a verifying pass, its last token included: the ancestors of a node are
64 bits."""

_WORD = 32


def most_nodes(depth: int, top_k: int) -> int:
    """Returns the largest number of draft nodes of a tree with `depth` levels, of which `top_k` nodes have
    `top_k` children each (EAGLE-2).
    """
    return min(top_k + (depth - 1) * top_k**2, MAX_NODES - 1)


@dataclasses.dataclass(frozen=True)
class DraftStrategy:
    """The shape of a draft tree; static in a compiled program.

    Attributes:
      depth: levels of the tree, the most tokens that can be accepted (TLT's Draft_Depth).
      top_k: children of a node, and nodes of a level that are continued; 1 drafts a chain.
      nodes: draft nodes of a slot, N (TLT's Tokens_to_Verify, without the slot's last token).

    Raises:
      ValueError: a number below 1, or more nodes than a tree of this depth and width has.
    """

    depth: int
    top_k: int
    nodes: int

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1:
            raise ValueError(f"depth and top_k must be at least 1, got {self}")
        most = most_nodes(self.depth, self.top_k)
        if not 1 <= self.nodes <= most:
            raise ValueError(f"nodes: a tree of depth {self.depth} and top_k {self.top_k} has 1 to {most}")


@struct.dataclass
class DraftTree:
    """Draft nodes of B slots, N a slot; NumPy arrays on the host, JAX arrays on the device.

    Attributes:
      tokens: int32 [B, N].
      parents: int32 [B, N], the node that a node continues, -1 for the slot's last token. Parents precede
        their children.
      valid: bool [B, N]. An invalid entry, and everything below it, is ignored.
    """

    tokens: Array
    parents: Array
    valid: Array

    @property
    def nodes(self) -> int:
        """N."""
        return self.tokens.shape[1]


@struct.dataclass
class ScoredTree:
    """A draft tree with the drafter's probabilities, the most promising nodes first.

    Attributes:
      tree: `DraftTree`, N nodes a slot.
      log_probability: float32 [B, N], log probability of a node and all its ancestors; -inf where there is
        no node.
    """

    tree: DraftTree
    log_probability: Array


def empty_tree(batch: int, nodes: int) -> DraftTree:
    """Returns a tree without valid nodes, on the host, to be filled in."""
    shape = (batch, nodes)
    return DraftTree(
        tokens=np.zeros(shape, np.int32), parents=np.full(shape, -1, np.int32), valid=np.zeros(shape, bool)
    )


@struct.dataclass
class RootedTree:
    """A draft tree below the slots' last tokens: M = N + 1 nodes, node 0 the last token.

    Attributes:
      tokens: int32 [B, M].
      parents: int32 [B, M]; node 0 is its own parent.
      valid: bool [B, M]; node 0 always is.
      ancestors: bool [B, M, M]; at [b, i, j], whether node j is on the path from node 0 to node i, both
        included.
      depth: int32 [B, M], 0 for node 0.
    """

    tokens: Array
    parents: Array
    valid: Array
    ancestors: Array
    depth: Array


@struct.dataclass
class NodeRows:
    """Rows of a pass: R rows for some of the M nodes of each of B slots.

    Attributes:
      slots: int32 [R], slot of each row.
      nodes: int32 [R], node of each row; 0 is the last token.
      row_of: int32 [B, M], row of every node; R for nodes that are not computed.
    """

    slots: Array
    nodes: Array
    row_of: Array

    @property
    def rows(self) -> int:
        """R."""
        return self.slots.shape[0]

    def take(self, x: Array) -> Array:
        """Gathers values of nodes [B, M, ...] into rows [R, ...]."""
        index = self.slots * x.shape[1] + self.nodes
        return jnp.take(x.reshape(-1, *x.shape[2:]), index, axis=0, mode="clip")

    def scatter(self, x: Array) -> Array:
        """Scatters values of rows [R, ...] to their nodes [B, M, ...]; other nodes get undefined values."""
        return jnp.take(x, self.row_of, axis=0, mode="clip")


def pack_rows(tree: DraftTree, slots: np.ndarray, rows: int) -> NodeRows:
    """Returns rows for the last tokens of `slots` and their valid nodes, on the host.

    Args:
      slots: int32 [n], slots that take part; the others do not change.
      rows: number of rows, R; rows without a node compute node 0 of slot 0 again.

    Raises:
      ValueError: more nodes than rows.
    """
    batch, nodes = tree.tokens.shape
    computed = np.zeros((batch, nodes + 1), bool)
    computed[slots, 0] = True
    computed[slots, 1:] = tree.valid[slots]
    slot, node = np.nonzero(computed)
    if len(slot) > rows:
        raise ValueError(f"{len(slot)} nodes, expected at most {rows}")
    row_of = np.full(computed.shape, rows, np.int32)
    row_of[slot, node] = np.arange(len(slot))
    padding = np.zeros(rows - len(slot), np.int32)
    return NodeRows(
        slots=np.concatenate([slot.astype(np.int32), padding]),
        nodes=np.concatenate([node.astype(np.int32), padding]),
        row_of=row_of,
    )


def all_rows(batch: int, nodes: int) -> NodeRows:
    """Returns rows for all nodes of all slots, on the host."""
    slot, node = np.divmod(np.arange(batch * nodes, dtype=np.int32), np.int32(nodes))
    return NodeRows(
        slots=slot, nodes=node, row_of=np.arange(batch * nodes, dtype=np.int32).reshape(batch, nodes)
    )


def with_root(tree: DraftTree, last_tokens: Array) -> RootedTree:
    """Returns `tree` with the last tokens, int32 [B], as node 0."""
    if tree.nodes + 1 > MAX_NODES:
        raise ValueError(f"{tree.nodes + 1} nodes, expected at most {MAX_NODES}")
    return computed_once(_rooted)(tree, last_tokens)


def _rooted(tree: DraftTree, last_tokens: Array) -> RootedTree:
    batch = tree.tokens.shape[0]
    root = jnp.zeros((batch, 1), jnp.int32)
    parents = jnp.concatenate([root, tree.parents + 1], axis=1)
    ancestors = _ancestors(parents)
    return RootedTree(
        tokens=jnp.concatenate([last_tokens[:, None], tree.tokens], axis=1),
        parents=parents,
        valid=jnp.concatenate([root == 0, tree.valid], axis=1),
        ancestors=ancestors,
        depth=jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1,
    )


def _ancestors(parents: Array) -> Array:
    """Returns the ancestors of every node, bool [B, M, M], from its parents, int32 [B, M].

    Pointer jumping: a set of ancestors is a few words of bits, and every round doubles its reach.
    """
    nodes = parents.shape[1]
    node = jnp.arange(nodes, dtype=jnp.int32)
    words = -(-nodes // _WORD)
    bit = jnp.uint32(1) << (node % _WORD).astype(jnp.uint32)  # [M]
    sets = [
        jnp.broadcast_to(jnp.where(node // _WORD == word, bit, jnp.uint32(0))[None], parents.shape)
        for word in range(words)
    ]
    reach = 1
    while reach < nodes:
        sets = [bits | jnp.take_along_axis(bits, parents, axis=1) for bits in sets]
        parents = jnp.take_along_axis(parents, parents, axis=1)
        reach *= 2
    per_node = jnp.stack(sets, axis=-1)[:, :, node // _WORD]  # [B, M, M]: the word that holds node j's bit
    return (per_node & bit[None, None]) != 0
