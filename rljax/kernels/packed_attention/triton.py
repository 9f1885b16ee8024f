"""Attention inside packed rows on NVIDIA GPUs: JAX's FlashAttention for Triton, with its gradients.

Of JAX's kernels it is the one that takes segments and has a backward pass. cuDNN's takes segments of a number
that is known when it is traced, or a mask of the whole matrix; Mosaic GPU's has no causal backward pass.
"""

import warnings

import jax.numpy as jnp
from jax import Array

from rljax.kernels.packed_attention.padded import padded_rows
from rljax.numerics.rows import Numerics

with warnings.catch_warnings():  # JAX 0.12 names another library that has it
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

_QUERIES, _KEYS = 128, 64  # of a block
_SIZES = BlockSizes(_QUERIES, _KEYS, *[_KEYS] * 4)


def packed_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    numerics: Numerics,
    span: int | None = None,
    computed: Array | None = None,
    branches: Array | None = None,
    interpret: bool = False,
) -> Array:
    """See `packed_attention.packed_attention`. It computes every query, against all keys before it."""
    del numerics, span, computed
    length, head_dim, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    q, k, v, segment_ids = padded_rows(q, k, v, segment_ids, branches, _QUERIES)
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    out = mha(q, k, v, segment_ids, head_dim**-0.5, causal=True, block_sizes=_SIZES, interpret=interpret)
    return out[:, :length]
