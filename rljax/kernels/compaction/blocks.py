"""Blocks of the cache that a path is written to, for both kernels.

A path of P nodes reaches at most `reach(P)` blocks of 64 positions, counted from the block that contains the
slot's length.
"""

import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.attention import KEY_BLOCK


def reach(most: int) -> int:
    """Returns the largest number of blocks that a path of `most` nodes reaches."""
    return -(-(most + KEY_BLOCK - 1) // KEY_BLOCK)


def fresh_blocks(entries: Array, path: Array, lengths: Array) -> Array:
    """Returns the path's keys or values [B, M, Hk, D] at their positions in the blocks, undefined elsewhere.

    Returns:
      [B, Hk, reach, 64, D].
    """
    batch, most = path.shape
    blocks = reach(most)
    lanes = jnp.arange(blocks * KEY_BLOCK, dtype=jnp.int32)[None]
    depth = jnp.clip(lanes - (lengths % KEY_BLOCK)[:, None], 0, most - 1)
    nodes = jnp.take_along_axis(path, depth, axis=1)[:, :, None, None]
    placed = jnp.take_along_axis(entries, nodes, axis=1)
    return placed.reshape(batch, blocks, KEY_BLOCK, *placed.shape[2:]).transpose(0, 3, 1, 2, 4)


def written(length: Array, count: Array, index: Array, in_cache: int) -> tuple[Array, Array, Array]:
    """Returns the part of a path in the `index`-th block that it may reach; scalars int32.

    Args:
      length, count: number of committed tokens of the slot, and of nodes to write.
      in_cache: number of blocks of the cache.

    Returns:
      The block, and begin and end of the part in it, which is empty unless begin < end.
    """
    block = lax.div(length, KEY_BLOCK) + index
    begin = jnp.maximum(length - block * KEY_BLOCK, 0)
    end = jnp.minimum(length + count - block * KEY_BLOCK, KEY_BLOCK)
    return block, begin, jnp.where(block < in_cache, end, 0)
