"""The first half of a gated MLP in one kernel: against float64, what must not matter to a row, gradients."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.quantized import WeightFormat, rtn
from rljax.kernels.gated_product import gated_product, mosaic_gpu
from rljax.kernels.linear import by_slabs
from rljax.numerics.adapted import AdaptedWeight
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import Numerics
from tests.kernels.compilation import HOPPER, absent_mesh, compile_for

SLOW = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 takes too long to interpret it")
NATIVE = pytest.param("mosaic_gpu", marks=pytest.mark.accelerator)
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}
SLABS = ProductForm(64, 64, slabs=True)


def normal(seed, *shape, scale=1.0, dtype=jnp.bfloat16):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def operands(rows, inputs, outputs):
    weights = (normal(seed, outputs, inputs, scale=inputs**-0.5) for seed in (1, 2))
    return normal(0, rows, inputs), *weights


@functools.partial(jax.jit, static_argnames=("activation", "with_factors", "implementation"))
def computed(x, gate, up, activation, with_factors, implementation):
    return gated_product(x, gate, up, ACTIVATIONS[activation], with_factors, implementation)


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
    y, *factors = computed(x, *weights, activation, True, implementation)
    wide = [np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T for weight in weights]
    for ours, expected in zip(factors, wide, strict=True):
        assert ours.shape == (rows, outputs) and ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=2**-8, atol=1e-5)
    gate, up = (factor.astype(jnp.float32) for factor in factors)
    expected = ACTIVATIONS[activation](gate) * up
    rounded = 2**-5 if implementation == "xla" else 1e-5  # which may compute the activation in bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2**-7, atol=rounded)


@pytest.mark.parametrize("implementation", ["interpret_gpu", NATIVE])
def test_a_row_is_computed_as_if_alone(implementation):
    """In the first and the second warpgroup of a block, in another block, and without the factors."""
    x, *weights = operands(130, 64, 8)
    together = np.asarray(computed(x, *weights, "silu", True, implementation)[0])
    for rows in [slice(5, 6), slice(70, 73), slice(128, 130)]:
        (part,) = computed(x[rows], *weights, "silu", False, implementation)
        np.testing.assert_array_equal(part, together[rows])


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((2, 64, 16), jnp.float32, "activations are float32, it multiplies bfloat16"),
        ((2, 96, 16), jnp.bfloat16, "96 inputs and 16 outputs, it needs multiples of 64 and 8"),
        ((2, 64, 12), jnp.bfloat16, "64 inputs and 12 outputs, it needs multiples of 64 and 8"),
    ],
)
def test_what_the_kernel_refuses(shape, dtype, why):
    operand = [each.astype(dtype) for each in operands(*shape)]
    with pytest.raises(Refused, match=why):
        computed(*operand, "silu", False, "interpret_gpu")
    assert computed(*operand, "silu", False, ("interpret_gpu", "xla"))[0].shape == (2, shape[2])


@pytest.mark.parametrize("outputs", [1536, 6144, 12_288, 14_336, 18_944, 4864, 8, 8 * 131])
def test_tiles_are_of_the_matrix(outputs):
    columns = mosaic_gpu._columns(outputs)
    assert outputs % columns == 0 and columns % 8 == 0 and columns <= 128


# -- in slabs ----------------------------------------------------------------------------------------------


def mlp(products, x, layer):
    return x + products.linear(products.gated(x, layer["gate"], layer["up"], jax.nn.silu), layer["down"])


@functools.partial(jax.jit, static_argnames="form")
def run(x, gate, up, a, b, down, form):
    numerics = Numerics(True, "bfloat16", KernelChoice(gated_product="interpret_gpu"), form)
    return by_slabs(mlp, x, {"gate": AdaptedWeight(gate, a, b, 0.5), "up": up, "down": down}, numerics)


def test_gradients_are_those_of_the_products():
    """Of x, a float32 matrix, and the factors of an adapter; the values beside them have the bits of those
    without.
    """
    x, gate, _ = operands(70, 64, 8)
    more = normal(3, 8, 64, dtype=jnp.float32), normal(4, 2, 64, dtype=jnp.float32)
    arguments = x[:, None], gate, *more, normal(5, 8, 2, dtype=jnp.float32), normal(6, 64, 8)
    (ours, backward), (theirs, expected) = (
        jax.vjp(functools.partial(run, form=form), *arguments) for form in (SLABS, ProductForm(64, 64))
    )
    np.testing.assert_array_equal(run(*arguments, SLABS), ours)
    np.testing.assert_array_equal(run(x[:3, None], *arguments[1:], SLABS), ours[:3])
    pairs = zip((ours, *backward(ours)), (theirs, *expected(ours)), strict=True)
    for one, two in ((np.asarray(each, np.float64) for each in pair) for pair in pairs):
        np.testing.assert_allclose(one, two, rtol=2**-5, atol=2**-6 * np.abs(two).max())


@pytest.mark.parametrize("form", [ProductForm(4, 4), SLABS])
def test_outside_of_slabs_and_with_other_weights_products_stay_apart(form, monkeypatch):
    """There a library has a kernel for every number of rows; here an operation of its own."""
    monkeypatch.setattr(mosaic_gpu, "gated_product", None)
    x, gate, up = operands(4, 64, 8)
    if form.slabs:
        gate = rtn(gate.astype(jnp.float32), WeightFormat(8, 0))
    layer = {"gate": gate, "up": up, "down": normal(6, 64, 8)}
    numerics = Numerics(True, "bfloat16", KernelChoice(gated_product="interpret_gpu"), form)
    assert by_slabs(mlp, x[:, None], layer, numerics).shape == (4, 1, 64)


# -- whole compilations ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (2048, 6144), (4096, 12_288), (3584, 18_944)])
def test_hopper_has_one_kernel_that_reads_the_weights(inputs, outputs):
    """Of a decode step and of a slab with gradients, for SmolLM2, Qwen3-1.7B and 8B and Qwen2.5-7B."""
    shape = jax.ShapeDtypeStruct
    layer = {name: shape((outputs, inputs), jnp.bfloat16) for name in ("gate", "up")}
    layer["down"] = shape((inputs, outputs), jnp.bfloat16)
    for rows in (64, 256):
        form = dataclasses.replace(SLABS, smallest=rows, multiple=rows)
        numerics = Numerics(True, "bfloat16", measured_form=form)
        run = functools.partial(by_slabs, mlp, numerics=numerics)
        program = run if rows == 64 else lambda x, layer, run=run: jax.vjp(run, x, layer)[0]
        with absent_mesh(HOPPER):
            text = compile_for(HOPPER, program, shape((rows, 1, inputs), jnp.bfloat16), layer).as_text()
        [results] = re.findall(r"= ([^=\n]*) custom-call\(", text)
        assert results.count("bf16") == (1 if rows == 64 else 3)
        # Nothing else touches the two matrices.
        touching = [line for line in text.splitlines() if f"bf16[{outputs},{inputs}]" in line]
        allowed = ("parameter(", "custom-call", "barrier", "get-tuple-element", "ENTRY", "HloModule")
        assert not [line for line in touching if not any(word in line for word in allowed)]
