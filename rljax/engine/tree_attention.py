"""Attention of a draft tree: every node sees the committed tokens and its own ancestors
(`rljax/kernels/tree_attention`).

The nodes' keys and values stay out of the cache: only the accepted path is written to it (`kv_cache.commit`),
so there is nothing of a rejected node to be hidden.
"""

import dataclasses

from jax import Array

from rljax.engine.draft_tree import MAX_NODES, NodeRows, RootedTree
from rljax.engine.kv_cache import KEY_BLOCK, KVCache
from rljax.kernels.tree_attention import tree_attention
from rljax.numerics.rows import Numerics

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
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        out = tree_attention(
            q,
            keys,
            values,
            self.lengths,
            k,
            v,
            self.tree.ancestors,
            self.tree.depth,
            self.numerics,
            self.numerics.kernels.tree_attention,
        )
        return self.rows.gather(out)[:, None], (k, v)
