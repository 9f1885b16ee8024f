"""Compaction: an accepted path's keys and values into the KV cache, behind what is committed."""

from jax import Array

from rljax.kernels import switch


def compaction(
    keys: Array,
    values: Array,
    node_keys: Array,
    node_values: Array,
    path: Array,
    count: Array,
    lengths: Array,
    implementation: switch.Implementation = None,
) -> tuple[Array, Array]:
    """One layer's cache with the nodes of a path at the positions from `lengths` on.

    In place where the caller gives the cache up. Kernels read and write whole blocks of 64 positions, only
    those that a path reaches into.

    Args:
      keys: the cache's, [B, Hk, S / 64, D, 64]: blocks of 64 positions, transposed.
      values: the cache's, [B, Hk, S, D].
      node_keys, node_values: [B, M, Hk, D], in the cache's type.
      path: int32 [B, P], the node at every depth; anything from `count` on.
      count: int32 [B], nodes of the path to be written, 0 to P.
      lengths: int32 [B], committed tokens. What would stand at S or behind it is left out.
      implementation: see `switch.KernelChoice`; the default depends on (Hk, D).

    Returns:
      keys and values.

    Raises:
      Refused: the implementation cannot compute this.
    """
    args = (keys, values, node_keys, node_values, path, count, lengths)
    return switch.call("compaction", implementation, (values.shape[1], values.shape[3]), *args)
