"""Rounding to nearest on Hopper: a block of threads has 64 rows of one group, or of two that share bytes.

Bulk copies (TMA) load the groups to shared memory, where they are read once for their range and once for
their integers; another copy stores the bytes. Blocks are small, so that several on a processor wait for
memory at the same time. In 4 bits the two inputs of a byte are half a row apart. If half a row is not a whole
number of groups, a block has a part of a group's bytes, and loads both whole groups for their ranges. A
smaller last group is filled up with zeros, in a copy of the matrix.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels.pallas import gpu_interpreter, gpu_load, gpu_store
from rljax.kernels.round_to_nearest.grid import for_range, grid, nearest
from rljax.numerics.kernel_choice import Refused

_ROWS = 64
_ALIGNED = 8  # TMA copies rows of a matrix in multiples of this
_GROUPS = (64, 128)
_SWIZZLE = 128  # largest number of bytes


def round_to_nearest(
    weight: Array, bits: int, group: int, interpret: bool = False
) -> tuple[Array, Array, Array | None]:
    """See the package."""
    outputs, inputs = weight.shape
    if weight.dtype not in (jnp.float32, jnp.bfloat16):
        raise Refused(f"weights are float32 or bfloat16, not {weight.dtype}")
    if group not in _GROUPS or inputs % min(_GROUPS):
        raise Refused(
            f"{inputs} inputs in groups of {group or 'a whole row'}: it takes multiples of 64 inputs, in"
            " groups of 64 or 128"
        )
    if outputs < _ROWS or outputs % _ALIGNED:
        raise Refused(f"{outputs} outputs, it needs a multiple of {_ALIGNED}, and at least {_ROWS}")
    parts = 2 if bits == 4 else 1  # groups per block
    columns = inputs // parts
    width = math.gcd(group, columns)
    step = min(width, _SWIZZLE // weight.dtype.itemsize)
    of_groups = jax.ShapeDtypeStruct((outputs, pl.cdiv(inputs, group)), jnp.float32)
    dtype = jnp.uint8 if bits == 4 else jnp.int8
    values, scale, *zero = plgpu.kernel(
        functools.partial(_kernel, bits=bits, group=group, step=step, interpret=interpret),
        out_type=[jax.ShapeDtypeStruct((outputs, columns), dtype), *[of_groups] * parts],
        scratch_types=[
            plgpu.SMEM((parts, _ROWS, group), weight.dtype, transforms=_tiles(step, weight.dtype)),
            plgpu.SMEM((_ROWS, width), dtype, transforms=_tiles(step, dtype)),
            plgpu.Barrier(num_barriers=parts),
        ],
        grid=(columns // width, pl.cdiv(outputs, _ROWS)),
        grid_names=("chunk", "tile"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpreter() if interpret else None,
    )(jnp.pad(weight, ((0, 0), (0, -inputs % group))))
    return values, scale, zero[0].astype(jnp.uint8) if zero else None


def _tiles(columns: int, dtype: Any) -> tuple[Any, ...]:
    swizzle = columns * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((_ALIGNED, columns)), plgpu.SwizzleTransform(swizzle)


def _kernel(weight: Any, values: Any, *refs: Any, bits: int, group: int, step: int, interpret: bool) -> None:
    """Rounds some bytes of 64 rows, `step` at a time; refs are scale and perhaps zero [out, G], and in shared
    memory the groups [1 or 2, 64, group], the bytes [64, width], and a barrier per group.
    """
    *of_groups, groups_smem, bytes_smem, here = refs
    parts, width = groups_smem.shape[0], bytes_smem.shape[1]
    chunk = lax.axis_index("chunk")
    # The last tile overlaps the one before it, so as to end with the matrix; both write the same values.
    rows = pl.ds(jnp.minimum(lax.axis_index("tile") * _ROWS, weight.shape[0] - _ROWS), _ROWS)
    starts = [chunk * width + part * values.shape[1] for part in range(parts)]

    def load(ref: Any) -> Array:
        return gpu_load(ref, plgpu.Layout.WGMMA, interpret).astype(jnp.float32)

    for part, start in enumerate(starts):
        whole = pl.ds(lax.div(start, group) * group, group)
        plgpu.copy_gmem_to_smem(weight.at[rows, whole], groups_smem.at[part], here.at[part])
    grids = []
    for part, start in enumerate(starts):
        plgpu.barrier_wait(here.at[part])
        x = for_range(load(groups_smem.at[part]))
        low, high = jnp.minimum(jnp.min(x, axis=1), 0.0), jnp.maximum(jnp.max(x, axis=1), 0.0)
        scale, inverse, zero = grid(low, high, bits)
        for ref, of_rows in zip(of_groups, (scale, zero), strict=False):
            gpu_store(ref.at[rows, lax.div(start, group)], of_rows, interpret)
        grids.append((inverse, zero))

    def over_columns(of_rows: Array) -> Array:
        return lax.broadcast_in_dim(of_rows, (_ROWS, step), (0,))

    for first in range(0, width, step):
        packed = jnp.float32(0)
        for part, (inverse, zero) in enumerate(grids):
            x = load(groups_smem.at[part, :, pl.ds(lax.rem(starts[part], group) + first, step)])
            zero = over_columns(zero) if bits == 4 else 0.0
            packed = packed + nearest(x, over_columns(inverse), zero, bits) * float(16**part)
        bytes_smem.at[:, pl.ds(first, step)][...] = packed.astype(jnp.int32).astype(values.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(bytes_smem, values.at[rows, pl.ds(chunk * width, width)])
    plgpu.wait_smem_to_gmem(0)
