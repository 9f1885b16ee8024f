"""The products of a policy: the bits of `rounded_dot`, and its gradients in bfloat16."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from rljax import target
from rljax.kernels.linear import by_slabs, linear
from rljax.numerics import products
from rljax.numerics.adapted import AdaptedWeight
from rljax.numerics.rows import Numerics, rms_norm
from tests.kernels.compilation import HOPPER, compile_for

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def factors(rows: int, inputs: int = 48, outputs: int = 80):
    source = np.random.default_rng(rows)
    x = jnp.asarray(source.standard_normal((rows, inputs)), jnp.bfloat16)
    weight = jnp.asarray(source.standard_normal((outputs, inputs)), jnp.float32)
    cotangent = jnp.asarray(source.standard_normal((rows, outputs)), jnp.bfloat16)
    return x, weight, cotangent.astype(jnp.float32)


@pytest.mark.default_cases("2", "7")
@pytest.mark.parametrize("rows", [2, 7, 64])
def test_rounded_dot_has_the_bits_of_dot(rows):
    x, weight, _ = factors(rows)
    for form in products.forms("bfloat16"):
        plain = products.padded_dot(x, weight.astype(jnp.bfloat16), form)
        np.testing.assert_array_equal(products.padded_dot(x, weight, form, rounded=True), plain)


@pytest.mark.default_cases("1", "129")
@pytest.mark.parametrize("rows", [1, 64, 129])
def test_gradients_of_rounded_dot_are_exact_products_rounded_once(rows):
    """An odd number of rows is among them: it is contracted as an even one with a row of zeros."""
    x, weight, cotangent = factors(rows)
    _, backward = jax.vjp(products.rounded_dot, x, weight)
    d_x, d_weight = backward(cotangent)
    assert d_x.dtype == jnp.bfloat16 and d_weight.dtype == jnp.float32
    exact = np.asarray(cotangent, np.float64)
    x, weight = np.asarray(x, np.float64), np.asarray(weight.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(np.asarray(d_x, np.float64), exact @ weight, rtol=2**-8, atol=1e-2)
    np.testing.assert_allclose(np.asarray(d_weight, np.float64), exact.T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 3), ("float32", 130)])
def test_products_in_slabs_have_the_gradients_of_whole_ones(rows, dtype):
    x, weight, cotangent = factors(rows)
    x, form = x.astype(dtype), products.ProductForm(64, 64, slabs=True)

    def gradients(multiply):
        return jax.vjp(lambda x, weight: multiply(x, weight, rounded=True), x, weight)[1](cotangent)

    def whole(x, weight, rounded):
        """Rows of zeros add nothing to a sum over rows, but may change its order."""
        zeros = ((0, form.padded(rows) - rows), (0, 0))
        return products.chosen_dot(jnp.pad(x, zeros), weight, rounded)[:rows]

    found = gradients(functools.partial(products.padded_dot, form=form))
    for ours, theirs in zip(found, gradients(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [3, pytest.param(130, marks=pytest.mark.long)])
def test_computations_in_slabs_have_the_gradients_of_whole_ones(rows, dtype):
    """With biases and adapters, up to the rounding of what is computed entry by entry."""
    x, weight, _ = factors(rows)
    x, weight = x[:, None].astype(dtype), weight.astype(dtype)
    draw = np.random.default_rng(0).standard_normal
    a, b, bias = (jnp.asarray(draw(shape), jnp.float32) for shape in ((2, 48), (30, 2), (30,)))

    def block(own, x, weights):
        h = rms_norm(x, weights["norm"], 1e-5, own.numerics)
        part = own.linear(h, weights["adapted"], bias=weights["bias"])
        h = jnp.concatenate([jax.nn.silu(part), own.linear(h, weights["up"])], axis=-1)
        return x + own.linear(h, weights["down"])

    @functools.partial(jax.jit, static_argnames="slabs")
    def run(x, a, b, bias, slabs):
        form = products.ProductForm(64, 64, slabs=slabs)
        weights = {"adapted": AdaptedWeight(weight[:30], a, b, 0.5), "up": weight[30:], "bias": bias}
        weights |= {"norm": jnp.ones(48), "down": weight.T}
        numerics = Numerics(True, dtype, measured_form=form)
        return by_slabs(block, x, weights, numerics)

    arguments = x, a, b, bias
    (ours, backward), (theirs, expected) = (
        jax.vjp(functools.partial(run, slabs=slabs), *arguments) for slabs in (True, False)
    )
    tolerance = 1e-5 if dtype == "float32" else 2**-6
    for one, two in zip((ours, *backward(ours)), (theirs, *expected(ours)), strict=True):
        one, two = (np.asarray(leaf, np.float64) for leaf in (one, two))
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance * np.abs(two).max())


def test_every_slab_is_the_same_product_to_the_compiler():
    """For any number of rows, and for products that share a factor: none is merged or fused."""
    multiply = functools.partial(products.padded_dot, form=products.ProductForm(64, 64, slabs=True))

    def both(x, a, b):
        return multiply(2 * x, a), jnp.exp(multiply(2 * x, b))

    texts = {}
    for rows in (2, 64, 192):
        x, weight, _ = factors(rows)
        weight = weight.astype(x.dtype)
        text = jax.jit(both).lower(x, weight, weight + 1).as_text()
        texts[rows] = re.findall(r"stablehlo\.dot_general.* : (.*)", text)
        assert text.count("optimization_barrier") == 4
    assert texts[2] == texts[64] == texts[192]
    assert texts[2] == ["(tensor<64x48xbf16>, tensor<80x48xbf16>) -> tensor<64x80xf32>"] * 2


@pytest.mark.long
def test_hopper_has_one_kernel_for_all_slabs():
    """It would merge products that share a factor, and fuse what is done with rows before."""
    multiply = functools.partial(products.padded_dot, form=products.ProductForm(64, 64, slabs=True))

    def both(x, a, b):
        return multiply(2 * x, a) * multiply(2 * x, b)

    weight, found = jax.ShapeDtypeStruct((1536, 1536), jnp.bfloat16), []
    for rows in (8, 64, 192):
        x = jax.ShapeDtypeStruct((rows, 1536), jnp.bfloat16)
        text = compile_for(HOPPER, both, x, weight, weight).as_text()
        found.append(re.findall(r" = (\S+) dot\(%parameter_0\S*, %parameter_1\S*\), (.*?), metadata", text))
    assert len(found[0]) == 2 and found[0] == found[1] == found[2]


@pytest.mark.long
def test_hopper_has_one_kernel_for_a_norm_in_slabs():
    """In plain form, a norm of many rows has other numbers of warps than one of few."""
    numerics = Numerics(True, "bfloat16", measured_form=products.ProductForm(64, 64, slabs=True))

    def block(own, x, weights):
        return x + own.linear(rms_norm(x, weights["norm"], 1e-5, own.numerics), weights["square"])

    weights, found = (
        {
            "norm": jax.ShapeDtypeStruct((576,), jnp.float32),
            "square": jax.ShapeDtypeStruct((576, 576), jnp.bfloat16),
        },
        [],
    )
    for rows in (1, 64, 128, 4096):
        x = jax.ShapeDtypeStruct((rows, 1, 576), jnp.bfloat16)
        with target.tracing_for(jax.devices()[0], 1, "gpu"):
            text = compile_for(HOPPER, lambda x, own: by_slabs(block, x, own, numerics), x, weights).as_text()
        found.append(re.findall(r'"num_warps":"\d+","output_tiles":\[.*?\]\}\]', text))
    assert len(found[0]) == 2 and all(each == found[0] for each in found)


@pytest.mark.parametrize(("platform", "exact"), [("cpu", None), ("gpu", HIGHEST), ("tpu", HIGHEST)])
def test_accelerators_round_no_factor_of_a_float32_policy(platform, exact):
    """By default a GPU would compute in TF32. A CPU's programs name no precision."""

    def precisions(dtype):
        x, weight, _ = factors(8)

        def loss(x, weight):
            return jnp.sum(linear(x, weight, Numerics(compute_dtype=dtype)).astype(jnp.float32))

        with target.tracing_for(jax.devices()[0], 1, platform):
            jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x.astype(dtype), weight)
        return {equation.params["precision"] for equation in products_in(jaxpr.jaxpr)}

    assert precisions("float32") == {exact}
    assert precisions("bfloat16") == {None}


def products_in(jaxpr) -> list:
    """The equations of all products, in calls too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation)
        for inner in jaxprs_in_params(equation.params):
            found += products_in(inner)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_learns_in_the_type_that_it_computes_in(dtype):
    """Without `rounded_dot` both products of the backward pass have a float32 factor."""
    x, weight, _ = factors(8)
    numerics = Numerics(compute_dtype=dtype)

    def loss(x, weight):
        return jnp.sum(linear(x, weight, numerics).astype(jnp.float32) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x.astype(dtype), weight)
    types = [[str(factor.aval.dtype) for factor in each.invars] for each in products_in(jaxpr.jaxpr)]
    assert types == [[dtype, dtype]] * 3
