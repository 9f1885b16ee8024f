"""Rounding to nearest in plain JAX: the contract, and the backend `xla`."""

import jax.numpy as jnp
from jax import Array

from rljax.kernels.round_to_nearest.grid import for_range, grid, nearest
from rljax.numerics.quantized import pack_nibbles


def round_to_nearest(weight: Array, bits: int, group: int) -> tuple[Array, Array, Array | None]:
    """See the package."""
    groups = grouped(weight, group)
    return on_grid(groups, *grid(*ranges(groups), bits), weight.shape[1], bits)


def grouped(weight: Array, group: int) -> Array:
    """Splits [out, in] into groups, float32 [out, G, group]. A smaller last group is padded with zeros, which
    every grid represents exactly, so that they affect neither range nor error.
    """
    outputs, inputs = weight.shape
    size = group or inputs
    padded = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, -inputs % size)))
    return padded.reshape(outputs, -1, size)


def ranges(groups: Array) -> tuple[Array, Array]:
    """Returns the smallest and the largest weight of each group, 0 included: two arrays [out, G]."""
    groups = for_range(groups)
    return jnp.minimum(groups.min(-1), 0.0), jnp.maximum(groups.max(-1), 0.0)


def on_grid(
    groups: Array, scale: Array, inverse: Array, zero: Array, inputs: int, bits: int
) -> tuple[Array, Array, Array | None]:
    """Returns values, scale and zero of groups [out, G, group] on grids [out, G]."""
    values = nearest(groups, inverse[..., None], zero[..., None], bits)
    values = values.reshape(values.shape[0], -1)[:, :inputs]
    if bits == 8:
        return values.astype(jnp.int8), scale, None
    return pack_nibbles(values), scale, zero.astype(jnp.uint8)
