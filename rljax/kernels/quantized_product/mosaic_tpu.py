"""The product with quantized weights on TPUs: packed weights are read once, and become integers in VMEM.

A program computes a block of outputs from whole rows of weights, while the next block is loaded. It processes
the rows in pieces: the parts of chunks of columns that belong to one group. Activations of a piece are 0 for
inputs outside of the group, so that any size of group and any number of inputs fit chunks of whole lanes. The
matrix unit sums a piece in float32. The group's scale is applied to the sum, not to the weights, so that no
weight is rounded: the factors are integers of few bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.quantized_product.chunks import in_chunks
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.quantized import QuantizedWeight

_LANES = 128
_WIDEST = 512  # columns of a chunk
_BLOCK_BYTES = 2**20  # of weights


def quantized_product(x: Array, weight: QuantizedWeight, interpret: bool = False) -> Array:
    """Multiplies x bfloat16 [N, in] by weight [out, in]: float32 [N, out]."""
    if weight.activations != "float":
        raise Refused("activations are rounded to int8, it multiplies bfloat16")
    if x.dtype != jnp.bfloat16:
        raise Refused(f"activations are {x.dtype}, it multiplies bfloat16")
    return in_chunks(lambda rows: _product(rows, weight, interpret), x)


def _product(x: Array, weight: QuantizedWeight, interpret: bool) -> Array:
    outputs, columns = weight.values.shape
    width, table = _pieces(weight)
    rows = -(-x.shape[0] // 16) * 16
    pieces = _activations(jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))), weight, width, table)
    stored_columns = -(-columns // width) * width
    block = min(max(_BLOCK_BYTES // stored_columns // _LANES, 1) * _LANES, -(-outputs // _LANES) * _LANES)
    # XLA stores them as [groups, out] on a TPU, as groups are few, so the transpose is free.
    grids = [weight.scale.T] if weight.zero is None else [weight.scale.T, weight.zero.T]
    groups = weight.scale.shape[1]
    of_groups = pl.BlockSpec((groups, block), lambda i, _: (0, i))
    out = pl.pallas_call(
        functools.partial(_kernel, bits=weight.bits, width=width),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-outputs // block),),
            in_specs=[
                pl.BlockSpec(pieces.shape, lambda i, _: (0, 0, 0)),
                pl.BlockSpec((block, stored_columns), lambda i, _: (i, 0)),
                *[of_groups] * len(grids),
            ],
            out_specs=pl.BlockSpec((rows, block), lambda i, _: (0, i)),
            scratch_shapes=[pltpu.VMEM((groups, block), jnp.float32)] * (len(grids) - 1),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="quantized_product",
    )(jnp.asarray(table), pieces, weight.values, *grids)
    return out[: x.shape[0]]


def _pieces(weight: QuantizedWeight) -> tuple[int, np.ndarray]:
    """Returns the columns of a chunk, and each piece's chunk, group and half of the bytes, int32 [3, P]."""
    columns = weight.values.shape[1]
    fits = [_LANES * n for n in (4, 2) if columns % (_LANES * n) == 0 and weight.group % (_LANES * n) == 0]
    width = fits[0] if fits else _LANES
    pieces = []
    for half in range(2 if weight.bits == 4 else 1):
        for chunk in range(-(-columns // width)):
            first = half * columns + chunk * width
            last = min(first + width, (half + 1) * columns, weight.inputs) - 1
            groups = range(first // weight.group, last // weight.group + 1) if last >= first else ()
            pieces += [(chunk, group, half) for group in groups]
    return width, np.array(pieces, np.int32).T


def _activations(x: Array, weight: QuantizedWeight, width: int, table: np.ndarray) -> Array:
    """Returns activations of the pieces, [P, N, width], from x [N, in]: 0 for inputs outside of a group."""
    columns, halves = weight.values.shape[1], 2 if weight.bits == 4 else 1
    chunks = -(-columns // width)
    parts = jnp.pad(x, ((0, 0), (0, halves * columns - weight.inputs))).reshape(-1, halves, columns)
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, chunks * width - columns)))
    parts = parts.reshape(-1, halves * chunks, width).transpose(1, 0, 2)
    chunk, group, half = (column[:, None] for column in table)
    inputs = half * columns + chunk * width + np.arange(width)
    in_group = inputs // weight.group == group
    return jnp.where(in_group[:, None, :], parts[(half * chunks + chunk)[:, 0]], 0)


def _kernel(table: Any, pieces: Any, packed: Any, *refs: Any, bits: int, width: int) -> None:
    """Computes a block of outputs; refs: scale and perhaps zero [G, block], the result, zero in float32."""
    scale, *integer_zero, out = refs[: len(refs) // 2 + 1]
    zero = refs[-1] if integer_zero else None
    if zero is not None:
        zero[...] = integer_zero[0][...].astype(jnp.int32).astype(jnp.float32)
    offset = 8 if bits == 4 else 0  # small integers of both signs: sums then stay small

    def add(piece: Array, total: Array) -> Array:
        x = pieces[piece]
        stored = packed[:, pl.ds(pl.multiple_of(table[0, piece] * width, width), width)].astype(jnp.int32)
        if bits == 4:
            stored = ((stored >> (4 * table[2, piece])) & 15) - offset
        integers = stored.astype(jnp.float32).astype(jnp.bfloat16)
        sums = lax.dot_general(x, integers, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        group = pl.ds(table[1, piece], 1)
        if zero is not None:
            sums = sums - jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) * (zero[group, :] - offset)
        elif offset:
            sums = sums + jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) * float(offset)
        return total + sums * scale[group, :]

    out[...] = lax.fori_loop(0, pieces.shape[0], add, jnp.zeros(out.shape, jnp.float32))
