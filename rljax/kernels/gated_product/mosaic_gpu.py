"""The gated product on Hopper: both products of a tile in registers (`tile_products.py`), activated there.

The number of outputs of a tile follows from the matrix alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels import tile_products
from rljax.kernels.pallas import gpu_interpreter, gpu_store
from rljax.numerics.kernel_choice import Refused

_OUTPUTS = range(8, 129, 8)  # of a tile; at 128, both sums fill half of a thread's registers
_PROCESSORS = 132


def gated_product(
    x: Array,
    gate: Array,
    up: Array,
    activation: Callable[[Array], Array],
    with_factors: bool,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See the package."""
    flat, outputs = x.reshape(-1, x.shape[-1]), len(gate)
    tile_products.require(flat)
    count = len(flat)
    if outputs % _OUTPUTS.start:
        raise Refused(f"{outputs} outputs, it needs a multiple of {_OUTPUTS.start}")
    warpgroups, columns = tile_products.warpgroups_of(count), _columns(outputs)
    rows = tile_products.ROWS * warpgroups
    padded = jnp.pad(flat, ((0, -count % rows), (0, 0)))

    def gated(x_ref: Any, gate_ref: Any, up_ref: Any, *out_refs: Any) -> None:
        block = pl.ds(lax.axis_index("rows") * rows, rows)
        own_rows = pl.ds(lax.axis_index("warpgroup") * tile_products.ROWS, tile_products.ROWS)
        own_outputs = pl.ds(lax.axis_index("outputs") * columns, columns)

        def finish(*products: Array) -> None:
            factors = [product.astype(x.dtype) for product in products]
            wide = [factor.astype(jnp.float32) for factor in factors]
            y = (activation(wide[0]) * wide[1]).astype(x.dtype)
            for out_ref, value in zip(out_refs, (y, *factors), strict=False):
                gpu_store(out_ref.at[block, own_outputs].at[own_rows], value, interpret)

        weights = gate_ref.at[own_outputs], up_ref.at[own_outputs]
        tile_products.multiply(x_ref.at[block], weights, finish, warpgroups, interpret)

    results = plgpu.kernel(
        gated,
        out_type=[jax.ShapeDtypeStruct((len(padded), outputs), x.dtype)] * (3 if with_factors else 1),
        grid=(outputs // columns, len(padded) // rows),
        grid_names=("outputs", "rows"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpreter() if interpret else None,
    )(padded, gate, up)
    return tuple(result[:count].reshape(*x.shape[:-1], outputs) for result in results)


def _columns(outputs: int) -> int:
    """Returns the outputs of a tile: those with which the slowest processor copies least for 64 rows."""

    def copied(columns: int) -> int:
        return pl.cdiv(outputs // columns, _PROCESSORS) * (tile_products.ROWS + 2 * columns)

    return min((columns for columns in _OUTPUTS if outputs % columns == 0), key=copied)
