"""Attention inside packed rows on TPUs: JAX's splash attention, with its gradients."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from rljax.kernels.packed_attention.padded import padded_rows
from rljax.numerics.rows import Numerics

_LANES = 128


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
    _, length, heads, head_dim = q.shape
    scaled = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
    q, k, v, segment_ids = padded_rows(scaled, k, v, segment_ids, branches, _LANES)
    block = next(size for size in (512, 256, _LANES) if q.shape[1] % size == 0)
    forward = ("block_q", "block_kv", "block_kv_compute")
    backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    attend = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((q.shape[1], q.shape[1]))] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(forward + backward, block)),
        interpret=interpret,
    )

    def of_row(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
        heads_first = (x.swapaxes(0, 1) for x in (q, k, v))
        return attend(*heads_first, splash.SegmentIds(segment_ids, segment_ids)).swapaxes(0, 1)

    return jax.vmap(of_row)(q, k, v, segment_ids)[:, :length]
