"""What the kernels of libraries take: rows of whole blocks, in bfloat16."""

import jax.numpy as jnp
from jax import Array

from rljax.numerics.kernel_choice import Refused

_HEAD_DIMS = (64, 128)


def padded_rows(
    q: Array, k: Array, v: Array, segment_ids: Array, branches: Array | None, multiple: int
) -> tuple[Array, Array, Array, Array]:
    """Returns q, k, v and segment ids [N, S, ...] with S padded to a multiple.

    Raises:
      Refused: another type than bfloat16, other widths of heads than 64 and 128, or branches.
    """
    if q.dtype != jnp.bfloat16 or q.shape[3] not in _HEAD_DIMS:
        raise Refused(f"it computes bfloat16 with heads of 64 or 128, not {q.dtype} with {q.shape[3]}")
    if branches is not None:
        raise Refused("it knows no responses that share a prompt; set training.share_prompts=off")
    after = ((0, 0), (0, -q.shape[1] % multiple))
    q, k, v = (jnp.pad(x, (*after, (0, 0), (0, 0))) for x in (q, k, v))
    return q, k, v, jnp.pad(segment_ids, after)
