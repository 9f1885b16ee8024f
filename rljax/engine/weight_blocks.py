"""Which of a policy's weights a decoder multiplies in blocks, measured where the program runs.

Blocks (`rljax/numerics/blocked_weights.py`) cost a second copy of the weights. They are used for those
shapes, and up to that number of rows, for which they are faster and have the bits of the whole weights.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax import target
from rljax.engine.executables import row_invariant_compiler_options
from rljax.kernels.linear import product
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, lm_head
from rljax.numerics.blocked_weights import LANES, BlockedWeight, blocked
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import Numerics
from rljax.timing import paired

WIDEST_HEAD = 16_384
"""Outputs of an LM head that are measured; more belong to the same kernel."""
_LEAST = 2**18
"""Entries of a matrix below which packing takes no time."""
_MOST_ROWS = 32
"""More rows are as fast with whole weights (`bench_engine.py --only blocks`)."""
_MANY_ROWS = 512
_COPIES = 4
"""Matrices that are multiplied one after the other, so that they do not stay in the cache."""
_ROUNDS = 5
_GAIN = 1.15
"""How many times faster blocks must be, to be used."""


def measured_blocks(
    shapes: Sequence[tuple[int, int]], numerics: Numerics, form: ProductForm, row_counts: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """Returns `ProductForm.blocks` for weights of these shapes; none on an accelerator, and none in bfloat16,
    which the library packs in pairs of inputs in any case.

    Args:
      shapes: (inputs, outputs) of the weights.
      numerics: compute dtype, and whether the bits must be those of the whole weights.
      row_counts: numbers of rows that the decoder's programs multiply.
    """
    if target.platform() != "cpu" or numerics.compute_dtype != "float32":
        return ()
    numerics = dataclasses.replace(numerics, measured_form=form)
    counts = sorted({form.padded(count) for count in row_counts if count <= _MOST_ROWS} - {1})
    found = []
    for inputs, outputs in shapes:
        if _can_be_blocked(outputs, inputs):
            rows = _most_rows_in_blocks(inputs, outputs, numerics, counts)
            found += [(inputs, outputs, rows)] if rows else []
    return tuple(found)


def _most_rows_in_blocks(inputs: int, outputs: int, numerics: Numerics, counts: Sequence[int]) -> int:
    """Returns the largest number of rows, 0 if none, up to which blocks are faster and have the same bits."""
    draw = np.random.default_rng(0).standard_normal
    weights = [jnp.asarray(draw((outputs, inputs), np.float32), numerics.dtype) for _ in range(_COPIES)]
    rows = jnp.asarray(draw((_MANY_ROWS, inputs), np.float32), numerics.dtype)
    in_blocks = [blocked(weight, _MOST_ROWS) for weight in weights]
    expected = _compiled(numerics, rows, weights[:1])()[0]
    most, slower = 0, 0
    for count in counts:
        whole, parts = (_compiled(numerics, rows[:count], each) for each in (weights, in_blocks))
        if numerics.row_invariant and not np.array_equal(parts()[0], expected[:count]):
            break
        if paired(parts, whole, _ROUNDS).ratio > _GAIN:
            most, slower = count, 0
        elif slower:  # twice, so it is not noise
            break
        else:
            slower = 1
    return most


def _compiled(
    numerics: Numerics, rows: Array, weights: Sequence[Array | BlockedWeight]
) -> Callable[[], list[Array]]:
    """Returns a function that multiplies rows with one weight after another, compiled as in the engine."""

    def multiply(rows: Array, weights: Sequence[Array | BlockedWeight]) -> list[Array]:
        results: list[Array] = []
        for weight in weights:
            results.append(product(rows, weight, numerics))
            rows, results[-1] = lax.optimization_barrier((rows, results[-1]))
        return results

    options = row_invariant_compiler_options() if numerics.row_invariant else {}
    program = jax.jit(multiply).lower(rows, weights).compile(compiler_options=options)
    return lambda: jax.block_until_ready(program(rows, weights))


def with_blocks(params: Params, config: ModelConfig, form: ProductForm) -> Params:
    """Returns a decoder's weights with the blocks that the form names."""
    rows_of = {(inputs, outputs): rows for inputs, outputs, rows in form.blocks}
    if not rows_of:
        return params

    def convert(weight: Array, widest: int | None = None) -> Array | BlockedWeight:
        if weight.ndim != 2:
            return weight
        outputs, inputs = weight.shape
        rows = rows_of.get((inputs, outputs if widest is None else min(outputs, widest)), 0)
        return blocked(weight, rows) if rows and outputs % LANES == 0 else weight

    layers = [{name: convert(weight) for name, weight in layer.items()} for layer in params["layers"]]
    head = convert(lm_head(params, config), WIDEST_HEAD)
    more = {"blocked_head": head} if isinstance(head, BlockedWeight) else {}
    return {**params, "layers": layers, **more}


def most_block_bytes(params: Params, config: ModelConfig) -> int:
    """Returns the bytes of the blocks of a decoder's weights, or of their shapes, if all that can be are in
    blocks. The measurement may leave some out.
    """
    matrices = [weight for layer in params["layers"] for weight in layer.values() if weight.ndim == 2]
    matrices.append(lm_head(params, config))
    return sum(weight.size * weight.dtype.itemsize for weight in matrices if _can_be_blocked(*weight.shape))


def _can_be_blocked(outputs: int, inputs: int) -> bool:
    return outputs % LANES == 0 and inputs * outputs >= _LEAST
