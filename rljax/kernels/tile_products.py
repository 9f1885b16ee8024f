"""Two products of the same rows on Hopper, in registers of one warpgroup, for kernels that go on with them.

A warpgroup multiplies 64 rows (wgmma's M) with tiles of two matrices (its N); one more copies rows and
weights to shared memory some steps ahead. A block of threads has up to 128 rows, so that few blocks read the
same weights. A product is summed over all inputs in order by one warpgroup, so its bits depend neither on the
number of rows nor on their place.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.numerics.kernel_choice import Refused
from rljax.numerics.products import dot

ROWS = 64
"""Rows of a warpgroup."""
_MOST_WARPGROUPS = 2
_INPUTS = 64  # of a step: 128 bytes, a swizzle
_SHARED = 200 * 1024  # bytes
_MOST_STAGES = 8
_TILED = (plgpu.TilingTransform((8, _INPUTS)), plgpu.SwizzleTransform(2 * _INPUTS))


def require(x: Array) -> None:
    """Raises `Refused` for rows [N, in] that are not multiplied here."""
    if x.dtype != jnp.bfloat16:
        raise Refused(f"activations are {x.dtype}, it multiplies bfloat16")
    if x.shape[1] % _INPUTS:
        raise Refused(f"{x.shape[1]} inputs, it needs a multiple of {_INPUTS}")


def warpgroups_of(count: int) -> int:
    """Returns the warpgroups of a block of threads that multiply, for so many rows in all."""
    return min(pl.cdiv(count, ROWS), _MOST_WARPGROUPS)


def multiply(
    x: Any,
    weights: tuple[Any, Any],
    finish: Callable[[Array, Array], None],
    warpgroups: int,
    interpret: bool,
) -> None:
    """Multiplies the rows of a block of threads, within a kernel whose thread is "warpgroup".

    Args:
      x: bfloat16 [ROWS * warpgroups, in], in global memory.
      weights: two of bfloat16 [columns, in], in global memory.
      finish: takes both products of a warpgroup's rows, float32 [ROWS, columns] in the layout of wgmma.
    """
    columns, inputs = weights[0].shape
    rows = ROWS * warpgroups
    own_rows = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)

    def step(_: Any, x_smem: Any, first_smem: Any, second_smem: Any, sums: Any) -> Any:
        both = zip(sums, (first_smem, second_smem), strict=True)
        if interpret:  # interpreted wgmma multiplies by no transpose
            return [total + dot(x_smem[own_rows], tile[...]) for total, tile in both]
        for total, tile in both:
            plgpu.wgmma(total, x_smem.at[own_rows], tile.T)
        plgpu.wgmma_wait(0)
        return sums

    def compute(pipeline: Any) -> None:
        if interpret:
            products = pipeline([jnp.zeros((ROWS, columns), jnp.float32)] * 2)
        else:
            read = lambda *sums: [total[...] for total in pipeline(sums)]  # noqa: E731
            products = pl.run_scoped(read, *[plgpu.ACC((ROWS, columns), jnp.float32)] * 2)
        finish(*products)

    of_weights = plgpu.BlockSpec((columns, _INPUTS), lambda step: (0, step), transforms=_TILED)
    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(inputs // _INPUTS,),
        in_specs=[
            plgpu.BlockSpec((rows, _INPUTS), lambda step: (0, step), transforms=_TILED),
            of_weights,
            of_weights,
        ],
        max_concurrent_steps=min(_SHARED // (2 * _INPUTS * (rows + 2 * columns)), _MOST_STAGES),
        num_compute_wgs=warpgroups,
        wg_axis="warpgroup",
        memory_registers=40,
        compute_context=compute,
    )(x, *weights)
