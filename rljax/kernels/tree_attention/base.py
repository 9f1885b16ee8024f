"""Tree attention in plain JAX: the contract, with the bits of plain decoding along every path.

Decoding adds the softmax terms, and the weighted values, one chunk of keys after another, and within a chunk
one key after another. So the terms of nodes are added in the order of decoding:

- first the chunks with committed keys only, as in decoding;
- then the chunk in which the tree begins: its committed keys in one product, as in decoding, followed one by
  one by the nodes whose positions lie in the chunk. Siblings have terms of 0, which have no effect, and as
  parents precede children, the other nodes are added in the order of their positions;
- last the nodes whose positions lie in the next chunk, one by one, too.

The cache is read where it lies. A copy of the values of the chunk in which the tree begins, with those of the
nodes after them, would let one product do the second step, and would take longer than all the rest
(`docs/engine.md`).
"""

import jax.numpy as jnp
from jax import Array, lax

from rljax.kernels.compaction.base import compaction, only_node
from rljax.numerics.attention import (
    KEY_BLOCK,
    MASKED,
    add_chunks,
    add_weighted,
    attended_chunk,
    block_scores,
    chunks_max,
    normalize,
    scale_queries,
    softmax_terms,
    weigh_cache,
)
from rljax.numerics.rows import Numerics, row_max


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
) -> Array:
    """See the package."""
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

    # Scores of the committed keys, [B, Hk, n, R, C], and of the nodes, [B, Hk, R, M].
    queries_dtype = queries.dtype
    queries = scale_queries(queries).reshape(batch, nodes, num_kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, rows, head_dim)
    chunk = attended_chunk(capacity, numerics)
    committed = (jnp.arange(capacity)[None] < lengths[:, None]).reshape(batch, 1, -1, 1, chunk)
    scores = jnp.where(committed, block_scores(queries, keys, chunk, numerics), MASKED)
    tree_scores = block_scores(queries, tree_keys, KEY_BLOCK, numerics)[:, :, 0, :, :nodes]
    visible = jnp.broadcast_to(ancestors[:, None, None], (batch, 1, group, nodes, nodes))
    tree_scores = jnp.where(visible.reshape(batch, 1, rows, nodes), tree_scores, MASKED)

    top = jnp.maximum(chunks_max(scores), row_max(tree_scores))
    terms, tree_terms = softmax_terms(scores, top[:, :, None]), softmax_terms(tree_scores, top)
    tree_values = node_values.transpose(0, 2, 1, 3)
    positions = lengths[:, None] + depth
    out = _weighted_values(terms, values, tree_terms, tree_values, lengths, positions, numerics)
    out = out.reshape(batch, num_kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, nodes, num_heads, head_dim).astype(queries_dtype)


def decode_attention(
    queries: Array,
    keys: Array,
    values: Array,
    positions: Array,
    node_keys: Array,
    node_values: Array,
    numerics: Numerics,
) -> tuple[Array, Array, Array]:
    """See the package. The token's key and value are read where they were written."""
    keys, values = compaction(keys, values, node_keys, node_values, *only_node(positions), positions)
    batch, _, num_heads, head_dim = queries.shape
    num_kv_heads, capacity = values.shape[1:3]
    scaled = scale_queries(queries).reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    chunk = attended_chunk(capacity, numerics)
    visible = (jnp.arange(capacity)[None] <= positions[:, None]).reshape(batch, 1, -1, 1, chunk)
    scores = jnp.where(visible, block_scores(scaled, keys, chunk, numerics), MASKED)
    terms = softmax_terms(scores, chunks_max(scores)[:, :, None])
    sums, weighted = weigh_cache(terms, values, numerics)
    # Chunks without a visible key add exact zeros, so their number has no effect.
    chunks = jnp.full((batch,), capacity // chunk)
    out = normalize(add_chunks(weighted, chunks), add_chunks(sums, chunks))
    return out.reshape(batch, 1, num_heads, head_dim).astype(queries.dtype), keys, values


def _weighted_values(
    terms: Array,
    values: Array,
    tree_terms: Array,
    tree_values: Array,
    lengths: Array,
    positions: Array,
    numerics: Numerics,
) -> Array:
    """Returns the softmax-weighted mean of cached values and of the tree's, added in the order of decoding.

    Args:
      terms: float32 [B, Hk, n, R, C].
      values: [B, Hk, n * C, D].
      tree_terms: float32 [B, Hk, R, M].
      tree_values: [B, Hk, M, D].
      lengths: int32 [B], number of committed tokens.
      positions: int32 [B, M], positions of the nodes.

    Returns:
      float32 [B, Hk, R, D].
    """
    chunks, chunk = terms.shape[2], terms.shape[4]
    tree_values = tree_values.astype(jnp.float32)
    sums, weighted = weigh_cache(terms, values, numerics)
    if chunks == 1:  # nodes that do not fit in are never accepted

        def total(parts: Array, nodes: Array) -> Array:
            return add_weighted(parts[:, :, 0][None], tree_terms[None], nodes)[0]

    else:
        begins_in = _number_of(lengths, chunk)  # where the tree begins; after the last chunk, nothing fits
        last = jnp.minimum(begins_in, chunks - 1)
        here = (_number_of(positions, chunk) == begins_in[:, None])[:, None, None]
        node_terms = jnp.stack([jnp.where(here, tree_terms, 0.0), jnp.where(here, 0.0, tree_terms)])

        def total(parts: Array, nodes: Array) -> Array:
            begun = parts[jnp.arange(len(last)), :, last]
            continued, following = add_weighted(jnp.stack([begun, jnp.zeros_like(begun)]), node_terms, nodes)
            return add_chunks(parts, last) + continued + following

    return normalize(total(weighted, tree_values), total(sums, jnp.ones_like(tree_values[..., :1])))


def _number_of(positions: Array, chunk: int) -> Array:
    """Returns the chunk that each position, int32 and at least 0, lies in."""
    return lax.div(positions.astype(jnp.uint32), jnp.uint32(chunk)).astype(jnp.int32)
