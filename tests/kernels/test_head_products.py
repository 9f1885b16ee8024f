"""Queries, keys and values in one kernel: against plain JAX, and what must not matter to a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels.head_products import HeadWeights, head_products
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from tests.kernels.test_gated_product import NATIVE, SLOW, SLOW_INTERPRETER, normal

CASES = {  # query heads, key heads, their width, inputs
    "norms": (1, 1, 64, 64),
    "biases, wide": (2, 1, 128, 128),
    "neither": (3, 1, 64, 64),
}


def operands(case, rows):
    heads, kv_heads, dim, inputs = CASES[case]
    sizes = [count * dim for count in (heads, kv_heads, kv_heads)]
    matrices = tuple(normal(i, size, inputs, scale=inputs**-0.5) for i, size in enumerate(sizes))
    vectors = functools.partial(normal, dtype=jnp.float32)
    biases = tuple(vectors(3 + i, size) for i, size in enumerate(sizes)) if "biases" in case else ()
    scales = tuple(vectors(6 + i, dim) for i in range(2)) if case == "norms" else ()
    return normal(8, rows, 1, inputs), vectors(9, rows, 1, 3, dim // 2), matrices, biases, scales


@functools.partial(jax.jit, static_argnames=("with_products", "implementation"))
def computed(x, angles, matrices, biases, scales, with_products, implementation):
    weights = HeadWeights(matrices, biases, scales, 1e-5)
    numerics = Numerics(True, str(x.dtype), KernelChoice(head_products=implementation))
    return head_products(x, angles, weights, with_products, numerics)


@pytest.mark.parametrize("case", ["norms", *(pytest.param(case, marks=SLOW) for case in list(CASES)[1:])])
@pytest.mark.parametrize("implementation", ["interpret_gpu", NATIVE])
def test_against_plain_jax(case, implementation):
    arguments = operands(case, 5)
    heads, kv_heads, dim, _ = CASES[case]
    y, *found = computed(*arguments, True, implementation)
    assert y.shape == (5, 1, heads + 2 * kv_heads, dim) and y.dtype == jnp.bfloat16
    wide = [each.astype(jnp.float32) for each in arguments[2]]
    expected, *products = computed(
        arguments[0].astype(jnp.float32), arguments[1], wide, *arguments[3:], True, "xla"
    )
    for ours, theirs in zip(found, products, strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("implementation", ["interpret_gpu", NATIVE])
def test_a_row_is_computed_as_if_alone(implementation):
    """Without the products; where there is time in both warpgroups of a block, on a device in another."""
    slow = implementation == "interpret_gpu" and SLOW_INTERPRETER  # the rows of the test above
    count = 5 if slow else 66 if implementation == "interpret_gpu" else 300
    x, angles, *weights = operands("norms", count)
    together = np.asarray(computed(x, angles, *weights, True, implementation)[0])
    for rows in [slice(2, 3)] if slow else [slice(5, 6), slice(count - 2, count)]:
        (part,) = computed(x[rows], angles[rows], *weights, False, implementation)
        np.testing.assert_array_equal(part, together[rows])


def test_what_the_kernel_refuses():
    x, angles, *weights = operands("norms", 2)
    for arguments, why in (
        ((x.astype(jnp.float32), angles), "activations are float32, it multiplies bfloat16"),
        ((x, angles[..., :16]), "heads are 64 or 128 wide, not 32"),
    ):
        with pytest.raises(Refused, match=why):
            computed(*arguments, *weights, False, "interpret_gpu")
