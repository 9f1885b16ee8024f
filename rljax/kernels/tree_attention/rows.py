"""Layout of a tree in kernels: rows of queries by key head, and the nodes as one block of keys.

Row g * M + m of a key head is node m under the g-th of the query heads that share it (grouped-query
attention), so that a key is read once for all of them.
"""

import jax.numpy as jnp
from jax import Array

from rljax.numerics.attention import KEY_BLOCK


def pack_queries(queries: Array, kv_heads: int, multiple: int) -> Array:
    """Packs [B, M, H, D] into [B, Hk, R, D], with R a multiple of `multiple`; padding rows are 0."""
    batch, nodes, heads, dim = queries.shape
    group = heads // kv_heads
    rows = queries.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * nodes, dim)
    return jnp.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[2] % multiple), (0, 0)])


def unpack_rows(rows: Array, nodes: int, heads: int) -> Array:
    """Inverts `pack_queries`: [B, Hk, R, D] -> [B, M, H, D]."""
    batch, kv_heads, _, dim = rows.shape
    group = heads // kv_heads
    nodes_of_heads = rows[:, :, : group * nodes].reshape(batch, kv_heads, group, nodes, dim)
    return nodes_of_heads.transpose(0, 3, 1, 2, 4).reshape(batch, nodes, heads, dim)


def pack_nodes(node_keys: Array, node_values: Array) -> tuple[Array, Array]:
    """Packs keys and values [B, M, Hk, D] as [B, Hk, D, KEY_BLOCK] and [B, Hk, KEY_BLOCK, D], zero-padded."""
    pad = (0, KEY_BLOCK - node_keys.shape[1])
    keys = jnp.pad(node_keys.transpose(0, 2, 3, 1), [(0, 0), (0, 0), (0, 0), pad])
    values = jnp.pad(node_values.transpose(0, 2, 1, 3), [(0, 0), (0, 0), pad, (0, 0)])
    return keys, values
