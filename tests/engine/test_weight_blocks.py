"""A decoder's weights in blocks: the same tokens, measured before use, and seen by everything else."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.quantized import QuantizedPolicy, default_format
from rljax.assembly import decoding
from rljax.config import load_config
from rljax.engine import weight_blocks
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import row_invariant_compiler_options
from rljax.engine.invariance import Invariance, measured, row_counts
from rljax.engine.weight_blocks import measured_blocks, most_block_bytes, with_blocks
from rljax.kernels import linear
from rljax.kernels.linear import product
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params
from rljax.numerics.blocked_weights import BlockedWeight, blocked_dot, whole
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import Numerics
from rljax.provenance import machine_facts
from tests.engines import SAMPLING, ask, decode, lively_params, stored_pool
from tests.exactness import exact_numerics
from tests.training.tiny_run import write_config

POLICY = ModelConfig("qwen3", 128, 64, 1, 4, 2, 64, 192, tie_embeddings=True, qk_norm=True)
SHAPES = ((64, 128), (64, 192), (64, 256), (192, 64), (256, 64))
ROWS = 16
BUCKETS = Buckets((2, 8), (128,), (16,), 3)


@pytest.fixture
def any_size(monkeypatch):
    """Matrices of any size are measured, and blocks count as faster."""
    monkeypatch.setattr(weight_blocks, "_LEAST", 0)
    monkeypatch.setattr(weight_blocks, "_GAIN", 0.0)


def in_blocks(numerics):
    """The same numerics with blocks of all weights."""
    form = dataclasses.replace(numerics.product_form, blocks=tuple((*shape, ROWS) for shape in SHAPES))
    return dataclasses.replace(numerics, measured_form=form)


@pytest.fixture(scope="module")
def numerics():
    """As measured: small weights stay whole. Skips where the processor's products of 64 outputs have other
    bits than one of all outputs.
    """
    numerics = exact_numerics(POLICY, "float32", BUCKETS)
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, 64)), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(2).standard_normal((256, 64)), jnp.float32)

    def multiplied_in_blocks(rows, blocks):
        return jnp.einsum("brk,bkn->brn", jnp.broadcast_to(rows, (4, *rows.shape)), blocks)

    options = row_invariant_compiler_options()
    parts = jax.jit(multiplied_in_blocks, compiler_options=options)(
        rows, weight.reshape(4, 64, 64).swapaxes(1, 2)
    )
    multiply = jax.jit(lambda rows, weight: product(rows, weight, numerics), compiler_options=options)
    if not np.array_equal(np.concatenate(parts, axis=1), multiply(rows, weight)):
        pytest.skip(f"{machine_facts()['cpu']}: blocks have other bits")
    assert numerics.product_form.blocks == ()
    return numerics


def test_tokens_and_logprobs_are_those_of_whole_weights(numerics):
    params = lively_params(POLICY)
    asked = ask([3, 9, 12], [30, 25, 40])
    outputs = []
    for used in (numerics, in_blocks(numerics)):
        engine = DecodeEngine(POLICY, used, SAMPLING, BUCKETS, [], 16, stored_pool())
        loaded = engine.load_params(params)
        weights = [weight for layer in loaded["layers"] for weight in layer.values()]
        count = sum(isinstance(each, BlockedWeight) for each in [*weights, loaded.get("blocked_head")])
        assert count == (0 if used is numerics else 7 + 1)
        outputs += [decode(engine, loaded, asked[:2], order=[1, 0]), decode(engine, loaded, asked)]
    assert outputs[:2] == outputs[2:]  # of 2 slots, in blocks, and of 8


def test_what_is_measured_is_what_is_used(numerics, any_size, monkeypatch):
    counts = row_counts(BUCKETS)
    found = measured_blocks(SHAPES[:2], numerics, ProductForm(), counts.products)
    assert found == tuple((*shape, max(n for n in counts.products if n <= 32)) for shape in SHAPES[:2])
    assert measured_blocks([(64, 96)], numerics, ProductForm(), [2]) == ()  # 96 are no blocks of 64
    assert measured_blocks(SHAPES[:2], Numerics(compute_dtype="bfloat16"), ProductForm(), [2]) == ()
    monkeypatch.setattr(weight_blocks, "_GAIN", float("inf"))  # they are no faster
    assert measured_blocks(SHAPES[:2], Numerics(), ProductForm(), [2, 4, 8]) == ()


def test_blocks_with_other_bits_are_not_used(numerics, any_size, monkeypatch):
    def misbehaving(rows, weight):
        y = blocked_dot(rows, weight)
        return y if len(rows) < 8 else y * (1 + 2**-12)

    monkeypatch.setattr(linear, "blocked_dot", misbehaving)
    arguments = SHAPES[:1], numerics, ProductForm(), (2, 4, 8, 16)
    assert measured_blocks(*arguments) == ((*SHAPES[0], 4),)
    freely = dataclasses.replace(numerics, row_invariant=False)
    assert measured_blocks(arguments[0], freely, *arguments[2:]) == ((*SHAPES[0], 16),)


@pytest.mark.usefixtures("numerics", "any_size")
def test_a_measurement_with_blocks_is_kept(tmp_path):
    arguments = POLICY, Numerics(), row_counts(Buckets((2,), (64,)), [48]), tmp_path
    first = measured(*arguments)
    assert first.form.blocks and "in blocks of weights up to" in first.summary("float32")
    assert measured(*arguments) == first and hash(first.form) == hash(measured(*arguments).form)
    assert measured(POLICY, Numerics(row_invariant=False), *arguments[2:]).form.blocks


def test_the_key_turns_them_off(tmp_path, monkeypatch):
    found = Invariance(ProductForm(blocks=((64, 128, ROWS),)), (), (), "", 0.0)
    monkeypatch.setattr(decoding, "measured", lambda *_: found)
    path = write_config(tmp_path)
    for row_invariant, keep in itertools.product(("true", "false"), ("true", "false")):
        keys = [f"engine.row_invariant={row_invariant}", f"engine.weight_blocks={keep}"]
        numerics, _ = decoding.make_numerics(load_config(path, keys), POLICY, None)
        assert bool(numerics.product_form.blocks) == (keep == "true")


def test_the_quantized_policy_is_rounded_from_whole_weights():
    params = init_params(POLICY, 0)
    converted = with_blocks(params, POLICY, in_blocks(Numerics()).product_form)
    drafters = [QuantizedPolicy(default_format(8), "rtn") for _ in range(2)]
    one, other = (drafter.refresh(each) for drafter, each in zip(drafters, (params, converted), strict=True))
    jax.tree.map(np.testing.assert_array_equal, one["layers"], other["layers"])
    assert drafters[0].read_bytes == drafters[1].read_bytes


def test_the_memory_of_blocks_is_known_before(monkeypatch):
    monkeypatch.setattr(weight_blocks, "_LEAST", 0)
    params = init_params(POLICY, 0)
    converted = with_blocks(params, POLICY, in_blocks(Numerics()).product_form)
    extra = sum(leaf.nbytes for leaf in jax.tree.leaves(converted)) - whole(converted["blocked_head"]).nbytes
    assert most_block_bytes(params, POLICY) == extra - sum(leaf.nbytes for leaf in jax.tree.leaves(params))
