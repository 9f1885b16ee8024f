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
    """[out, in] -> float32 [out, G, group]; a last group with fewer inputs is filled up with zeros, which
    every grid holds exactly, so that they change neither a range nor an error.
    """
    outputs, inputs = weight.shape
    size = group or inputs
    padded = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, -inputs % size)))
    return padded.reshape(outputs, -1, size)


def ranges(groups: Array) -> tuple[Array, Array]:
    """Smallest and largest weight of each group, 0 between them: two of [out, G]."""
    groups = for_range(groups)
    return jnp.minimum(groups.min(-1), 0.0), jnp.maximum(groups.max(-1), 0.0)


def on_grid(
    groups: Array, scale: Array, inverse: Array, zero: Array, inputs: int, bits: int
) -> tuple[Array, Array, Array | None]:
    """Values, scale and zero of groups [out, G, group] on grids [out, G] that are given."""
    values = nearest(groups, inverse[..., None], zero[..., None], bits)
    values = values.reshape(values.shape[0], -1)[:, :inputs]
    if bits == 8:
        return values.astype(jnp.int8), scale, None
    return pack_nibbles(values), scale, zero.astype(jnp.uint8)
