"""Means over the responses of packed rows, where several lie behind each other (`training/packing.py`)."""

import jax
import jax.numpy as jnp
from jax import Array


def segment_means(values: Array, mask: Array, segment_ids: Array) -> Array:
    """The mean over the masked positions of each segment, at each of its masked positions.

    Args:
      values: float32 [R, T]; outside the mask anything.
      mask: bool [R, T].
      segment_ids: int32 [R, T], 0 to T. Equal ids in different rows are different segments.

    Returns:
      float32 [R, T], 0 outside the mask.
    """
    if not values.shape == mask.shape == segment_ids.shape or values.ndim != 2:
        raise ValueError(
            f"values {values.shape}, mask {mask.shape} and segment_ids {segment_ids.shape}:"
            " expected one shape [R, T]"
        )

    def of_row(values: Array, mask: Array, ids: Array) -> Array:
        def total(each: Array) -> Array:
            return jax.ops.segment_sum(each, ids, num_segments=len(ids) + 1)[ids]

        counts = total(mask.astype(jnp.float32))
        return jnp.where(mask, total(jnp.where(mask, values, 0.0)) / jnp.maximum(counts, 1.0), 0.0)

    return jax.vmap(of_row)(values, mask, segment_ids)
