"""Blocks of the cache that a path is written to, for both kernels.

A path of P nodes reaches at most `reach(P)` blocks of `size` positions, 64 of them or a multiple, counted
from the block that contains the slot's length.
"""

import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.attention import KEY_BLOCK


def reach(most: int, size: int = KEY_BLOCK) -> int:
    """Returns the largest number of blocks that a path of `most` nodes reaches."""
    return -(-(most + size - 1) // size)


def fresh_blocks(entries: Array, path: Array, lengths: Array, size: int = KEY_BLOCK) -> Array:
    """Returns the path's keys or values [B, M, Hk, D] at their positions in the blocks, undefined elsewhere.

    Returns:
      [B, Hk, reach, size, D].
    """
    batch, most = path.shape
    blocks = reach(most, size)
    lanes = jnp.arange(blocks * size, dtype=jnp.int32)[None]
    depth = jnp.clip(lanes - (lengths % size)[:, None], 0, most - 1)
    nodes = jnp.take_along_axis(path, depth, axis=1)[:, :, None, None]
    placed = jnp.take_along_axis(entries, nodes, axis=1)
    return placed.reshape(batch, blocks, size, *placed.shape[2:]).transpose(0, 3, 1, 2, 4)


def written(
    length: Array, count: Array, index: Array, in_cache: int, size: int = KEY_BLOCK
) -> tuple[Array, Array, Array]:
    """Returns the part of a path in the `index`-th block that it may reach; scalars int32.

    Args:
      length, count: number of committed tokens of the slot, and of nodes to write.
      in_cache: number of blocks of the cache.

    Returns:
      The block, and begin and end of the part in it, which is empty unless begin < end.
    """
    block = lax.div(length, size) + index
    begin = jnp.maximum(length - block * size, 0)
    end = jnp.minimum(length + count - block * size, size)
    return block, begin, jnp.where(block < in_cache, end, 0)
