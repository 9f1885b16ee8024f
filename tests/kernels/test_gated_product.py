"""The first half of a gated MLP in one kernel: against float64, and what must not matter to a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels.gated_product import gated_product, mosaic_gpu
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.products import ProductForm

SLOW_INTERPRETER = jax.__version_info__ < (0, 11)
SLOW = pytest.mark.skipif(SLOW_INTERPRETER, reason="JAX 0.10 takes too long to interpret it")
NATIVE = pytest.param("mosaic_gpu", marks=pytest.mark.accelerator)
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}
SLABS = ProductForm(64, 64, slabs=True)


def normal(seed, *shape, scale=1.0, dtype=jnp.bfloat16):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def operands(rows, inputs, outputs):
    weights = (normal(seed, outputs, inputs, scale=inputs**-0.5) for seed in (1, 2))
    return normal(0, rows, 1, inputs), *weights


@functools.partial(jax.jit, static_argnames=("activation", "with_products", "implementation"))
def computed(x, gate, up, activation, with_products, implementation):
    return gated_product(x, gate, up, ACTIVATIONS[activation], with_products, implementation)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "columns", "activation"),
    [
        (3, 128, 16, 8, "silu"),  # a step more than the first, two blocks
        pytest.param(130, 64, 32, 16, "gelu", marks=SLOW),  # two warpgroups, of which one has two rows
        pytest.param(64, 576, 24, 24, "silu", marks=SLOW),  # more steps than are on their way at once
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "interpret_gpu", NATIVE])
def test_against_float64(rows, inputs, outputs, columns, activation, implementation, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_columns", lambda outputs: columns)
    x, *weights = operands(rows, inputs, outputs)
    y, *products = computed(x, *weights, activation, True, implementation)
    wide = [np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T for weight in weights]
    for ours, expected in zip(products, wide, strict=True):
        assert ours.shape == (rows, 1, outputs) and ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=2**-8, atol=1e-5)
    gate, up = (product.astype(jnp.float32) for product in products)
    expected = ACTIVATIONS[activation](gate) * up
    rounded = 2**-5 if implementation == "xla" else 1e-5  # which may compute the activation in bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2**-7, atol=rounded)


@pytest.mark.parametrize("implementation", ["interpret_gpu", NATIVE])
def test_a_row_is_computed_as_if_alone(implementation):
    """Without the products: a row of the first warpgroup of a block, and rows of the second and of another
    block, which are in a first one then.
    """
    x, *weights = operands(130, 64, 8)
    together = np.asarray(computed(x, *weights, "silu", True, implementation)[0])
    for rows in [slice(5, 6), slice(70, 130)]:
        (part,) = computed(x[rows], *weights, "silu", False, implementation)
        np.testing.assert_array_equal(part, together[rows])


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((2, 64, 16), jnp.float32, "activations are float32, it multiplies bfloat16"),
        ((2, 96, 16), jnp.bfloat16, "96 inputs, it needs a multiple of 64"),
        ((2, 64, 12), jnp.bfloat16, "12 outputs, it needs a multiple of 8"),
    ],
)
def test_what_the_kernel_refuses(shape, dtype, why):
    operand = [each.astype(dtype) for each in operands(*shape)]
    with pytest.raises(Refused, match=why):
        computed(*operand, "silu", False, "interpret_gpu")
    assert computed(*operand, "silu", False, ("interpret_gpu", "xla"))[0].shape == (2, 1, shape[2])


@pytest.mark.parametrize("outputs", [1536, 6144, 12_288, 14_336, 18_944, 4864, 8, 8 * 131])
def test_tiles_are_of_the_matrix(outputs):
    columns = mosaic_gpu._columns(outputs)
    assert outputs % columns == 0 and columns % 8 == 0 and columns <= 128
