"""Attention of draft trees against a KV cache, and of plain decoding, which is the tree of one node."""

import jax.numpy as jnp
from jax import Array

from rljax.kernels import switch
from rljax.numerics.rows import Numerics


def tree_attention(
    queries: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    node_keys: Array,
    node_values: Array,
    ancestors: Array,
    depth: Array,
    numerics: Numerics,
    implementation: switch.Implementation = None,
) -> Array:
    """Every node sees the committed tokens of its slot, and its own ancestors.

    Args:
      queries: [B, M, H, D], M up to 64; H is a multiple of Hk.
      keys: the cache's, [B, Hk, S / 64, D, 64]: blocks of 64 positions, transposed.
      values: the cache's, [B, Hk, S, D], of the same type.
      lengths: int32 [B], committed tokens, 0 to S. What lies in the block of the last of them and behind it
        may be any finite number; no block behind it is read by the kernels.
      node_keys, node_values: [B, M, Hk, D], in the cache's type.
      ancestors: bool [B, M, M], [b, i, j]: node j lies on the path to node i, i included. Parents precede
        their children.
      depth: int32 [B, M], 0 for the first node of a path: node i stands at position lengths + depth. `xla`
        adds up where decoding would; kernels add up the nodes last.
      numerics: see `Numerics`; kernels have an order of their own.
      implementation: see `switch.KernelChoice`; the default depends on (H, Hk, D), alike for decoding.

    Returns:
      [B, M, H, D] in the queries' type: softmax(q k / sqrt(D)) v, summed in float32; zeros where a node sees
      nothing.

    Raises:
      Refused: the implementation cannot compute this.

    The split over the cache is flash-decoding's (Dao et al., 2023), the tree mask SpecInfer's (Miao et al.,
    2024). See `docs/kernels/tree_attention.md`.
    """
    args = (queries, keys, values, lengths, node_keys, node_values, ancestors, depth, numerics)
    return switch.call("tree_attention", implementation, _sizes(queries, values), *args)


def decode_attention(
    queries: Array,
    keys: Array,
    values: Array,
    positions: Array,
    node_keys: Array,
    node_values: Array,
    numerics: Numerics,
    implementation: switch.Implementation = None,
) -> Array:
    """Every slot's one new token sees itself and what stands before it.

    The kernels compute it as a tree of one node. `xla` reads the token's key and value from the cache.

    Args:
      queries: [B, 1, H, D].
      keys, values: see `tree_attention`; the token's are written at its position.
      positions: int32 [B], where the token stands.
      node_keys, node_values: the token's once more, [B, 1, Hk, D].
      numerics, implementation: see `tree_attention`.

    Returns:
      [B, 1, H, D] in the queries' type.

    Raises:
      Refused: the implementation cannot compute this.
    """
    batch = queries.shape[0]
    itself, depth = jnp.ones((batch, 1, 1), bool), jnp.zeros((batch, 1), jnp.int32)
    args = (queries, keys, values, positions, node_keys, node_values, itself, depth, numerics)
    return switch.call("tree_attention", implementation, _sizes(queries, values), *args, nodes_in_cache=True)


def _sizes(queries: Array, values: Array) -> tuple[int, ...]:
    """(H, Hk, D)."""
    return queries.shape[2], values.shape[1], values.shape[3]
