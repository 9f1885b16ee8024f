"""Decoder layers that are traced once, inlined or called: the bits of layers written out."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import target
from rljax.assembly.decoding import unmeasured_numerics
from rljax.config import load_config
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import row_invariant_compiler_options
from rljax.errors import ConfigError
from rljax.models import transformer
from rljax.models.outlining import traced_once
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from tests.engines import CONFIGS, SAMPLING, ask, decode, lively_params, speculate, tangled
from tests.exactness import exact_numerics
from tests.training.tiny_run import write_config

DEPTH = 2
BUCKETS = Buckets((4,), (256,), (12,), 3)
POLICIES = [("three", "float32"), ("one", "bfloat16")]
LAYOUTS = ["inlined", "called"]


@pytest.fixture(autouse=True)
def layout_by_name(monkeypatch):
    """`Numerics.outline_layers` is the name of a layout here, also that of layers written out."""

    def laid_out(function, remat, layout):
        if layout == "written out":
            return jax.checkpoint(function) if remat else function
        return traced_once(function, remat, layout == "called")

    monkeypatch.setattr(transformer, "traced_once", laid_out)


@functools.lru_cache
def engine_of(name, dtype, layout):
    config = dataclasses.replace(CONFIGS[name], num_layers=DEPTH)
    numerics = dataclasses.replace(exact_numerics(config, dtype, BUCKETS), outline_layers=layout)
    return DecodeEngine(config, numerics, SAMPLING, BUCKETS, [], 64, hidden_layers=(0, 1))


@functools.lru_cache
def decoded(name, dtype, layout, drafted=False):
    """What an engine prefills and decodes, plainly or with drafts."""
    engine = engine_of(name, dtype, layout)
    params = engine.load_params(lively_params(engine.config))
    asked = ask([3, 60, 100, 1], [60, 30, 90, 5])
    prefix = engine.prefill(params, [each.prompt for each in asked])
    if not drafted:
        return decode(engine, params, asked, capacity=256), jax.tree.map(np.asarray, prefix)
    truth = [tokens for tokens, _ in decoded(name, dtype, layout)[0]]
    return speculate(engine, params, asked, tangled(truth), 3, capacity=256).outputs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_decodes_the_bits_of_layers_written_out(layout):
    plain, prefix = decoded(*POLICIES[0], layout)
    expected, expected_prefix = decoded(*POLICIES[0], "written out")
    assert plain == expected
    for one, other in zip(jax.tree.leaves(prefix), jax.tree.leaves(expected_prefix), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("policy", POLICIES, ids=" ".join)
def test_drafted_and_plain_decoding_have_the_same_bits(policy):
    assert decoded(*policy, "called", drafted=True) == decoded(*policy, "called")[0]


@functools.lru_cache
def _lowered_gradient(name, dtype, layout, remat):
    config = engine_of(name, dtype, layout).config
    numerics = engine_of(name, dtype, layout).numerics
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
    return jax.jit(jax.value_and_grad(loss)).lower(*arguments), arguments


@functools.lru_cache
def _gradient_program(*which):
    return _lowered_gradient(*which)[0].compile(row_invariant_compiler_options())


@pytest.mark.parametrize(
    ("layout", "remat"),
    [
        ("inlined", False),
        ("called", True),
        pytest.param("inlined", True, marks=pytest.mark.long),
        pytest.param("called", False, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_layers_written_out(layout, remat):
    found, expected = (_gradients(*POLICIES[0], each, remat) for each in (layout, "written out"))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradients_in_bfloat16_are_as_good_as_those_of_inlined_layers(remat):
    """The compiler leaves out roundings between layers that it can see at once, so the two differ."""
    name, dtype = POLICIES[1]
    _, exact = _gradients(name, "float32", "inlined", remat)
    called, inlined = (
        _distance(_gradients(name, dtype, layout, remat)[1], exact) for layout in ("called", "inlined")
    )
    assert called < 1.25 * inlined


def _gradients(name, dtype, layout, remat):
    which = name, dtype, layout, remat
    return _gradient_program(*which)(*_lowered_gradient(*which)[1])


def _distance(gradients, exact):
    """The largest distance of an array from the exact one, as a share of its length."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)
    return max(np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in pairs)


def _calls(lowered):
    """Names of the layers' functions that a program calls, one for each call, by whether they are inlined."""
    calls = {True: [], False: []}
    for line in lowered.as_text().splitlines():
        called = re.search(r"call @((?:run|outlined_call|checkpoint)\w*)\(", line)
        if called:
            calls['inlineable = "false"' not in line].append(called[1])
    return calls


@pytest.mark.parametrize(
    ("platform", "layers", "setting", "dtype", "remat", "expected"),
    [
        ("cpu", 4, "auto", "float32", True, True),
        ("cpu", 3, "auto", "float32", True, False),
        ("cpu", 4, "auto", "float32", False, False),
        ("cpu", 4, "auto", "bfloat16", False, True),
        ("cpu", 3, "auto", "bfloat16", False, False),
        ("gpu", 4, "auto", "bfloat16", True, False),
        ("tpu", 4, "auto", "bfloat16", True, False),
        ("cpu", 1, "on", "float32", False, True),
        ("cpu", 36, "off", "bfloat16", True, False),
    ],
)
def test_the_setting_chooses(tmp_path, platform, layers, setting, dtype, remat, expected):
    overrides = [f"policy.outline_layers={setting}", f"training.remat={str(remat).lower()}"]
    overrides.append(f"policy.compute_dtype={dtype}")
    config = load_config(write_config(tmp_path), overrides)
    policy = dataclasses.replace(CONFIGS["one"], num_layers=layers)
    with target.tracing_for(None, 1, platform):
        assert unmeasured_numerics(config, policy, None).outline_layers == expected
    config = load_config(write_config(tmp_path), ["policy.outline_layers=on"])
    with target.tracing_for(None, 1, "gpu"), pytest.raises(ConfigError, match=r"outline_layers: on .* auto"):
        unmeasured_numerics(config, policy, None)


@pytest.mark.parametrize("remat", [False, True])
def test_all_layers_are_calls_of_one_function(remat):
    for layout in LAYOUTS:
        calls = _calls(_lowered_gradient(*POLICIES[0], layout, remat)[0])
        found = calls.pop(layout == "inlined")
        assert len(found) == 2 * DEPTH and len(set(found)) == 2, found  # forward and backward
    assert not any(_calls(_lowered_gradient(*POLICIES[0], "written out", remat)[0]).values())


def test_recomputing_keeps_no_activations():
    def temporaries(remat):
        return _gradient_program(*POLICIES[0], "called", remat).memory_analysis().temp_size_in_bytes

    assert temporaries(True) < 0.7 * temporaries(False)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("outlined", [False, True])
def test_a_function_traced_once_has_its_gradient(outlined, remat):
    scale = jnp.float32(3.0)

    def loss(function, x, y):
        first, (second, none) = function({"x": x}, None, y)
        assert none is None
        return jnp.sum(first * second)

    def function(tree, nothing, y):
        return jnp.sin(tree["x"]) * scale, (y * y, nothing)

    x, y = jnp.arange(4.0), jnp.arange(4.0) + 1.0
    expected = jax.grad(functools.partial(loss, function), (0, 1))(x, y)
    once = traced_once(function, remat, outlined)
    found = jax.jit(jax.grad(functools.partial(loss, once), (0, 1)))(x, y)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_tree_is_read_once_for_all_layers():
    """Ancestors are found in words of bits, which no layer's kernels compute again."""
    words = []
    for depth in (1, 3):
        config = dataclasses.replace(CONFIGS["three"], num_layers=depth)
        engine = DecodeEngine(config, Numerics(), SAMPLING, BUCKETS, [], 64)
        shapes = engine.param_shapes(lively_params(config))
        engine.compile_verify(shapes, 4, 256, 12, 3)
        (program,) = engine.pool._programs.values()
        words.append(program.as_text().count("= u32["))
    assert words[0] == words[1]
