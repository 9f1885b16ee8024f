"""Means over single responses of packed rows, which hold several responses (`rljax/learning/packing.py`)."""

import jax
import jax.numpy as jnp
from jax import Array


def segment_means(values: Array, mask: Array, segment_ids: Array) -> Array:
    """Returns the mean over the masked positions of each segment, at each of these positions.

    Args:
      values: float32 [R, T]; entries outside the mask are ignored.
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

    def row_means(values: Array, mask: Array, ids: Array) -> Array:
        def total(entries: Array) -> Array:
            return jax.ops.segment_sum(entries, ids, num_segments=len(ids) + 1)[ids]

        counts = total(mask.astype(jnp.float32))
        return jnp.where(mask, total(jnp.where(mask, values, 0.0)) / jnp.maximum(counts, 1.0), 0.0)

    return jax.vmap(row_means)(values, mask, segment_ids)
