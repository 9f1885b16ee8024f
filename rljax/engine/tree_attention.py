"""Attention of a draft tree: every node sees the committed tokens and its own ancestors.

With the bits of plain decoding along every path. Decoding adds up the softmax terms, and the values under
them, chunk of keys after chunk of keys, and within a chunk one key after the other. So the nodes' terms are
added where decoding would have added them:

- chunks of committed keys only, as in decoding;
- the chunk where the tree begins: its committed keys, and behind them, in the same product, the nodes whose
  positions lie in that chunk. Siblings in between weigh 0 and change nothing, and as parents precede
  children, what is left adds up in the order of the positions;
- the nodes whose positions lie in the next chunk, in a product of their own, last.

The nodes' keys and values stay out of the cache: only the accepted path is written to it (`kv_cache.commit`),
so there is nothing of a rejected node to be hidden.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array

from rljax.engine.draft_tree import MAX_NODES, NodeRows, RootedTree
from rljax.engine.kv_cache import KEY_BLOCK, KVCache, block_scores
from rljax.models.attention import MASKED, scale_queries, softmax_terms, weigh_chunk
from rljax.models.numerics import KEY_CHUNK, Numerics, row_max

assert MAX_NODES <= KEY_BLOCK  # the nodes' keys are one block


@dataclasses.dataclass(frozen=True)
class TreeAttention:
    """Attention of the nodes that are computed against the cache and each other; keeps their keys and values.

    Attributes:
      cache: of the committed tokens.
      lengths: int32 [B], committed tokens.
      tree: the nodes.
      rows: which of them are computed. What the others hold is any node's: nothing that is computed sees
        them, as a node's ancestors are computed with it.
      numerics: see `Numerics`.
    """

    cache: KVCache
    lengths: Array
    tree: RootedTree
    rows: NodeRows
    numerics: Numerics

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        """q [R, 1, H, D], k and v [R, 1, Hk, D] -> ([R, 1, H, D], k and v [B, M, Hk, D] as the cache keeps
        them).
        """
        q, k, v = (self.rows.scatter(x[:, 0]) for x in (q, k, v))
        out, kept = self._attend(layer, q, k, v)
        return self.rows.gather(out)[:, None], kept

    def _attend(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        """q [B, M, H, D], k and v [B, M, Hk, D] -> ([B, M, H, D], (k, v))."""
        batch, nodes, num_heads, head_dim = q.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_kv_heads, capacity = values.shape[1:3]
        group = num_heads // num_kv_heads
        rows = group * nodes
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        pad = KEY_BLOCK - nodes
        # Beside a cache of one block, a block for the tree would be a computation of the same shape with the
        # same queries: the compiler then adds up both in another order.
        blocks = 2 if capacity == KEY_BLOCK else 1
        tree_keys = jnp.pad(k.transpose(0, 2, 3, 1), [(0, 0)] * 3 + [(0, pad)])[:, :, None]
        more = [(0, 0), (0, 0), (0, blocks - 1), (0, 0), (0, 0)]
        tree_keys = jnp.pad(tree_keys, more)  # [B, Hk, blocks, D, L]
        tree_values = jnp.pad(v.transpose(0, 2, 1, 3), [(0, 0), (0, 0), (0, pad), (0, 0)])  # [B, Hk, L, D]

        queries = scale_queries(q).reshape(batch, nodes, num_kv_heads, group, head_dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, rows, head_dim)
        committed = jnp.arange(capacity)[None] < self.lengths[:, None]
        scores = block_scores(queries, keys, self.numerics)
        scores = jnp.where(committed[:, None, None], scores, MASKED)
        visible = jnp.pad(self.tree.ancestors, [(0, 0), (0, 0), (0, pad)])  # [B, M, L]
        visible = jnp.broadcast_to(visible[:, None, None], (batch, 1, group, nodes, KEY_BLOCK))
        tree_scores = block_scores(queries, tree_keys, self.numerics)[..., :KEY_BLOCK]
        tree_scores = jnp.where(visible.reshape(batch, 1, rows, KEY_BLOCK), tree_scores, MASKED)

        top = jnp.maximum(row_max(scores), row_max(tree_scores))
        terms, tree_terms = softmax_terms(scores, top), softmax_terms(tree_scores, top)
        out = self._weighted_values(terms, values, tree_terms, tree_values)
        out = out.reshape(batch, num_kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
        return out.reshape(batch, nodes, num_heads, head_dim).astype(q.dtype), (k, v)

    def _weighted_values(self, terms: Array, values: Array, tree_terms: Array, tree_values: Array) -> Array:
        """As `models.attention.weighted_values`, with the tree's terms in their places.

        Args:
          terms: float32 [B, Hk, R, S].
          values: [B, Hk, S, D].
          tree_terms: float32 [B, Hk, R, L].
          tree_values: [B, Hk, L, D].

        Returns:
          float32 [B, Hk, R, D].
        """
        batch, heads, rows, capacity = terms.shape
        head_dim = values.shape[-1]
        values, tree_values = values.astype(jnp.float32), tree_values.astype(jnp.float32)
        chunk = min(KEY_CHUNK, capacity) if self.numerics.row_invariant else capacity
        num_chunks = capacity // chunk
        begins_in = self.lengths // chunk  # the chunk where the tree begins; beyond the last, nothing fits
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
            sums, weighted = weigh_chunk(whole_terms, values[:, :, :-1], self.numerics)
            parts = [(sums[:, :, c], weighted[:, :, c]) for c in range(num_chunks - 1)]
        positions = self.lengths[:, None] + self.tree.depth  # [B, M]
        here = jnp.pad(
            positions // chunk == begins_in[:, None], [(0, 0), (0, KEY_BLOCK - positions.shape[1])]
        )
        here = here[:, None, None]
        parts.append(
            weigh_chunk(
                jnp.concatenate([last_terms, jnp.where(here, tree_terms, 0.0)], axis=-1),
                jnp.concatenate([last_values, tree_values], axis=2),
                self.numerics,
            )
        )
        parts.append(weigh_chunk(jnp.where(here, 0.0, tree_terms), tree_values, self.numerics))
        sums = functools.reduce(jnp.add, [part[0] for part in parts])
        weighted = functools.reduce(jnp.add, [part[1] for part in parts])
        return weighted / jnp.where(sums == 0, 1.0, sums)
