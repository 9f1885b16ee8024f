"""Attention of a draft tree: every node sees the committed tokens, its ancestors and itself
(`rljax/kernels/tree_attention`).

Keys and values of nodes stay out of the cache: only the accepted path is written to it (`kv_cache.commit`),
so rejected nodes need no masking later.
"""

import dataclasses

from jax import Array

from rljax.engine.draft_tree import MAX_NODES, NodeRows, RootedTree
from rljax.engine.kv_cache import KEY_BLOCK
from rljax.kernels.on_mesh import tree_attention
from rljax.numerics.rows import Numerics

assert MAX_NODES <= KEY_BLOCK  # the keys of all nodes are one block


@dataclasses.dataclass(frozen=True)
class TreeAttention:
    """Attention of the computed nodes over the cache and each other; returns their keys and values.

    Attributes:
      lengths: int32 [B], committed tokens.
      rows: the computed nodes. The ancestors of a computed node are computed too, so no computed node sees
        the undefined values of the others.
    """

    lengths: Array
    tree: RootedTree
    rows: NodeRows
    numerics: Numerics

    def __call__(
        self, cache: tuple[Array, Array], q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Maps keys and values of the committed tokens, q [R, 1, H, D] and k, v [R, 1, Hk, D] to
        ([R, 1, H, D], k and v [B, M, Hk, D] in the dtype of the cache).
        """
        q, k, v = (self.rows.scatter(x[:, 0]) for x in (q, k, v))
        keys, values = cache
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        out = tree_attention(
            q, keys, values, self.lengths, k, v, self.tree.ancestors, self.tree.depth, self.numerics
        )
        return self.rows.take(out)[:, None], (k, v)
