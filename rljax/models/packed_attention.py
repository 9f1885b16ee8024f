"""Attention inside packed rows as an attention of the policy (`rljax/models/transformer.py`)."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from rljax.kernels.packed_attention import packed_attention
from rljax.numerics.rows import Numerics


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """Causal attention inside the segments of packed rows.

    Attributes:
      segment_ids: int32 [N, S]; tokens attend only within their segment, which is contiguous. 0 is padding,
        whose outputs are undefined. If there are fewer than S tokens, the rest is padding, too.
      keep_kv: also return every layer's keys and values, as prefill needs.
      span, computed, branches: see `rljax/kernels/packed_attention`.
    """

    segment_ids: Array
    numerics: Numerics
    keep_kv: bool = False
    span: int | None = None
    computed: Array | None = None
    branches: Array | None = None

    def __call__(self, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array] | None]:
        """Maps q [N, T, H, D], k and v [N, T, Hk, D] to ([N, T, H, D], (k, v) [N, S, Hk, D] or None)."""
        tokens, length = q.shape[1], self.segment_ids.shape[1]
        padded = [jnp.pad(x, ((0, 0), (0, length - tokens), (0, 0), (0, 0))) for x in (q, k, v)]
        chosen = self.numerics.kernels.packed_attention
        arguments = (self.segment_ids, self.numerics, self.span, self.computed, self.branches, chosen)
        out = packed_attention(*padded, *arguments)
        return out[:, :tokens].astype(q.dtype), (tuple(padded[1:]) if self.keep_kv else None)
