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
from tests import engines
from tests.engines import CONFIGS, SAMPLING, ask, decode, lively_params, speculate, tangled
from tests.exactness import exact_numerics
from tests.training.tiny_run import write_config

BUCKETS = Buckets((5,), (512,), (20,), 7)  # shapes among those that the tests' engines are measured for
CONFIG = dataclasses.replace(CONFIGS["three"], num_layers=2)
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
def decoded(dtype, layout, drafted=False):
    """What an engine prefills and decodes, plainly or with drafts."""
    numerics = exact_numerics(CONFIGS["three"], dtype, engines.BUCKETS)  # which depend on no depth
    numerics = dataclasses.replace(numerics, outline_layers=layout)
    engine = DecodeEngine(CONFIG, numerics, SAMPLING, BUCKETS, [], 64, hidden_layers=(0, 1))
    params = engine.load_params(lively_params(CONFIG))
    asked = ask([3, 60, 100, 1], [60, 30, 90, 5])
    prefix = engine.prefill(params, [each.prompt for each in asked])
    plain = decode(engine, params, asked, capacity=512)
    if drafted:
        drafts = tangled([tokens for tokens, _ in plain])
        assert speculate(engine, params, asked, drafts, 7, capacity=512).outputs == plain
    return plain, jax.tree.map(np.asarray, prefix)


@pytest.mark.long  # in bfloat16, which rounds at more places, below
def test_an_engine_decodes_the_bits_of_layers_written_out():
    expected = decoded("float32", "written out")
    for layout in LAYOUTS:
        jax.tree.map(np.testing.assert_array_equal, decoded("float32", layout, layout == "called"), expected)


def test_drafted_and_plain_decoding_have_the_same_bits_in_bfloat16():
    decoded("bfloat16", "called", drafted=True)


@functools.lru_cache
def _lowered_gradient(dtype, layout, remat):
    config, numerics = CONFIG, Numerics(compute_dtype=dtype, outline_layers=layout)
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


@pytest.mark.default_cases("called-True")
@pytest.mark.parametrize(("layout", "remat"), [("inlined", False), ("called", True)])
def test_gradients_are_those_of_layers_written_out(layout, remat):
    found, expected = (_gradients("float32", each, remat) for each in (layout, "written out"))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


@pytest.mark.long  # above, in float32
def test_gradients_in_bfloat16_are_as_good_as_those_of_inlined_layers():
    """The compiler leaves out roundings between layers that it can see at once, so the two differ."""
    _, exact = _gradients("float32", "inlined", False)
    called, inlined = (
        _distance(_gradients("bfloat16", layout, False)[1], exact) for layout in ("called", "inlined")
    )
    assert called < 1.25 * inlined


def _gradients(*which):
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
    policy = dataclasses.replace(CONFIG, num_layers=layers)
    with target.tracing_for(None, 1, platform):
        assert unmeasured_numerics(config, policy, None).outline_layers == expected


def test_only_a_cpu_outlines_layers(tmp_path):
    config = load_config(write_config(tmp_path), ["policy.outline_layers=on"])
    with target.tracing_for(None, 1, "gpu"), pytest.raises(ConfigError, match=r"outline_layers: on .* auto"):
        unmeasured_numerics(config, CONFIG, None)


@pytest.mark.parametrize("remat", [False, True])
def test_all_layers_are_calls_of_one_function(remat):
    for layout in LAYOUTS:
        calls = _calls(_lowered_gradient("float32", layout, remat)[0])
        found = calls.pop(layout == "inlined")
        assert len(found) == 2 * CONFIG.num_layers and len(set(found)) == 2, found  # forward and backward
    assert not any(_calls(_lowered_gradient("float32", "written out", remat)[0]).values())


def test_recomputing_keeps_no_activations():
    def temporaries(remat):
        return _gradient_program("float32", "called", remat).memory_analysis().temp_size_in_bytes

    assert temporaries(True) < 0.7 * temporaries(False)


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
