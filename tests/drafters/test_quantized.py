"""Quantized weights: against NumPy, at every size, and what is shared with the policy and what is reused."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.arguments import QuantizedArguments
from drafters.quantized import PROJECTIONS, QuantizedDrafter, QuantizedPolicy, WeightFormat, clipped, rtn
from rljax.errors import ConfigError
from rljax.kernels import tuned
from rljax.kernels.linear import linear, product
from rljax.numerics.quantized import dequantize
from rljax.numerics.rows import Numerics
from tests.engines import CONFIGS, lively_params

W4, W8, W8A8 = WeightFormat(4, 128), WeightFormat(8, 0), WeightFormat(8, 0, "int8")
FORMATS = {"w4": W4, "w4, whole rows": WeightFormat(4, 0), "w8": W8, "w8, groups": WeightFormat(8, 64)}
round_off = jax.jit(rtn, static_argnums=(1, 2))
clip = jax.jit(clipped, static_argnums=(1, 2))
restore = jax.jit(dequantize)
multiply = jax.jit(lambda x, weight: product(x, weight, Numerics()))
add_bias = jax.jit(lambda x, weight, bias: linear(x, weight, Numerics(), bias))


def matrix(inputs, outputs=48, seed=0):
    """Rows with other offsets and spreads, one of zeros, one constant, one without negative weights."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((outputs, inputs)) * rng.uniform(0.1, 4, (outputs, 1))
    weight += rng.uniform(-0.5, 0.5, (outputs, 1))
    weight[0], weight[1], weight[2] = 0, 0.3, np.abs(weight[2])
    return weight.astype(np.float32)


# The bits of every format, short last groups included: in tests/kernels/test_round_to_nearest.py.
@pytest.mark.parametrize("inputs", [257, 1])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_a_restored_weight_is_within_half_a_step_of_its_grid(fmt, inputs):
    weight = matrix(inputs)
    quantized = round_off(jnp.asarray(weight), fmt)
    ours, groups = np.asarray(restore(quantized)), -(-inputs // fmt.group) if fmt.group else 1
    assert quantized.shape == ours.shape == weight.shape and quantized.scale.shape == (48, groups)
    steps = np.repeat(np.asarray(quantized.scale), fmt.group or inputs, axis=1)[:, :inputs]
    assert (np.abs(ours - weight) <= 0.5 * steps * 1.0001 + 1e-6).all()
    assert (ours[0] == 0).all() and (quantized.zero is None) == (fmt.bits == 8)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_clipping_never_has_a_larger_error_than_rounding(fmt):
    weight = matrix(192)
    weight[5, 7] = 40.0  # an outlier that is worth clipping
    plain, better = (
        np.square(np.asarray(restore(quantizer(jnp.asarray(weight), fmt))) - weight).sum(1)
        for quantizer in (round_off, clip)
    )
    assert (better <= plain * 1.00001 + 1e-9).all()
    if fmt.bits == 4:
        assert better.sum() < 0.99 * plain.sum()


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("bfloat16", 7)])
@pytest.mark.parametrize("fmt", [*FORMATS.values(), W8A8], ids=[*FORMATS, "w8a8"])
def test_a_product_is_that_with_the_restored_matrix(fmt, dtype, rows):
    weight = round_off(jnp.asarray(matrix(192)), fmt)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 192)), dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(restore(weight), np.float64).T
    ours = np.asarray(multiply(x, weight))
    assert ours.dtype == np.float32 and ours.shape == wanted.shape
    if fmt.activations == "int8":  # half a step of the inputs, under every weight
        step = np.abs(np.asarray(x, np.float64)).max(1, keepdims=True) / 127
        bound = 0.5 * step * np.abs(np.asarray(restore(weight), np.float64)).sum(1) * 1.001 + 1e-5
        assert (np.abs(ours - wanted) <= bound).all() and np.abs(ours - wanted).max() > 1e-4
    else:
        scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(restore(weight), np.float64)).T
        assert (np.abs(ours - wanted) <= (2.0**-8 if dtype == "bfloat16" else 1e-6) * (scale + 1e-3)).all()
    y = add_bias(x[None], weight, np.ones(48, np.float32))
    assert y.dtype == x.dtype and y.shape == (1, rows, 48)


def test_sums_of_integers_do_not_depend_on_the_rows_beside():
    weight = round_off(jnp.asarray(matrix(192)), W8A8)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((16, 192)), jnp.float32)
    together = multiply(x, weight)
    for rows in (1, 2, 3, 8):
        np.testing.assert_array_equal(multiply(x[:rows], weight), together[:rows])
    assert (multiply(jnp.zeros((2, 192)), weight) == 0).all()


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("name", "quantizer"), [pytest.param("three", "clipped", marks=pytest.mark.long), ("one", "rtn")]
)
def test_only_projections_are_stored_anew(name, quantizer):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), lively_params(CONFIGS[name]))
    policy = QuantizedPolicy(W4, quantizer)
    drafter = policy.refresh(params)
    for layer, own in zip(drafter["layers"], params["layers"], strict=True):
        assert layer.keys() == own.keys()
        for part in layer.keys() - set(PROJECTIONS):
            assert layer[part] is own[part]
        for part in PROJECTIONS:
            assert layer[part].shape == own[part].shape
            whole = np.asarray(own[part], np.float32)
            lost = np.linalg.norm(np.asarray(restore(layer[part])) - whole) / np.linalg.norm(whole)
            assert lost < 0.15  # a wrong projection or layer loses more than 1
    assert all(drafter[part] is params[part] for part in params if part != "layers")
    assert not set(pointers([[layer[part] for part in PROJECTIONS] for layer in drafter["layers"]])) & set(
        pointers(params)
    )
    projections = [layer[part] for layer in params["layers"] for part in PROJECTIONS]
    weights = sum(leaf.size for leaf in projections)
    assert weights / 2 < policy.bytes < 0.6 * weights
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - sum(leaf.nbytes for leaf in projections)
    unread = 0 if "lm_head" not in params else params["embed"].nbytes
    assert policy.read_bytes == rest + policy.bytes - unread
    assert policy.seconds > 0


def test_a_refresh_follows_the_policy_in_the_memory_of_the_one_before():
    first, second = (lively_params(CONFIGS["two"], seed) for seed in (0, 1))
    policy = QuantizedPolicy(W4)
    before = policy.refresh(first)
    old = [layer[part] for layer in before["layers"] for part in PROJECTIONS]
    places = pointers(old)
    after = policy.refresh(second)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert set(pointers([layer[part] for layer in after["layers"] for part in PROJECTIONS])) == set(places)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((first, second)))
    alone = QuantizedPolicy(W4).refresh(second)
    jax.tree.map(np.testing.assert_array_equal, after, alone)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda: WeightFormat(3), "bits: 3 is not supported; use 4 or 8"),
        (lambda: WeightFormat(4, -1), "group: should not be negative, got -1"),
        (lambda: WeightFormat(4, 128, "int8"), "activations: int8 needs one scale"),
        (lambda: WeightFormat(8, 128, "int8"), "activations: int8 needs one scale"),
        (lambda: QuantizedPolicy(W4, "rnt"), "quantizer: unknown quantizer 'rnt'; did you mean 'rtn'"),
    ],
)
def test_what_cannot_be_is_named(fails, message):
    with pytest.raises(ConfigError, match=message):
        fails()


_A100 = SimpleNamespace(device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0")
_H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB", compute_capability="9.0")


@pytest.mark.parametrize(
    ("backend", "device", "table", "bits", "warns"),
    [
        ("cpu", jax.devices("cpu")[0], {}, 8, False),
        ("gpu", _A100, {}, 8, True),
        ("gpu", _A100, {("NVIDIA H100", "quantized_product"): []}, 8, True),
        ("gpu", _A100, {("NVIDIA A100", "tree_attention"): []}, 8, True),
        ("gpu", _A100, {("NVIDIA A100", "quantized_product"): []}, 4, False),
        ("gpu", _H100, {}, 4, False),
    ],
)
def test_four_bits_are_the_default_where_a_kernel_is(monkeypatch, backend, device, table, bits, warns):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(tuned, "TUNED", table)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given, found in ({}, bits), ({"bits": 4}, 4):  # a choice is a choice
            assert QuantizedDrafter(QuantizedArguments(**given)).policy_weights.format.bits == found
    said = [str(warning.message) for warning in caught]
    assert len(said) == warns
    assert all("will hardly pay on NVIDIA A100-SXM4-80GB" in line and "\n" not in line for line in said)
