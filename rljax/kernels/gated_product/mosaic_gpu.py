"""The gated product on Hopper: both products of a tile in the registers of one warpgroup.

A warpgroup multiplies 64 rows of x (wgmma's M) with the same outputs of both matrices (its N); one more
copies rows and weights to shared memory some steps ahead. A block of threads has up to 128 rows, so that few
blocks read the same weights. Products are summed over all inputs in order by one warpgroup, rounded, and
activated where they are.

The number of outputs of a tile follows from the matrix alone, and a tile of rows has always 64: a row's bits
depend neither on the number of rows nor on their place.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels.pallas import gpu_interpreter, gpu_store
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.products import dot

_ROWS = 64  # of x that a warpgroup multiplies
_MOST_WARPGROUPS = 2
_INPUTS = 64  # of a step: 128 bytes, a swizzle
_OUTPUTS = range(8, 129, 8)  # of a tile; at 128, both sums fill half of a thread's registers
_PROCESSORS = 132
_SHARED = 200 * 1024  # bytes
_MOST_STAGES = 8
_TILED = (plgpu.TilingTransform((8, _INPUTS)), plgpu.SwizzleTransform(2 * _INPUTS))


def gated_product(
    x: Array,
    gate: Array,
    up: Array,
    activation: Callable[[Array], Array],
    with_factors: bool,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See the package."""
    count, (outputs, inputs) = x.shape[0], gate.shape
    if x.dtype != jnp.bfloat16:
        raise Refused(f"activations are {x.dtype}, it multiplies bfloat16")
    if inputs % _INPUTS or outputs % _OUTPUTS.start:
        raise Refused(
            f"{inputs} inputs and {outputs} outputs, it needs multiples of {_INPUTS} and {_OUTPUTS.start}"
        )
    warpgroups = min(pl.cdiv(count, _ROWS), _MOST_WARPGROUPS)
    rows, columns = _ROWS * warpgroups, _columns(outputs)
    stage = 2 * _INPUTS * (rows + 2 * columns)
    padded = jnp.pad(x, ((0, -count % rows), (0, 0)))

    def gated(x_ref: Any, gate_ref: Any, up_ref: Any, *out_refs: Any) -> None:
        first_row, first_output = lax.axis_index("rows") * rows, lax.axis_index("outputs") * columns
        own_rows = pl.ds(lax.axis_index("warpgroup") * _ROWS, _ROWS)
        own_outputs = pl.ds(first_output, columns)

        def step(_: Any, x_smem: Any, gate_smem: Any, up_smem: Any, sums: Any) -> Any:
            both = zip(sums, (gate_smem, up_smem), strict=True)
            if interpret:  # interpreted wgmma multiplies by no transpose
                return [total + dot(x_smem[own_rows], weights[...]) for total, weights in both]
            for total, weights in both:
                plgpu.wgmma(total, x_smem.at[own_rows], weights.T)
            plgpu.wgmma_wait(0)
            return sums

        def write(pipeline: Any) -> None:
            def of_tile(*sums: Any) -> list[Array]:
                return [total[...] for total in pipeline(sums)]

            if interpret:
                products = pipeline([jnp.zeros((_ROWS, columns), jnp.float32)] * 2)
            else:
                products = pl.run_scoped(of_tile, *[plgpu.ACC((_ROWS, columns), jnp.float32)] * 2)
            factors = [product.astype(x.dtype) for product in products]
            wide = [factor.astype(jnp.float32) for factor in factors]
            y = (activation(wide[0]) * wide[1]).astype(x.dtype)
            for out_ref, value in zip(out_refs, (y, *factors), strict=False):
                own = out_ref.at[pl.ds(first_row, rows), own_outputs].at[own_rows]
                gpu_store(own, value, interpret)

        of_weights = plgpu.BlockSpec((columns, _INPUTS), lambda step: (0, step), transforms=_TILED)
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(inputs // _INPUTS,),
            in_specs=[
                plgpu.BlockSpec((rows, _INPUTS), lambda step: (0, step), transforms=_TILED),
                of_weights,
                of_weights,
            ],
            max_concurrent_steps=min(_SHARED // stage, _MOST_STAGES),
            num_compute_wgs=warpgroups,
            wg_axis="warpgroup",
            memory_registers=40,
            compute_context=write,
        )(x_ref.at[pl.ds(first_row, rows)], gate_ref.at[own_outputs], up_ref.at[own_outputs])

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
    return tuple(result[:count] for result in results)


def _columns(outputs: int) -> int:
    """Returns the outputs of a tile: those with which the slowest processor copies least for 64 rows."""

    def copied(columns: int) -> int:
        return pl.cdiv(outputs // columns, _PROCESSORS) * (_ROWS + 2 * columns)

    return min((columns for columns in _OUTPUTS if outputs % columns == 0), key=copied)
