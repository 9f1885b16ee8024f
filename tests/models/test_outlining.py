"""Decoder layers that are compiled once and called: the same bits, one function in every program."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import target
from rljax.config import load_config
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import row_invariant_compiler_options
from rljax.models import transformer
from rljax.models.outlining import outlined
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.training.assembly import unmeasured_numerics
from tests.engine.test_engine import CONFIGS, SAMPLING, ask, decode, lively_params
from tests.engine.test_speculative_decoding import speculate, tangled
from tests.exactness import exact_numerics
from tests.training.tiny_run import write_config

DEPTH = 3
BUCKETS = Buckets((4,), (256,), (12,), 3)
POLICIES = [("three", "float32"), ("one", "bfloat16")]


@functools.lru_cache
def engine_of(name, dtype, outline):
    config = dataclasses.replace(CONFIGS[name], num_layers=DEPTH)
    numerics = dataclasses.replace(exact_numerics(config, dtype, BUCKETS), outline_layers=outline)
    return DecodeEngine(config, numerics, SAMPLING, BUCKETS, [], 64, hidden_layers=(0, 2))


@functools.lru_cache
def decoded(name, dtype, outline, drafted=False):
    """What an engine prefills and decodes, plainly or with drafts."""
    engine = engine_of(name, dtype, outline)
    params = engine.load_params(lively_params(engine.config))
    asked = ask([3, 60, 100, 1], [60, 30, 90, 5])
    prefix = engine.prefill(params, [each.prompt for each in asked])
    if not drafted:
        return decode(engine, params, asked, capacity=256), jax.tree.map(np.asarray, prefix)
    truth = [tokens for tokens, _ in decoded(name, dtype, outline)[0]]
    return speculate(engine, params, asked, tangled(truth), 3, capacity=256).outputs


def test_an_engine_decodes_the_bits_of_layers_written_out():
    plain, prefix = decoded(*POLICIES[0], True)
    expected, expected_prefix = decoded(*POLICIES[0], False)
    assert plain == expected
    for one, other in zip(jax.tree.leaves(prefix), jax.tree.leaves(expected_prefix), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("policy", POLICIES, ids=" ".join)
def test_drafted_and_plain_decoding_have_the_same_bits(policy):
    assert decoded(*policy, True, drafted=True) == decoded(*policy, True)[0]


@functools.lru_cache
def _gradient_program(name, dtype, outline, remat):
    config = engine_of(name, dtype, outline).config
    numerics = engine_of(name, dtype, outline).numerics
    rope = jnp.asarray(rope_table(config, 64))
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], (2, 64))

    def loss(params, tokens, segment_ids):
        attention = PackedAttention(segment_ids, numerics)
        hidden, _ = transformer.forward(params, config, tokens, positions, attention, rope, numerics, remat)
        logits = transformer.logits(params, config, hidden, numerics)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (2, 64)).astype(np.int32)
    segment_ids = np.repeat(np.array([[1, 2], [3, 3]], np.int32), 32, axis=1)
    arguments = lively_params(config), tokens, segment_ids
    lowered = jax.jit(jax.value_and_grad(loss)).lower(*arguments)
    return lowered, lowered.compile(row_invariant_compiler_options()), arguments


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", [name for name, dtype in POLICIES if dtype == "float32"])
def test_gradients_are_those_of_layers_written_out(name, remat):
    (loss, gradients), (expected_loss, expected) = (
        _gradients(name, "float32", outline, remat) for outline in (True, False)
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", [name for name, dtype in POLICIES if dtype == "bfloat16"])
def test_gradients_in_bfloat16_are_as_good_as_those_of_layers_written_out(name, remat):
    """The compiler leaves out roundings between layers that it can see at once, so the two differ."""
    _, exact = _gradients(name, "float32", False, remat)
    outlined, written_out = (
        _distance(_gradients(name, "bfloat16", outline, remat)[1], exact) for outline in (True, False)
    )
    assert outlined < 1.25 * written_out


def _gradients(name, dtype, outline, remat):
    _, program, arguments = _gradient_program(name, dtype, outline, remat)
    return program(*arguments)


def _distance(gradients, exact):
    """The largest distance of an array from the exact one, as a share of its length."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)
    return max(np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in pairs)


def _calls(lowered):
    """Names of the functions that are called without being inlined, one for each call."""
    return [
        re.search(r"call @(\w+)\(", line)[1]
        for line in lowered.as_text().splitlines()
        if 'inlineable = "false"' in line
    ]


@pytest.mark.parametrize(
    ("platform", "layers", "setting", "expected"),
    [
        ("tpu", 4, "auto", True),
        ("tpu", 3, "auto", False),
        ("gpu", 4, "auto", False),
        ("cpu", 4, "auto", False),
        ("cpu", 1, "on", True),
        ("tpu", 36, "off", False),
    ],
)
def test_the_setting_chooses(tmp_path, platform, layers, setting, expected):
    config = load_config(write_config(tmp_path), [f"policy.outline_layers={setting}"])
    policy = dataclasses.replace(CONFIGS["one"], num_layers=layers)
    with target.tracing_for(None, 1, platform):
        assert unmeasured_numerics(config, policy, None).outline_layers == expected


@pytest.mark.parametrize("remat", [False, True])
def test_all_layers_are_calls_of_one_function(remat):
    calls = _calls(_gradient_program(*POLICIES[0], True, remat)[0])
    assert len(calls) == 2 * DEPTH and len(set(calls)) == 2  # forward and backward
    assert not _calls(_gradient_program(*POLICIES[0], False, remat)[0])


def test_recomputing_keeps_no_activations():
    def temporaries(remat):
        return _gradient_program(*POLICIES[0], True, remat)[1].memory_analysis().temp_size_in_bytes

    assert temporaries(True) < 0.7 * temporaries(False)


def test_an_outlined_function_has_the_gradient_of_the_function():
    scale = jnp.float32(3.0)

    def loss(function, x, y):
        first, (second, none) = function({"x": x}, None, y)
        assert none is None
        return jnp.sum(first * second)

    def function(tree, nothing, y):
        return jnp.sin(tree["x"]) * scale, (y * y, nothing)

    x, y = jnp.arange(4.0), jnp.arange(4.0) + 1.0
    expected = jax.grad(functools.partial(loss, function), (0, 1))(x, y)
    for remat in (False, True):
        found = jax.jit(jax.grad(functools.partial(loss, outlined(function, remat)), (0, 1)))(x, y)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
