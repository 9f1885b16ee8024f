"""Causal attention inside the segments of packed rows: training, scoring and prefill.

The bits of plain JAX are those of decoding. So a kernel computes only where rows need not be invariant.
"""

from jax import Array

from rljax.kernels import switch
from rljax.numerics.rows import Numerics


def packed_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    numerics: Numerics,
    span: int | None = None,
    computed: Array | None = None,
    branches: Array | None = None,
    implementation: switch.Implementation = None,
) -> Array:
    """Computes attention of every token to those before it in its segment, and to itself.

    Args:
      q: [N, S, H, D].
      k, v: [N, S, Hk, D]; H is a multiple of Hk.
      segment_ids: int32 [N, S]; segments are contiguous. 0 is padding, whose outputs are undefined.
      span: the most chunks of `KEY_CHUNK` positions that a segment lies in; None: as many as a row has.
      computed: bool [N, S], queries whose outputs are read; None: all of them. A CPU leaves out blocks of
        queries without any.
      branches: int32 [N, S], tokens of a segment attend to those of branch 0 and of their own branch; only
        the chunk of keys in which a segment ends has branches other than 0, or a segment has one. None:
        segments have no branches.
      implementation: see `switch.KernelChoice`; the default depends on (H, Hk, D), and is `xla` where rows
        must be invariant.

    Returns:
      [N, S, H, D] in float32 or in the type of q: softmax(q k / sqrt(D)) v.

    Raises:
      Refused: the implementation cannot compute this.
    """
    sizes = (q.shape[2], *k.shape[2:])
    if implementation is None and (numerics.row_invariant or branches is not None):
        implementation = "xla"
    arguments = (q, k, v, segment_ids, numerics, span, computed, branches)
    return switch.call("packed_attention", implementation, sizes, *arguments)
