"""The products of heads on Hopper: a block of threads has a head, whose halves are the two products of a tile
(`tile_products.py`). What is rotated together is in the registers of one thread; a norm adds those of four.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels import tile_products
from rljax.kernels.head_products import HeadWeights
from rljax.kernels.pallas import gpu_interpreter, gpu_load, gpu_store
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.rows import Numerics

_OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def head_products(
    x: Array,
    angles: Array,
    weights: HeadWeights,
    with_factors: bool,
    numerics: Numerics,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See the package."""
    del numerics
    flat = x.reshape(-1, x.shape[-1])
    tile_products.require(flat)
    half = angles.shape[-1]
    dim = 2 * half
    if dim not in (64, 128):
        raise Refused(f"heads are 64 or 128 wide, not {dim}")
    counts = [matrix.shape[0] // dim for matrix in weights.matrices]
    starts = list(itertools.accumulate(counts, initial=0))
    count, warpgroups = len(flat), tile_products.warpgroups_of(len(flat))
    rows = tile_products.ROWS * warpgroups
    more = (0, -count % rows)
    padded, turned = (jnp.pad(each, (more, (0, 0))) for each in (flat, angles[:, :, :2].reshape(count, dim)))
    halves = pl.ds(0, half), pl.ds(half, half)

    def of_head(x_ref: Any, angles_ref: Any, *refs: Any) -> None:
        matrices, refs = refs[:3], refs[3:]
        biases, refs = refs[: len(weights.biases)], refs[len(weights.biases) :]
        scales, out_refs = refs[: len(weights.scales)], refs[len(weights.scales) :]
        block = pl.ds(lax.axis_index("rows") * rows, rows)
        own_rows = pl.ds(lax.axis_index("warpgroup") * tile_products.ROWS, tile_products.ROWS)
        head = lax.axis_index("head")

        def of_rows(vector: Array) -> Array:
            return lax.broadcast_in_dim(vector, (tile_products.ROWS, half), (0,))

        def of_columns(ref: Any, first: Any) -> Array:
            """Entries [half] of a vector from `first` on, for every row."""
            vector = gpu_load(ref.at[pl.ds(first, half)], _OF_COLUMNS, interpret)
            return lax.broadcast_in_dim(vector, (tile_products.ROWS, half), (1,))

        def compute(kind: int) -> None:
            first_row = (head - starts[kind]) * dim

            def finish(*parts: Array) -> None:
                parts = list(parts)
                if biases:
                    parts = [
                        part + of_columns(biases[kind], first_row + own * half)
                        for own, part in enumerate(parts)
                    ]
                factors = [part.astype(x.dtype) for part in parts]
                wide = [part.astype(jnp.float32) for part in factors]
                if kind < len(scales):
                    total = sum(jnp.sum(part * part, axis=1) for part in wide)
                    factor = of_rows(lax.rsqrt(total * (1.0 / dim) + weights.epsilon))
                    normed = [(part * factor).astype(x.dtype).astype(jnp.float32) for part in wide]
                    scaled = [part * of_columns(scales[kind], own * half) for own, part in enumerate(normed)]
                    wide = [part.astype(x.dtype).astype(jnp.float32) for part in scaled]
                if kind < 2:
                    cos, sin = (
                        gpu_load(angles_ref.at[block, own].at[own_rows], plgpu.Layout.WGMMA, interpret)
                        for own in halves
                    )
                    first, second = wide
                    wide = [first * cos - second * sin, second * cos + first * sin]
                results = [[part.astype(x.dtype) for part in wide], factors]
                for out_ref, both in zip(out_refs, results, strict=False):
                    for own, part in zip((0, half), both, strict=True):
                        columns = pl.ds(head * dim + own, half)
                        gpu_store(out_ref.at[block, columns].at[own_rows], part, interpret)

            tiles = [matrices[kind].at[pl.ds(first_row + own, half)] for own in (0, half)]
            tile_products.multiply(x_ref.at[block], tuple(tiles), finish, warpgroups, interpret)

        for kind in range(3):
            pl.when((starts[kind] <= head) & (head < starts[kind + 1]))(lambda kind=kind: compute(kind))

    outputs = starts[-1] * dim
    y, *factors = plgpu.kernel(
        of_head,
        out_type=[jax.ShapeDtypeStruct((len(padded), outputs), x.dtype)] * (2 if with_factors else 1),
        grid=(starts[-1], len(padded) // rows),
        grid_names=("head", "rows"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpreter() if interpret else None,
    )(padded, turned, *weights.matrices, *weights.biases, *weights.scales)
    borders = [start * dim for start in starts[1:3]]
    parts = [part for whole in factors for part in jnp.split(whole[:count], borders, axis=1)]
    parts = [part.reshape(*x.shape[:-1], -1) for part in parts]
    return (y[:count].reshape(*x.shape[:-1], -1, dim), *parts)
