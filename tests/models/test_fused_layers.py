"""A decoder layer in slabs, whose products of heads and gated product are operations of their own."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.quantized import WeightFormat, rtn
from rljax.kernels.gated_product import mosaic_gpu as gated_product
from rljax.kernels.head_products import mosaic_gpu as head_products
from rljax.models.config import GemmaParts, ModelConfig
from rljax.models.transformer import decoder_layer, param_shapes
from rljax.numerics.adapted import AdaptedWeight
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import Numerics
from tests.engines import lively_params
from tests.kernels.compilation import HOPPER, absent_mesh, compile_for
from tests.kernels.test_gated_product import SLOW_INTERPRETER

SLABS = ProductForm(64, 64, slabs=True)
CONFIG = ModelConfig("qwen3", 96, 64, 1, 1, 1, 64, 8, qk_norm=True)
WITH_BIASES = ModelConfig("qwen2", 96, 64, 1, 2, 1, 64, 24, attention_bias=True)
PARTS = GemmaParts((False,), 10_000.0, 128, 1024)
GEMMA = ModelConfig("gemma3_text", 96, 64, 1, 2, 1, 64, 24, qk_norm=True, gemma=PARTS)


def values_alone(cache, q, k, v):
    """Attention of tokens that see only themselves."""
    return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2) + q, None


def layer_of(x, angles, layer, config, numerics):
    return decoder_layer(layer, None, x, angles, values_alone, config, numerics)[0]


def rows_of(count, config=CONFIG):
    draw = np.random.default_rng(0).standard_normal
    return (
        jnp.asarray(draw((count, 1, config.hidden_size)), jnp.bfloat16),
        jnp.asarray(draw((count, 1, 2, config.head_dim // 2)), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("form", "kernel", "config"))
def run(x, angles, layer, form, kernel="interpret_gpu", config=CONFIG):
    kernels = KernelChoice(gated_product=kernel, head_products=kernel)
    return layer_of(x, angles, layer, config, Numerics(True, "bfloat16", kernels, form))


@pytest.mark.parametrize(
    ("kernel", "config"),
    [("interpret_gpu", CONFIG), *(("xla", config) for config in (CONFIG, WITH_BIASES, GEMMA))],
    ids=["interpret_gpu", "norms", "biases", "gemma"],
)
def test_gradients_are_those_of_the_products(kernel, config):
    """Of x, float32 matrices, norms, biases, and the factors of adapters; the values beside them have the
    bits of fewer rows without.
    """
    layer = lively_params(config)["layers"][0]
    draw = np.random.default_rng(1).standard_normal
    for name in ("k", "gate"):
        outputs = layer[name].shape[0]
        a, b = (jnp.asarray(draw(shape), jnp.float32) for shape in ((2, 64), (outputs, 2)))
        layer[name] = AdaptedWeight(layer[name].astype(jnp.bfloat16), a, b, 0.5)
    own = functools.partial(run, kernel=kernel, config=config)
    x, angles = rows_of(4 if kernel == "interpret_gpu" and SLOW_INTERPRETER else 70)  # in one slab or two
    (ours, backward), (theirs, expected) = (
        jax.vjp(functools.partial(own, form=form), x, angles, layer) for form in (SLABS, ProductForm(64, 64))
    )
    np.testing.assert_array_equal(own(x[-3:], angles[-3:], layer, SLABS), ours[-3:])
    found, wanted = (jax.tree.leaves(each) for each in ((ours, backward(ours)), (theirs, expected(ours))))
    for one, two in zip(found, wanted, strict=True):
        one, two = (np.asarray(each, np.float64) for each in (one, two))
        np.testing.assert_allclose(one, two, rtol=2**-5, atol=2**-5 * np.abs(two).max())


@pytest.mark.parametrize("form", [ProductForm(4, 4), SLABS])
def test_outside_of_slabs_and_with_other_weights_products_stay_apart(form, monkeypatch):
    """There a library has a kernel for every number of rows; here an operation of its own."""
    monkeypatch.setattr(gated_product, "gated_product", None)
    monkeypatch.setattr(head_products, "head_products", None)
    layer = lively_params(CONFIG)["layers"][0]
    if form.slabs:
        layer |= {name: rtn(layer[name], WeightFormat(8, 0)) for name in ("v", "gate")}
    assert run(*rows_of(4), layer, form).shape == (4, 1, 64)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        ModelConfig("llama", 49_152, 576, 1, 9, 3, 64, 1536),
        ModelConfig("qwen3", 151_936, 4096, 1, 32, 8, 128, 12_288, qk_norm=True),
        ModelConfig("qwen2", 152_064, 3584, 1, 28, 4, 128, 18_944, attention_bias=True),
    ],
    ids=["SmolLM2", "Qwen3-8B", "Qwen2.5-7B"],
)
def test_hopper_reads_the_weights_in_a_kernel_each(config):
    """Of SmolLM2, Qwen3-8B and Qwen2.5-7B: in a decode step, and in a slab with gradients, which keeps the
    products. Nothing else touches the matrices.
    """
    layer = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if len(shape) > 1 else jnp.float32),
        param_shapes(config)["layers"][0],
        is_leaf=lambda node: isinstance(node, tuple),
    )
    for rows in (64, 256):
        form = dataclasses.replace(SLABS, smallest=rows, multiple=rows, plain_sums=True)
        step = functools.partial(
            layer_of, config=config, numerics=Numerics(True, "bfloat16", measured_form=form)
        )
        program = step if rows == 64 else lambda *arguments, step=step: jax.vjp(step, *arguments)[0]
        with absent_mesh(HOPPER):
            shapes = jax.eval_shape(lambda rows=rows: rows_of(rows, config))
            text = compile_for(HOPPER, program, *shapes, layer).as_text()
        results = re.findall(r"= ([^=\n]*) custom-call\(", text)
        assert [each.count("bf16") for each in results] == ([1, 1] if rows == 64 else [2, 3])
        for outputs in {layer[name].shape[0] for name in ("q", "k", "gate")}:
            touching = [line for line in text.splitlines() if f"bf16[{outputs},{config.hidden_size}]" in line]
            allowed = ("parameter(", "custom-call", "barrier", "get-tuple-element", "ENTRY", "HloModule")
            if outputs != config.hidden_size:  # the shape of o
                assert not [line for line in touching if not any(word in line for word in allowed)]
