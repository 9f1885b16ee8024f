"""Weights in 8 or 4 bits, for the policy's self-drafter.

A params pytree may contain a `QuantizedWeight` in place of any projection; products with it are computed by
`rljax/kernels/quantized_product`. `drafters/quantized.py` quantizes the weights.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from rljax.numerics.kernel_choice import Implementation

Activations = Literal["float", "int8"]


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How the devices of a mesh share a matrix [out, in].

    Attributes:
      outputs, inputs: the mesh axis that splits them; None where they are not split.
      rows: mesh axes that split the rows of products with the matrix.
    """

    mesh: Mesh
    outputs: str | None
    inputs: str | None
    rows: tuple[str, ...]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(self.outputs, self.inputs)


@struct.dataclass
class QuantizedWeight:
    """A matrix [out, in] whose entries in group g are scale[g] * (value - zero[g]).

    Attributes:
      values: int8 [out, in] in 8 bits; in 4 bits uint8 [out, ceil(in / 2)], with input j in the low half of
        byte j, and input j + ceil(in / 2) in its high half.
      scale: float32 [out, G].
      zero: uint8 [out, G]; None for symmetric weights, whose zero is 0.
      bits: bits per weight, 8 or 4.
      inputs: number of inputs, `in`.
      group: number of inputs that share a scale; the last group of a row may have fewer.
      activations: type to round inputs to in a product; "int8" needs one symmetric group per row.
      implementation: implementation of products, see `rljax.kernels.switch`.
      layout: on a mesh, the parts of the matrix that devices hold. Each is quantized and packed apart, with
        its own groups, and the arrays have the results of all parts side by side; only the product of shards
        (`rljax/kernels/quantized_product/shards.py`) reads them. None on one device.
    """

    values: Array
    scale: Array
    zero: Array | None
    bits: int = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    activations: Activations = struct.field(pytree_node=False, default="float")
    implementation: Implementation = struct.field(pytree_node=False, default=None)
    layout: WeightLayout | None = struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (out, in) of the dequantized matrix."""
        return self.values.shape[0], self.inputs


def pack_nibbles(values: Array) -> Array:
    """Packs integers 0..15 [out, in] into uint8 [out, ceil(in / 2)]."""
    half = -(-values.shape[-1] // 2)
    high = jnp.pad(values[:, half:], ((0, 0), (0, values.shape[-1] % 2))).astype(jnp.uint8)
    return values[:, :half].astype(jnp.uint8) | (high << 4)


def unpack_nibbles(packed: Array, inputs: int) -> Array:
    """Inverts `pack_nibbles`: int8 [out, inputs]."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)[:, :inputs].astype(jnp.int8)


def dequantize(weight: QuantizedWeight) -> Array:
    """Returns the matrix in float32 [out, in]."""
    values = unpack_nibbles(weight.values, weight.inputs) if weight.bits == 4 else weight.values
    values = values.astype(jnp.float32)
    if weight.zero is not None:
        values = values - _per_input(weight.zero.astype(jnp.float32), weight)
    return values * _per_input(weight.scale, weight)


def _per_input(per_group: Array, weight: QuantizedWeight) -> Array:
    """Repeats numbers of groups [out, G] for the inputs of each group: [out, in]."""
    spread = jnp.broadcast_to(per_group[:, :, None], (*per_group.shape, weight.group))
    return spread.reshape(per_group.shape[0], -1)[:, : weight.inputs]
