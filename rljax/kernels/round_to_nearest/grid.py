"""A group's grid, and its nearest point: elementwise, what all backends compute with."""

import jax.numpy as jnp
import numpy as np
from jax import Array

_LEAST = float(np.finfo(np.float32).tiny)  # below it a processor may take numbers for 0


def grid(low: Array, high: Array, bits: int) -> tuple[Array, Array, Array]:
    """Scale, 1 / scale and zero of the grid that spans low..high, which hold 0 between them; float32.

    In 8 bits it is symmetric. A group of nothing but 0, or of nothing that a scale could tell from it, has
    the scale 1.
    """
    scale = jnp.maximum(-low, high) * (1.0 / 127) if bits == 8 else (high - low) * (1.0 / 15)
    scale = jnp.where(scale < _LEAST, 1.0, scale)
    inverse = 1.0 / scale
    zero = jnp.zeros_like(scale) if bits == 8 else _number(jnp.round(-low * inverse), 0.0)
    return scale, inverse, zero


def nearest(weight: Array, inverse: Array, zero: Array, bits: int) -> Array:
    """The grid's nearest integers to float32 weights, as float32."""
    lowest, highest = (-127.0, 127.0) if bits == 8 else (0.0, 15.0)
    steps = _number(jnp.round(weight * inverse), 0.0)
    return jnp.minimum(jnp.maximum(steps + zero, lowest), highest)


def for_range(weight: Array) -> Array:
    """Weights as a group's smallest and largest are sought among them: infinite for what is not a number,
    since some processors' minima and maxima pass over that.
    """
    return _number(weight, jnp.inf)


def _number(x: Array, otherwise: float) -> Array:
    return jnp.where(x == x, x, otherwise)  # not isnan: a TPU's kernels take `x != x` for false
