"""The grid of a group and its nearest points, elementwise, for all backends."""

import jax.numpy as jnp
import numpy as np
from jax import Array

_LEAST = float(np.finfo(np.float32).tiny)  # a processor may treat smaller numbers as 0


def grid(low: Array, high: Array, bits: int) -> tuple[Array, Array, Array]:
    """Returns scale, 1 / scale and zero of the grid that spans low..high, an interval with 0; float32.

    In 8 bits it is symmetric. A group whose numbers are all 0, or too small for a scale, has the scale 1.
    """
    scale = jnp.maximum(-low, high) * (1.0 / 127) if bits == 8 else (high - low) * (1.0 / 15)
    scale = jnp.where(scale < _LEAST, 1.0, scale)
    inverse = 1.0 / scale
    zero = jnp.zeros_like(scale) if bits == 8 else _number(jnp.round(-low * inverse), 0.0)
    return scale, inverse, zero


def nearest(weight: Array, inverse: Array, zero: Array, bits: int) -> Array:
    """Returns the integers of the grid nearest to float32 weights, as float32."""
    lowest, highest = (-127.0, 127.0) if bits == 8 else (0.0, 15.0)
    steps = _number(jnp.round(weight * inverse), 0.0)
    return jnp.minimum(jnp.maximum(steps + zero, lowest), highest)


def for_range(weight: Array) -> Array:
    """Returns weights for the minimum and maximum of a group: NaN becomes infinite, since minima and maxima
    of some processors ignore NaN.
    """
    return _number(weight, jnp.inf)


def _number(x: Array, otherwise: float) -> Array:
    return jnp.where(x == x, x, otherwise)  # not isnan: kernels for TPUs treat `x != x` as false
