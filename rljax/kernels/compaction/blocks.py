"""Blocks of the cache that a path is written to, for both kernels.

A path of P nodes reaches into at most `reach(P)` blocks of 64 positions. The j-th of them is the j-th behind
and including the block that holds the slot's length.
"""

import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.attention import KEY_BLOCK


def reach(most: int) -> int:
    """Blocks that a path of `most` nodes may reach into."""
    return -(-(most + KEY_BLOCK - 1) // KEY_BLOCK)


def fresh_blocks(entries: Array, path: Array, lengths: Array) -> Array:
    """The path's keys or values [B, M, Hk, D] where they will stand in their blocks, any others elsewhere.

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
      length, count: committed tokens of the slot, and nodes to write.
      in_cache: blocks that the cache has.

    Returns:
      the block, and from where in it to where; nothing if the first is not below the second.
    """
    block = lax.div(length, KEY_BLOCK) + index
    begin = jnp.maximum(length - block * KEY_BLOCK, 0)
    end = jnp.minimum(length + count - block * KEY_BLOCK, KEY_BLOCK)
    return block, begin, jnp.where(block < in_cache, end, 0)
