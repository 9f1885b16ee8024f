"""Rounding to nearest on a TPU: a block of whole rows is read once, then processed in VMEM.

128 inputs are processed at a time: first for the range of each group, whose grid stays in VMEM, then for the
integers. In 4 bits the two inputs of a byte are half a row apart, and may be in different lanes: they are
rounded in place, and the integers are shifted.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.kernels.round_to_nearest.grid import for_range, grid, nearest
from rljax.numerics.kernel_choice import Refused

_LANES = 128
_ROWS = 32  # rows at a time: a tile of bytes
_BLOCK_BYTES = 2**20  # bytes of weights
_MOST_BYTES = 12 * 2**20  # bytes of VMEM, whose default limit is 16 MiB


def round_to_nearest(
    weight: Array, bits: int, group: int, interpret: bool = False
) -> tuple[Array, Array, Array | None]:
    """See the package."""
    if weight.dtype not in (jnp.float32, jnp.bfloat16):
        raise Refused(f"weights are float32 or bfloat16, not {weight.dtype}")
    outputs, inputs = weight.shape
    chunks = pl.cdiv(inputs, _LANES)
    if 0 < group < inputs and group % _LANES:
        raise Refused(f"groups are multiples of {_LANES} or the whole row, not {group} of {inputs}")
    per_group = group // _LANES if 0 < group < inputs else chunks
    groups = pl.cdiv(chunks, per_group)
    columns = -(-inputs // 2) if bits == 4 else inputs
    row_bytes = chunks * _LANES * weight.dtype.itemsize
    rows = min(max(_BLOCK_BYTES // row_bytes // _ROWS, 1), pl.cdiv(outputs, _ROWS)) * _ROWS
    grids = 2 * groups * _ROWS * _LANES * 4
    if 2 * rows * (row_bytes + columns) + grids > _MOST_BYTES:
        raise Refused(f"rows of {inputs} inputs in {groups} groups do not fit its memory")

    def rows_of(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, pl.cdiv(width, _LANES) * _LANES), lambda i: (i, 0))

    of_groups = jax.ShapeDtypeStruct((outputs, groups), jnp.float32)
    values, scale, *zero = pl.pallas_call(
        functools.partial(_kernel, bits=bits, inputs=inputs, per_group=per_group),
        grid=(pl.cdiv(outputs, rows),),
        in_specs=[rows_of(inputs)],
        out_specs=[rows_of(columns), *[rows_of(groups)] * (2 if bits == 4 else 1)],
        out_shape=[
            jax.ShapeDtypeStruct((outputs, columns), jnp.uint8 if bits == 4 else jnp.int8),
            *[of_groups] * (2 if bits == 4 else 1),
        ],
        scratch_shapes=[pltpu.VMEM((groups, _ROWS, _LANES), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="round_to_nearest",
        interpret=interpret,
    )(weight)
    return values, scale, zero[0].astype(jnp.uint8) if zero else None


def _kernel(weight: Any, values: Any, *refs: Any, bits: int, inputs: int, per_group: int) -> None:
    """Rounds one block of rows; refs are scale and perhaps zero [rows, G], and 1 / scale and zero of every
    group for the current rows [G, 32, 128].
    """
    *of_groups, inverses, zeros = refs
    chunks, half = pl.cdiv(inputs, _LANES), -(-inputs // 2)
    lane = lax.broadcasted_iota(jnp.int32, (_ROWS, _LANES), 1)

    def some_rows(first: Array, _: None) -> None:
        block_rows = pl.ds(pl.multiple_of(first * _ROWS, _ROWS), _ROWS)

        def lanes_of(index: Array) -> pl.Slice:
            return pl.ds(pl.multiple_of(index * _LANES, _LANES), _LANES)

        def inside(index: Array, x: Array) -> Array:
            return jnp.where(lane + index * _LANES < inputs, x, 0.0) if inputs % _LANES else x

        def chunk(index: Array) -> Array:
            return inside(index, weight[block_rows, lanes_of(index)].astype(jnp.float32))

        def find_grid(group: Array, _: None) -> None:
            def widen(part: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
                part = jnp.minimum(group * per_group + part, chunks - 1)  # the last group may be shorter
                x = for_range(chunk(part))
                return jnp.minimum(bounds[0], x), jnp.maximum(bounds[1], x)

            nothing = jnp.zeros((_ROWS, _LANES), jnp.float32)
            low, high = lax.fori_loop(0, per_group, widen, (nothing, nothing))
            low, high = jnp.min(low, axis=1, keepdims=True), jnp.max(high, axis=1, keepdims=True)
            scale, inverse, zero = grid(low, high, bits)
            inverses[group] = jnp.broadcast_to(inverse, nothing.shape)
            zeros[group] = jnp.broadcast_to(zero, nothing.shape)
            for ref, column in zip(of_groups, (scale, zero), strict=False):
                there = lanes_of(lax.div(group, _LANES))
                ref[block_rows, there] = jnp.where(
                    lane == lax.rem(group, _LANES), column, ref[block_rows, there]
                )

        def integers(index: Array) -> Array:
            index = jnp.minimum(index, chunks - 1)  # later chunks are not stored
            group = lax.div(index, per_group)
            x = nearest(chunk(index), inverses[group], zeros[group], bits)
            return inside(index, x).astype(jnp.int32)

        def store(index: Array, _: None) -> None:
            packed = integers(index)
            if bits == 4:
                high = integers(index + half // _LANES)
                if shift := half % _LANES:
                    following = integers(index + half // _LANES + 1)
                    high = jnp.concatenate([high[:, shift:], following[:, :shift]], axis=1)
                packed |= high << 4
            values[block_rows, lanes_of(index)] = packed.astype(values.dtype)

        lax.fori_loop(0, inverses.shape[0], find_grid, None)
        lax.fori_loop(0, values.shape[1] // _LANES, store, None)

    lax.fori_loop(0, weight.shape[0] // _ROWS, some_rows, None)
