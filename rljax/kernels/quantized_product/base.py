"""The product with quantized weights in plain JAX: the contract, and the backend `xla`.

Two forms:

- activations stay floating point, and the weight is dequantized (a compiler may fuse that, or may write the
  whole matrix to memory first; a kernel never does);
- where one scale covers a whole row of weights, activations are rounded to 8 bits as well, with one scale per
  row, and 8-bit integers are summed in 32 bits. On a CPU only this form is faster than the products of the
  policy, as it reads one byte per weight and has a kernel; and integer sums do not depend on the number of
  rows.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.quantized import QuantizedWeight, dequantize

_LARGEST = 127  # largest symmetric 8-bit integer


def quantized_product(x: Array, weight: QuantizedWeight) -> Array:
    """Multiplies x [N, in] by weight [out, in]: float32 [N, out]."""
    multiply = functools.partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    if weight.activations == "float":
        return multiply(x, dequantize(weight).astype(x.dtype), preferred_element_type=jnp.float32)
    rows = x.astype(jnp.float32)
    if x.shape[0] == 1:  # a single row would use a kernel that is many times slower
        rows = jnp.concatenate([rows, rows])
    step = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) * (1.0 / _LARGEST)
    rounded = jnp.round(rows / jnp.where(step > 0, step, 1.0)).astype(jnp.int8)
    sums = multiply(rounded, weight.values, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * (step * weight.scale.T))[: x.shape[0]]
