"""Weights in 8 or 4 bits, and products with them: what the policy's self-drafter multiplies with.

A params pytree may hold a `QuantizedWeight` in the place of any projection; `numerics.product` comes here for
it. How weights are chosen is `drafters/quantized.py`'s business.

Two forms of the product:

- activations stay floating point, the weight is dequantized on the way (the reference; what accelerators
  fuse);
- where a scale serves a whole row of weights, activations are rounded to 8 bits as well, with a scale of
  their own each row, and 8-bit integers are summed in 32 bits. On a CPU this is the form that is faster than
  the policy's own products, as it reads a byte a weight and has a kernel; and whole sums do not depend on the
  number of rows.
"""

import functools
from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

Activations = Literal["float", "int8"]

_LARGEST = 127  # of a symmetric 8-bit integer


@struct.dataclass
class QuantizedWeight:
    """A matrix [out, in] of which weight w in group g stands for scale[g] * (value - zero[g]).

    Attributes:
      values: int8 [out, in] in 8 bits; in 4 bits uint8 [out, ceil(in / 2)], of which byte j holds input j in
        its low and input j + ceil(in / 2) in its high half.
      scale: float32 [out, G].
      zero: uint8 [out, G]; None for symmetric weights, whose zero is 0.
      bits: 8 or 4.
      inputs: in.
      group: inputs that share a scale; the last group of a row may have fewer.
      activations: what inputs are rounded to in a product; "int8" needs one symmetric group a row.
    """

    values: Array
    scale: Array
    zero: Array | None
    bits: int = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    activations: Activations = struct.field(pytree_node=False, default="float")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix it stands for."""
        return self.values.shape[0], self.inputs


def pack_nibbles(values: Array) -> Array:
    """Integers 0..15 [out, in] -> uint8 [out, ceil(in / 2)]."""
    half = -(-values.shape[-1] // 2)
    high = jnp.pad(values[:, half:], ((0, 0), (0, values.shape[-1] % 2))).astype(jnp.uint8)
    return values[:, :half].astype(jnp.uint8) | (high << 4)


def unpack_nibbles(packed: Array, inputs: int) -> Array:
    """The inverse of `pack_nibbles`: int8 [out, inputs]."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)[:, :inputs].astype(jnp.int8)


def dequantize(weight: QuantizedWeight) -> Array:
    """The matrix that `weight` stands for, float32 [out, in]."""
    values = unpack_nibbles(weight.values, weight.inputs) if weight.bits == 4 else weight.values
    values = values.astype(jnp.float32)
    if weight.zero is not None:
        values = values - _of_inputs(weight.zero.astype(jnp.float32), weight)
    return values * _of_inputs(weight.scale, weight)


def quantized_product(x: Array, weight: QuantizedWeight) -> Array:
    """x [N, in] times weight [out, in]: float32 [N, out]."""
    multiply = functools.partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    if weight.activations == "float":
        return multiply(x, dequantize(weight).astype(x.dtype), preferred_element_type=jnp.float32)
    rows = x.astype(jnp.float32)
    if x.shape[0] == 1:  # a lone row would take a kernel that is many times slower
        rows = jnp.concatenate([rows, rows])
    step = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) * (1.0 / _LARGEST)
    rounded = jnp.round(rows / jnp.where(step > 0, step, 1.0)).astype(jnp.int8)
    sums = multiply(rounded, weight.values, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * (step * weight.scale.T))[: x.shape[0]]


def _of_inputs(of_groups: Array, weight: QuantizedWeight) -> Array:
    """[out, G] -> [out, in], the group's number at each of its inputs."""
    spread = jnp.broadcast_to(of_groups[:, :, None], (*of_groups.shape, weight.group))
    return spread.reshape(of_groups.shape[0], -1)[:, : weight.inputs]
