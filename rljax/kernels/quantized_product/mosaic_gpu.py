"""The product with quantized weights on Hopper: packed bytes become bfloat16 in registers for the tensor
cores.

Rows are few, so weights are the left operand and the result is out^T [out, N]: a warpgroup multiplies 64
outputs with all rows. TMA loads packed weights and activations to shared memory some steps ahead. 16-bit
words become bfloat16 integers by a shift, a mask and an exponent; wgmma reads them from registers and sums a
group in float32. The group's scale is applied to the sum, not to the weights, so no weight is rounded to
bfloat16: value - zero is an integer of few bits.

A word holds two neighbouring bytes of a row. Its nibbles (or bytes) belong to inputs that are not neighbours,
so activations are reordered to match (`_planes`), at a small cost next to that of the weights.

If the device holds more blocks than tiles of outputs, inputs are split among blocks, whose sums are
added in a fixed order. Tiles and splits depend on the matrix alone, so a row's bits do not depend on N.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rljax.kernels.pallas import gpu_interpreter, gpu_load
from rljax.kernels.quantized_product.chunks import ROWS, in_chunks
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.quantized import QuantizedWeight

_ROWS = 64  # of weights that a warpgroup multiplies: wgmma's M
_WARPGROUPS = 2
_TILE = _ROWS * _WARPGROUPS
_ALIGNED = 8  # rows of weights that TMA copies together, from a multiple of as many on
_STAGES = 4
_PROCESSORS = 132
_EXPONENT = 0x4300  # of bfloat16 128: an integer below 128 in the bits below it is added to that


def quantized_product(x: Array, weight: QuantizedWeight, interpret: bool = False) -> Array:
    """Multiplies x bfloat16 [N, in] by weight [out, in]: float32 [N, out]."""
    columns = _columns(x, weight)
    return in_chunks(lambda rows: _product(rows, weight, columns, interpret), x)


def _product(x: Array, weight: QuantizedWeight, columns: int, interpret: bool) -> Array:
    halves = 2 if weight.bits == 4 else 1
    rows = -(-x.shape[0] // 8) * 8
    planes = _planes(jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))), halves)
    words = lax.bitcast_convert_type(weight.values.reshape(weight.shape[0], -1, 2), jnp.uint16)
    parts = _partial_sums(planes, words, weight, columns, interpret)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total[:, : x.shape[0]].T


def _columns(x: Array, weight: QuantizedWeight) -> int:
    """Returns the number of words per step, which fill a swizzle, divide the row and stay within a group.

    Raises:
      Refused: there is no such number, or the kernel does not support a type or size.
    """
    outputs, inputs = weight.shape
    if weight.activations != "float":
        raise Refused("activations are rounded to int8, it multiplies bfloat16")
    if x.dtype != jnp.bfloat16:
        raise Refused(f"activations are {x.dtype}, it multiplies bfloat16")
    if outputs < _TILE:
        raise Refused(f"{outputs} outputs, it needs at least {_TILE}")
    if outputs % _ALIGNED:
        raise Refused(f"{outputs} outputs, it needs a multiple of {_ALIGNED}")
    words, rest = divmod(inputs, 4 if weight.bits == 4 else 2)
    for columns in (64, 32, 16):
        whole_group = weight.group >= inputs or weight.group % (2 * columns) == 0
        if rest == 0 and words % columns == 0 and whole_group:
            return columns
    raise Refused(
        f"{inputs} inputs in groups of {weight.group}: it needs multiples of"
        f" {64 if weight.bits == 4 else 32} inputs, and groups of a multiple of 32 or the whole row"
    )


def _planes(x: Array, halves: int) -> Array:
    """Reorders x [N, in] to [2 * halves * N, words]: plane byte * halves + half has the inputs of that byte
    (in 4 bits, of its low or high half) of every word.
    """
    count = x.shape[0]
    parts = x.reshape(count, halves, -1, 2).transpose(3, 1, 0, 2)
    return parts.reshape(2 * halves * count, -1)


def _splits(tiles: int, steps: int) -> int:
    """Returns the number of blocks that share a tile's steps in the least time; starting takes two steps."""

    def time(splits: int) -> int:
        waves = -(-tiles * splits // _PROCESSORS)
        return waves * (-(-steps // splits) + 2)

    return min(range(1, min(steps, 8) + 1), key=time)


def _partial_sums(
    planes: Array, words: Array, weight: QuantizedWeight, columns: int, interpret: bool
) -> Array:
    """Returns partial sums, float32 [splits, out, N]."""
    halves = 2 if weight.bits == 4 else 1
    outputs, inputs = weight.shape
    rows = planes.shape[0] // (2 * halves)
    steps, groups = words.shape[1] // columns, weight.scale.shape[1]
    tiles = -(-outputs // _TILE)
    splits = _splits(tiles, steps)
    most_steps = -(-steps // splits)
    transforms = (plgpu.TilingTransform((_ALIGNED, columns)), plgpu.SwizzleTransform(2 * columns))

    def kernel(planes_ref: Any, words_ref: Any, scale_ref: Any, *refs: Any) -> None:
        zero_ref = None if weight.zero is None else refs[0]
        out_ref = refs[-1]
        tile, split = lax.axis_index("tile"), lax.axis_index("split")
        warpgroup = lax.axis_index("warpgroup")
        # The last tile overlaps the one before it, so as to end with the matrix; both write the same values.
        first_row = jnp.minimum(tile * _TILE, outputs - _TILE)
        own_rows = pl.ds(first_row + warpgroup * _ROWS, _ROWS)
        first_step = split * most_steps
        own_steps = jnp.minimum(most_steps, steps - first_step)

        def grid_of(step: Array) -> list[tuple[Array, Array | None]]:
            """Returns scale and zero + 128 [64] of the groups of a step, one per half."""
            grids = []
            for half in range(halves):
                start = (first_step + step) * (2 * columns) + half * (inputs // 2)
                group = jnp.minimum(start // weight.group, groups - 1)
                scale = gpu_load(scale_ref.at[own_rows, group], _OF_ROWS, interpret)
                zero = (
                    None if zero_ref is None else gpu_load(zero_ref.at[own_rows, group], _OF_ROWS, interpret)
                )
                grids.append((scale, zero))
            return grids

        def step(indices: Any, words_smem: Any, planes_smem: Any, carry: Any) -> Any:
            total, grids = carry
            following = grid_of(indices[0] + 1)  # loaded while this step is computed
            packed = gpu_load(words_smem.at[pl.ds(warpgroup * _ROWS, _ROWS)], plgpu.Layout.WGMMA, interpret)

            factors = [
                (
                    half,
                    _integers(packed, byte, half, zero, weight.bits, interpret),
                    planes_smem.at[pl.ds((byte * halves + half) * rows, rows)],
                )
                for half, (_, zero) in enumerate(grids)
                for byte in range(2)
            ]

            def multiply(*sums: Any) -> list[Array]:
                for half, left, plane in factors:
                    plgpu.wgmma(sums[half], left, plane.T)
                plgpu.wgmma_wait(0)
                return [accumulator[...] for accumulator in sums]

            if interpret:  # interpreted wgmma reads its left operand from shared memory only
                sums = [jnp.zeros((_ROWS, rows), jnp.float32)] * halves
                for half, left, plane in factors:
                    sums[half] += _dot(left, plane[...])
            else:
                sums = pl.run_scoped(multiply, *[plgpu.ACC((_ROWS, rows), jnp.float32)] * halves)
            for (scale, _), of_group in zip(grids, sums, strict=True):
                total = total + of_group * lax.broadcast_in_dim(scale, (_ROWS, rows), (0,))
            return total, following

        def write(pipeline: Any) -> None:
            nothing = jnp.zeros((_ROWS, rows), jnp.float32)
            nothing = nothing if interpret else plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
            total, _ = pipeline((nothing, grid_of(jnp.int32(0))))
            out_ref.at[split, own_rows][...] = total

        pipeline = plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(own_steps,),
            in_specs=[
                plgpu.BlockSpec((_TILE, columns), lambda step: (0, step), transforms=transforms),
                plgpu.BlockSpec((planes.shape[0], columns), lambda step: (0, step), transforms=transforms),
            ],
            max_concurrent_steps=_STAGES,
            num_compute_wgs=_WARPGROUPS,
            wg_axis="warpgroup",
            memory_registers=40,
            compute_context=write,
        )
        own_columns = pl.ds(first_step * columns, most_steps * columns)
        pipeline(words_ref.at[pl.ds(first_row, _TILE), own_columns], planes_ref.at[:, own_columns])

    zero = () if weight.zero is None else (weight.zero,)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, outputs, rows), jnp.float32),
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        num_threads=_WARPGROUPS + 1,  # one warpgroup copies
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpreter() if interpret else None,
    )(planes, words, weight.scale, *zero)


_OF_ROWS = plgpu.Layout.WGMMA.reduce(1)


def _dot(a: Array, b: Array) -> Array:
    """Multiplies a [m, k] by b [n, k] where the kernel is interpreted: float32 [m, n]. A CPU's product has
    other bits for other numbers of rows, so it always has as many.
    """
    rows = jnp.pad(b, ((0, ROWS - len(b)), (0, 0)))
    y = lax.dot_general(a, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y[:, : len(b)]


def _integers(packed: Array, byte: int, half: int, zero: Array | None, bits: int, interpret: bool) -> Array:
    """Returns value - zero of one byte (in 4 bits, of one half) of every word, bfloat16 [64, columns]."""
    if bits == 4:
        values = _with_exponent(packed, 8 * byte + 4 * half, 15, interpret)
        offset = jnp.full((_ROWS,), 0, jnp.uint16) if zero is None else zero.astype(jnp.uint16)
        offset = lax.bitcast_convert_type(offset | jnp.uint16(_EXPONENT), jnp.bfloat16)  # 128 + zero
        return values - lax.broadcast_in_dim(offset, values.shape, (0,))
    # The sign bit stands for -128, and is the lowest bit of the exponent: 128 or 256.
    values = _with_exponent(packed, 8 * byte, 127, interpret) - _with_exponent(
        packed, 8 * byte, 128, interpret
    )
    if zero is None:
        return values
    return values - lax.broadcast_in_dim(zero.astype(jnp.bfloat16), values.shape, (0,))


def _with_exponent(words: Array, shift: int, mask: int, interpret: bool) -> Array:
    """Returns uint16 bits [64, columns] after `shift` and `mask`, with the exponent of bfloat16 128."""
    if interpret:
        bits = ((words >> jnp.uint16(shift)) & jnp.uint16(mask)) | jnp.uint16(_EXPONENT)
        return lax.bitcast_convert_type(bits, jnp.bfloat16)

    # Two words per register together: the compiler would shift 16-bit words one at a time.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(words.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def extract(_: Any, words: Any) -> Any:
        int32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty_like(words.registers)
        for index, register in np.ndenumerate(words.registers):
            both = mosaic.utils.bitcast(register, int32)
            if shift:
                both = arith.shrui(both, arith.constant(int32, ir.IntegerAttr.get(int32, shift)))
            both = llvm.inline_asm(
                int32,
                [both],
                f"lop3.b32 $0, $1, {mask * 0x10001:#x}, {_EXPONENT * 0x10001:#x}, 0xea;",  # (a & b) | c
                "=r,r",
            )
            registers[index] = mosaic.utils.bitcast(both, pair)
        return mosaic.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return extract(words)
