"""Weights in blocks: what a product with them is, and for which numbers of rows it is computed so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from rljax.kernels.linear import product
from rljax.numerics import blocked_weights
from rljax.numerics.blocked_weights import LANES, blocked, whole
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import Numerics


def matrix(outputs: int, inputs: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((outputs, inputs)), jnp.float32)


@pytest.mark.parametrize("blocks", [1, 2, 12, 13, 48])
def test_blocks_are_all_outputs_in_order(blocks):
    weight = matrix(blocks * LANES, 24)
    converted = blocked(weight, 8)
    assert len(converted.blocks) == min(blocks, blocked_weights._PARTS) and whole(converted) is weight
    assert converted.shape == weight.shape
    sizes = [len(part) for part in converted.blocks]
    assert sum(sizes) == blocks and max(sizes) - min(sizes) <= 1
    together = np.concatenate(converted.blocks)  # [blocks, in, LANES]
    np.testing.assert_array_equal(together.swapaxes(1, 2).reshape(weight.shape), weight)


def products_with_a_batch(jaxpr) -> int:
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            count += bool(equation.params["dimension_numbers"][1][0])
        count += sum(products_with_a_batch(inner) for inner in jaxprs_in_params(equation.params))
    return count


@pytest.mark.parametrize(
    ("rows", "multiple", "row_invariant", "in_blocks"),
    [
        (1, 1, True, True),  # padded to two
        (1, 1, False, False),  # a vector
        (8, 1, True, True),
        (8, 1, False, True),
        (9, 1, True, False),
        (5, 16, True, False),  # padded to 16
    ],
)
def test_few_rows_are_multiplied_in_blocks(rows, multiple, row_invariant, in_blocks):
    weight, x = matrix(192, 40), matrix(rows, 40)
    form = ProductForm(max(2, multiple), multiple)
    numerics = Numerics(row_invariant, measured_form=form)

    def multiply(x, weight):
        return product(x, weight, numerics)

    converted = blocked(weight, 8)
    jaxpr = jax.make_jaxpr(multiply)(x, converted).jaxpr
    assert products_with_a_batch(jaxpr) == (len(converted.blocks) if in_blocks else 0)
    np.testing.assert_allclose(multiply(x, converted), multiply(x, weight), rtol=1e-5, atol=1e-4)
