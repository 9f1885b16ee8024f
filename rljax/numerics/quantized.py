"""Weights in 8 or 4 bits: what the policy's self-drafter multiplies with.

A params pytree may hold a `QuantizedWeight` in the place of any projection; `numerics.product` multiplies
with it by `rljax/kernels/quantized_product`. How weights are chosen is `drafters/quantized.py`'s business.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.numerics.kernel_choice import Implementation

Activations = Literal["float", "int8"]


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
      activations: type that inputs are rounded to in a product; "int8" needs one symmetric group a row.
      implementation: implementation of its products, see `rljax.kernels.switch`.
    """

    values: Array
    scale: Array
    zero: Array | None
    bits: int = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    activations: Activations = struct.field(pytree_node=False, default="float")
    implementation: Implementation = struct.field(pytree_node=False, default=None)

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


def _of_inputs(of_groups: Array, weight: QuantizedWeight) -> Array:
    """[out, G] -> [out, in], the group's number at each of its inputs."""
    spread = jnp.broadcast_to(of_groups[:, :, None], (*of_groups.shape, weight.group))
    return spread.reshape(of_groups.shape[0], -1)[:, : weight.inputs]
