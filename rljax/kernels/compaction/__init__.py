"""Compaction: writes keys and values of an accepted path to the KV cache, after the committed tokens."""

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
    """Returns one layer's cache with the nodes of a path at the positions from `lengths` on.

    It works in place if the caller donates the cache. Kernels read and write only the whole blocks of 64
    positions that a path reaches.

    Args:
      keys: keys of the cache, [B, Hk, S / 64, D, 64]: blocks of 64 positions, transposed.
      values: values of the cache, [B, Hk, S, D].
      node_keys, node_values: [B, M, Hk, D], in the cache's type.
      path: int32 [B, P], the node at every depth; entries from `count` on are ignored.
      count: int32 [B], number of nodes of the path to write, 0 to P.
      lengths: int32 [B], number of committed tokens. Nodes at positions from S on are left out.
      implementation: see `switch.KernelChoice`; the default depends on (Hk, D).

    Returns:
      keys and values.

    Raises:
      Refused: the implementation cannot compute this.
    """
    args = (keys, values, node_keys, node_values, path, count, lengths)
    return switch.call("compaction", implementation, (values.shape[1], values.shape[3]), *args)
