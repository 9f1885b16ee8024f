"""Two products of the same rows on Hopper, in registers of one warpgroup, for kernels that go on with them.

A warpgroup multiplies 64 rows (wgmma's M) with tiles of two matrices (its N); one more copies rows and
weights to shared memory some steps ahead. A block of threads has up to 128 rows, so that few blocks read the
same weights. A product is summed over all inputs in order by one warpgroup, so its bits depend neither on the
number of rows nor on their place.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels.pallas import gpu_interpreter, gpu_load, gpu_store
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.products import dot

_ROWS = 64
_MOST_WARPGROUPS = 2
_INPUTS = 64  # of a step: 128 bytes, a swizzle
_SHARED = 200 * 1024  # bytes
_MOST_STAGES = 8
_TILED = (plgpu.TilingTransform((8, _INPUTS)), plgpu.SwizzleTransform(2 * _INPUTS))


class Tile(NamedTuple):
    """What a block of threads computes, within a kernel of `run`.

    Attributes:
      number: of the tile of outputs.
      block: the rows of the block of threads.
      own: those of this warpgroup among them, `rows` many.
      warpgroups: how many multiply.
      interpret: whether the kernel is interpreted.
    """

    number: Array
    block: pl.Slice
    own: pl.Slice
    warpgroups: int
    interpret: bool
    rows: int = _ROWS

    def load(self, ref: Any, columns: pl.Slice) -> Array:
        """Returns these columns of this warpgroup's rows of an array [N, any] in the layout of wgmma."""
        return gpu_load(ref.at[self.block, columns].at[self.own], plgpu.Layout.WGMMA, self.interpret)

    def store(self, ref: Any, columns: pl.Slice, value: Array) -> None:
        """Writes these columns of this warpgroup's rows of an array [N, any]."""
        gpu_store(ref.at[self.block, columns].at[self.own], value, self.interpret)

    def multiply(self, x: Any, weights: tuple[Any, Any], finish: Callable[[Array, Array], None]) -> None:
        """Multiplies the rows.

        Args:
          x: bfloat16 [N, in], in global memory.
          weights: two of bfloat16 [columns, in], in global memory.
          finish: takes both products of its rows, float32 [rows, columns] in the layout of wgmma.
        """
        columns, inputs = weights[0].shape
        shape, rows = (self.rows, columns), self.rows * self.warpgroups

        def step(_: Any, x_smem: Any, first_smem: Any, second_smem: Any, sums: Any) -> Any:
            both = zip(sums, (first_smem, second_smem), strict=True)
            if self.interpret:  # interpreted wgmma multiplies by no transpose
                return [total + dot(x_smem[self.own], tile[...]) for total, tile in both]
            for total, tile in both:
                plgpu.wgmma(total, x_smem.at[self.own], tile.T)
            plgpu.wgmma_wait(0)
            return sums

        def compute(pipeline: Any) -> None:
            if self.interpret:
                products = pipeline([jnp.zeros(shape, jnp.float32)] * 2)
            else:
                read = lambda *sums: [total[...] for total in pipeline(sums)]  # noqa: E731
                products = pl.run_scoped(read, *[plgpu.ACC(shape, jnp.float32)] * 2)
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
            num_compute_wgs=self.warpgroups,
            wg_axis="warpgroup",
            memory_registers=40,
            compute_context=compute,
        )(x.at[self.block], *weights)


def run(
    body: Callable[..., None],
    rows: tuple[Array, ...],
    others: tuple[Array, ...],
    widths: Sequence[int],
    tiles: int,
    interpret: bool,
) -> list[Array]:
    """Returns bfloat16 arrays [N, width].

    Args:
      body: takes a `Tile` and references to `rows`, `others` and the results, in global memory.
      rows: arrays [N, any]; the first are those that are multiplied, bfloat16 [N, in].
      others: arrays that are read whole.
      widths: of the results.
      tiles: of outputs.

    Raises:
      Refused: the rows are not multiplied here.
    """
    count, inputs = rows[0].shape
    if rows[0].dtype != jnp.bfloat16:
        raise Refused(f"activations are {rows[0].dtype}, it multiplies bfloat16")
    if inputs % _INPUTS:
        raise Refused(f"{inputs} inputs, it needs a multiple of {_INPUTS}")
    warpgroups = min(pl.cdiv(count, _ROWS), _MOST_WARPGROUPS)
    size = _ROWS * warpgroups
    padded = [jnp.pad(each, ((0, -count % size), (0, 0))) for each in rows]

    def kernel(*refs: Any) -> None:
        block = pl.ds(lax.axis_index("rows") * size, size)
        own = pl.ds(lax.axis_index("warpgroup") * _ROWS, _ROWS)
        body(Tile(lax.axis_index("tile"), block, own, warpgroups, interpret), *refs)

    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((len(padded[0]), width), jnp.bfloat16) for width in widths],
        grid=(tiles, len(padded[0]) // size),
        grid_names=("tile", "rows"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpreter() if interpret else None,
    )(*padded, *others)
    return [result[:count] for result in results]
