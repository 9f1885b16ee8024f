"""The products of heads on Hopper: a block of threads has a head, whose halves are the two products of a tile
(`tile_products.py`). What is rotated together is in the registers of one thread; a norm adds those of four.
"""

import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels import tile_products
from rljax.kernels.head_products import HeadWeights
from rljax.kernels.pallas import gpu_load
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.rows import Numerics

_OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def head_products(
    x: Array,
    angles: Array,
    weights: HeadWeights,
    with_products: bool,
    numerics: Numerics,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See the package."""
    del numerics
    half = angles.shape[-1]
    dim = 2 * half
    if dim not in (64, 128):
        raise Refused(f"heads are 64 or 128 wide, not {dim}")
    starts = [0, *itertools.accumulate(len(matrix) // dim for matrix in weights.matrices)]

    def of_head(tile: tile_products.Tile, x_ref: Any, angles_ref: Any, *refs: Any) -> None:
        matrices, refs = refs[:3], refs[3:]
        biases, refs = refs[: len(weights.biases)], refs[len(weights.biases) :]
        scales, out_refs = refs[: len(weights.scales)], refs[len(weights.scales) :]

        def halves(first: Any) -> tuple[pl.Slice, pl.Slice]:
            return pl.ds(first, half), pl.ds(first + half, half)

        def of_columns(ref: Any, first: Any) -> list[Array]:
            """Both halves of the entries of a vector from `first` on, for every row."""
            vectors = [gpu_load(ref.at[columns], _OF_COLUMNS, tile.interpret) for columns in halves(first)]
            return [lax.broadcast_in_dim(vector, (tile.rows, half), (1,)) for vector in vectors]

        def rounded(parts: list[Array]) -> list[Array]:
            return [part.astype(x.dtype).astype(jnp.float32) for part in parts]

        def compute(kind: int) -> None:
            first = (tile.number - starts[kind]) * dim

            def finish(*products: Array) -> None:
                parts = list(products)
                if biases:
                    both = zip(parts, of_columns(biases[kind], first), strict=True)
                    parts = [part + bias for part, bias in both]
                rounded_products = parts = rounded(parts)
                if kind < len(scales):
                    total = sum(jnp.sum(part * part, axis=1) for part in parts)
                    factor = lax.rsqrt(total * (1.0 / dim) + weights.epsilon)
                    factor = lax.broadcast_in_dim(factor, (tile.rows, half), (0,))
                    normed = rounded([part * factor for part in parts])
                    both = zip(normed, of_columns(scales[kind], 0), strict=True)
                    parts = rounded([part * scale for part, scale in both])
                if kind < 2:
                    cos, sin = (tile.load(angles_ref, columns) for columns in halves(0))
                    parts = [parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin]
                for out_ref, values in zip(out_refs, (parts, rounded_products), strict=False):
                    for columns, value in zip(halves(tile.number * dim), values, strict=True):
                        tile.store(out_ref, columns, value.astype(x.dtype))

            own = tuple(matrices[kind].at[outputs] for outputs in halves(first))
            tile.multiply(x_ref, own, finish)

        for kind in range(3):
            is_own = (starts[kind] <= tile.number) & (tile.number < starts[kind + 1])
            pl.when(is_own)(lambda kind=kind: compute(kind))

    rows = x.reshape(-1, x.shape[-1]), angles[:, :, :2].reshape(-1, dim)
    others = (*weights.matrices, *weights.biases, *weights.scales)
    widths = [starts[-1] * dim] * (2 if with_products else 1)
    y, *products = tile_products.run(of_head, rows, others, widths, starts[-1], interpret)
    borders = [start * dim for start in starts[1:3]]
    parts = [part for whole in products for part in jnp.split(whole, borders, axis=1)]
    return (y.reshape(*x.shape[:-1], -1, dim), *(part.reshape(*x.shape[:-1], -1) for part in parts))
