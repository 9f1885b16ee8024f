"""Attention of draft trees against a KV cache, and of plain decoding, which is the tree of one node."""

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
    """Computes attention of every node to the committed tokens of its slot and to its ancestors.

    Args:
      queries: [B, M, H, D], M up to 64; H is a multiple of Hk.
      keys: keys of the cache, [B, Hk, S / 64, D, 64]: blocks of 64 positions, transposed.
      values: values of the cache, [B, Hk, S, D], of the same type.
      lengths: int32 [B], number of committed tokens, 0 to S. In the block of the last of them, later
        positions may hold any finite numbers; kernels read no block after it.
      node_keys, node_values: [B, M, Hk, D], in the type of the cache.
      ancestors: bool [B, M, M]; [b, i, j] is True if node j is on the path to node i, or i itself. Parents
        precede their children.
      depth: int32 [B, M], 0 for the first node of a path: node i is at position lengths + depth. `xla` adds
        nodes in the order of decoding; kernels add them last.
      numerics: see `Numerics`; kernels have another order of summation.
      implementation: see `switch.KernelChoice`; the default depends on (H, Hk, D), as for decoding.

    Returns:
      [B, M, H, D] in the type of the queries: softmax(q k / sqrt(D)) v, summed in float32; zeros for a node
      without visible keys.

    Raises:
      Refused: the implementation cannot compute this.

    The split over the cache follows flash-decoding (Dao et al., 2023), the tree mask SpecInfer (Miao et al.,
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
) -> tuple[Array, Array, Array]:
    """Writes every slot's one new token to the cache; the token sees itself and what stands before it.

    It works in place if the caller donates the cache. The kernels compute a tree of one node. On Hopper the
    same kernel writes the token; `xla` scatters it first, and on a TPU the kernel of compaction writes it.

    Args:
      queries: [B, 1, H, D].
      keys, values: see `tree_attention`; in the block of its place, others may hold any finite numbers.
      positions: int32 [B], where the token stands. At S nothing is written, and the result means nothing.
      node_keys, node_values: the token's, [B, 1, Hk, D], in the type of the cache.
      numerics, implementation: see `tree_attention`.

    Returns:
      [B, 1, H, D] in the queries' type; keys and values with the token.

    Raises:
      Refused: the implementation cannot compute this.
    """
    args = (queries, keys, values, positions, node_keys, node_values, numerics)
    sizes = _sizes(queries, values)
    return switch.call("tree_attention", implementation, sizes, *args, function="decode_attention")


def _sizes(queries: Array, values: Array) -> tuple[int, ...]:
    """(H, Hk, D)."""
    return queries.shape[2], values.shape[1], values.shape[3]
