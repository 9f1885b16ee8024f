"""The gated product on Hopper: both products of a tile in registers (`tile_products.py`), activated there.

The number of outputs of a tile follows from the matrix alone.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from rljax.kernels import tile_products
from rljax.numerics.kernel_choice import Refused

_OUTPUTS = range(8, 129, 8)  # of a tile; at 128, both sums fill half of a thread's registers
_PROCESSORS = 132


def gated_product(
    x: Array,
    gate: Array,
    up: Array,
    activation: Callable[[Array], Array],
    with_products: bool,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See the package."""
    outputs = len(gate)
    if outputs % _OUTPUTS.start:
        raise Refused(f"{outputs} outputs, it needs a multiple of {_OUTPUTS.start}")
    columns = _columns(outputs)

    def gated(tile: tile_products.Tile, x_ref: Any, gate_ref: Any, up_ref: Any, *out_refs: Any) -> None:
        own_outputs = pl.ds(tile.number * columns, columns)

        def finish(*products: Array) -> None:
            rounded = [product.astype(x.dtype) for product in products]
            wide = [product.astype(jnp.float32) for product in rounded]
            y = (activation(wide[0]) * wide[1]).astype(x.dtype)
            for out_ref, value in zip(out_refs, (y, *rounded), strict=False):
                tile.store(out_ref, own_outputs, value)

        tile.multiply(x_ref, (gate_ref.at[own_outputs], up_ref.at[own_outputs]), finish)

    widths = [outputs] * (3 if with_products else 1)
    rows = x.reshape(-1, x.shape[-1])
    results = tile_products.run(gated, (rows,), (gate, up), widths, outputs // columns, interpret)
    return tuple(result.reshape(*x.shape[:-1], outputs) for result in results)


def _columns(outputs: int) -> int:
    """Returns the outputs of a tile: those with which the slowest processor copies least for 64 rows."""

    def copied(columns: int) -> int:
        return pl.cdiv(outputs // columns, _PROCESSORS) * (64 + 2 * columns)

    return min((columns for columns in _OUTPUTS if outputs % columns == 0), key=copied)
