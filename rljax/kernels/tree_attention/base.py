"""Tree attention in plain JAX: the contract, with the bits of plain decoding along every path.

Decoding adds the softmax terms, and the weighted values, one chunk of keys after another, and within a chunk
one key after another. So the terms of nodes are added in the order of decoding:

- first the chunks with committed keys only, as in decoding;
- then the chunk in which the tree begins: in one product, its committed keys, followed by the nodes whose
  positions lie in the chunk. Siblings have terms of 0, which have no effect, and as parents precede children,
  the other nodes are added in the order of their positions;
- last, in a separate product, the nodes whose positions lie in the next chunk.
"""

import functools

import jax.numpy as jnp
from jax import Array

from rljax.numerics.attention import (
    KEY_BLOCK,
    MASKED,
    block_scores,
    scale_queries,
    softmax_terms,
    weigh_cached_chunk,
    weighted_values,
)
from rljax.numerics.rows import KEY_CHUNK, Numerics, row_max


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
    nodes_in_cache: bool = False,
) -> Array:
    """See the package. `nodes_in_cache`: key and value of the single node are in the cache, at `lengths`."""
    if nodes_in_cache:
        return _decode_attention(queries, keys, values, lengths, numerics)
    batch, nodes, num_heads, head_dim = queries.shape
    num_kv_heads, capacity = values.shape[1:3]
    group = num_heads // num_kv_heads
    rows = group * nodes
    pad = KEY_BLOCK - nodes
    # With a cache of one block, a block for the tree would be a computation of the same shape with the same
    # queries, and the compiler would add both in another order.
    blocks = 2 if capacity == KEY_BLOCK else 1
    tree_keys = jnp.pad(node_keys.transpose(0, 2, 3, 1), [(0, 0)] * 3 + [(0, pad)])[:, :, None]
    more = [(0, 0), (0, 0), (0, blocks - 1), (0, 0), (0, 0)]
    tree_keys = jnp.pad(tree_keys, more)  # [B, Hk, blocks, D, L]
    tree_values = node_values.transpose(0, 2, 1, 3)
    tree_values = jnp.pad(tree_values, [(0, 0), (0, 0), (0, pad), (0, 0)])  # [B, Hk, L, D]

    queries_dtype = queries.dtype
    queries = scale_queries(queries).reshape(batch, nodes, num_kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, rows, head_dim)
    committed = jnp.arange(capacity)[None] < lengths[:, None]
    scores = block_scores(queries, keys, numerics)
    scores = jnp.where(committed[:, None, None], scores, MASKED)
    visible = jnp.pad(ancestors, [(0, 0), (0, 0), (0, pad)])  # [B, M, L]
    visible = jnp.broadcast_to(visible[:, None, None], (batch, 1, group, nodes, KEY_BLOCK))
    tree_scores = block_scores(queries, tree_keys, numerics)[..., :KEY_BLOCK]
    tree_scores = jnp.where(visible.reshape(batch, 1, rows, KEY_BLOCK), tree_scores, MASKED)

    top = jnp.maximum(row_max(scores), row_max(tree_scores))
    terms, tree_terms = softmax_terms(scores, top), softmax_terms(tree_scores, top)
    positions = lengths[:, None] + depth
    out = _weighted_values(terms, values, tree_terms, tree_values, lengths, positions, numerics)
    out = out.reshape(batch, num_kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, nodes, num_heads, head_dim).astype(queries_dtype)


def _decode_attention(
    queries: Array, keys: Array, values: Array, positions: Array, numerics: Numerics
) -> Array:
    """Computes attention of one token per slot, at `positions`: [B, 1, H, D] -> [B, 1, H, D]."""
    batch, _, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    scaled = scale_queries(queries).reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = block_scores(scaled, keys, numerics)
    visible = jnp.arange(scores.shape[-1])[None, :] <= positions[:, None]
    scores = jnp.where(visible[:, None, None, :], scores, MASKED)
    terms = softmax_terms(scores, row_max(scores))
    out = weighted_values(terms, values, numerics)
    return out.reshape(batch, 1, num_heads, head_dim).astype(queries.dtype)


def _weighted_values(
    terms: Array,
    values: Array,
    tree_terms: Array,
    tree_values: Array,
    lengths: Array,
    positions: Array,
    numerics: Numerics,
) -> Array:
    """As `rljax.numerics.attention.weighted_values`, with the terms of the tree at their positions.

    Args:
      terms: float32 [B, Hk, R, S].
      values: [B, Hk, S, D].
      tree_terms: float32 [B, Hk, R, L].
      tree_values: [B, Hk, L, D].
      lengths: int32 [B], number of committed tokens.
      positions: int32 [B, M], positions of the nodes.

    Returns:
      float32 [B, Hk, R, D].
    """
    batch, heads, rows, capacity = terms.shape
    head_dim = values.shape[-1]
    values, tree_values = values.astype(jnp.float32), tree_values.astype(jnp.float32)
    chunk = min(KEY_CHUNK, capacity) if numerics.row_invariant else capacity
    num_chunks = capacity // chunk
    begins_in = lengths // chunk  # the chunk where the tree begins; beyond the last, nothing fits
    parts = []
    if num_chunks == 1:
        last_terms, last_values = terms, values
    else:
        terms = terms.reshape(batch, heads, rows, num_chunks, chunk).swapaxes(2, 3)
        values = values.reshape(batch, heads, num_chunks, chunk, head_dim)
        index = jnp.minimum(begins_in, num_chunks - 1)[:, None, None, None, None]
        last_terms = jnp.take_along_axis(terms, index, axis=2)[:, :, 0]
        last_values = jnp.take_along_axis(values, index, axis=2)[:, :, 0]
        before = jnp.arange(num_chunks - 1)[None] < begins_in[:, None]
        whole_terms = jnp.where(before[:, None, :, None, None], terms[:, :, :-1], 0.0)
        sums, weighted = weigh_cached_chunk(whole_terms, values[:, :, :-1], numerics)
        parts = [(sums[:, :, c], weighted[:, :, c]) for c in range(num_chunks - 1)]
    here = jnp.pad(positions // chunk == begins_in[:, None], [(0, 0), (0, KEY_BLOCK - positions.shape[1])])
    here = here[:, None, None]
    parts.append(
        weigh_cached_chunk(
            jnp.concatenate([last_terms, jnp.where(here, tree_terms, 0.0)], axis=-1),
            jnp.concatenate([last_values, tree_values], axis=2),
            numerics,
        )
    )
    parts.append(weigh_cached_chunk(jnp.where(here, 0.0, tree_terms), tree_values, numerics))
    sums = functools.reduce(jnp.add, [part[0] for part in parts])
    weighted = functools.reduce(jnp.add, [part[1] for part in parts])
    return weighted / jnp.where(sums == 0, 1.0, sums)
