"""Compaction in plain JAX: two scatters."""

import jax.numpy as jnp
from jax import Array

from rljax.numerics.attention import KEY_BLOCK


def compaction(
    keys: Array,
    values: Array,
    node_keys: Array,
    node_values: Array,
    path: Array,
    count: Array,
    lengths: Array,
) -> tuple[Array, Array]:
    """See the package."""
    batch, most = path.shape
    capacity = values.shape[2]
    slots = jnp.arange(batch)[:, None]
    depth = jnp.arange(most)[None]
    first = jnp.where(depth < count[:, None], lengths[:, None], capacity)  # out of range: skipped
    positions = first + depth
    block, lane = positions // KEY_BLOCK, positions % KEY_BLOCK
    k, v = (jnp.take_along_axis(x, path[:, :, None, None], axis=1) for x in (node_keys, node_values))
    keys = keys.at[slots, :, block, :, lane].set(k, mode="drop", unique_indices=True)
    values = values.at[slots, :, positions].set(v, mode="drop", unique_indices=True)
    return keys, values


def only_node(lengths: Array) -> tuple[Array, Array]:
    """Returns path [B, 1] and count [B] of every slot's only node, as in decoding; lengths int32 [B]."""
    return jnp.zeros_like(lengths)[:, None], jnp.ones_like(lengths)
