"""Products with quantized weights: every backend against float64, and what must not matter to a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.quantized import QuantizedPolicy, WeightFormat, rtn
from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.engine import Assignment, DecodeEngine
from rljax.kernels.quantized_product import mosaic_gpu, mosaic_tpu, quantized_product
from rljax.kernels.round_to_nearest import base
from rljax.kernels.round_to_nearest import mosaic_gpu as mosaic_gpu_rounding
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.quantized import dequantize
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from tests.engines import stored_pool
from tests.kernels.compilation import HOPPER, compile_for
from tests.kernels.test_gated_product import SLOW

INTERPRETED = [pytest.param("interpret_gpu", marks=SLOW), "interpret_tpu"]
NATIVE = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
BACKENDS = [*INTERPRETED, pytest.param("native", marks=pytest.mark.accelerator)]


def weight_of(outputs, inputs, fmt, seed=0):
    """A matrix with a mean, so that zeros matter."""
    matrix = np.random.default_rng(seed).standard_normal((outputs, inputs)) + 0.2
    return jax.jit(rtn, static_argnums=1)(matrix.astype(np.float32), fmt)


def rows_of(count, inputs, seed=1):
    rows = np.random.default_rng(seed).standard_normal((count, inputs)) + 0.1
    return jnp.asarray(rows.astype(jnp.bfloat16))


def multiplied(x, weight, implementation):
    """The product in one program, traced anew."""
    name = NATIVE[jax.default_backend()] if implementation == "native" else implementation
    return jax.jit(lambda x, weight: quantized_product(x, weight, name))(x, weight)


def check(x, weight, implementation, tolerance=1e-6):
    ours = np.asarray(multiplied(x, weight, implementation))
    wide, matrix = np.asarray(x, np.float64), np.asarray(jax.jit(dequantize)(weight), np.float64)
    assert ours.shape == (len(wide), len(matrix)) and ours.dtype == np.float32
    bound = tolerance * (np.abs(wide) @ np.abs(matrix).T + 1e-3)
    assert (np.abs(ours - wide @ matrix.T) <= bound).all()


# outputs (not a multiple of a tile), inputs (an uneven number of steps; a last group that is short), rows
SHAPES = {
    "w4, groups of 128": (200, 512, 3, WeightFormat(4, 128)),
    "w8, whole rows": (136, 192, 16, WeightFormat(8, 0)),
    "w4, groups of 32": (144, 192, 9, WeightFormat(4, 32)),
    "w4, whole rows": (136, 384, 64, WeightFormat(4, 0)),
    "w4, short last group": (128, 576, 2, WeightFormat(4, 128)),
    "w4, halves within groups": (128, 896, 2, WeightFormat(4, 128)),
    "w8, groups of 64": (152, 448, 4, WeightFormat(8, 64)),
}
ODD = {
    "w4, odd inputs": (40, 255, 5, WeightFormat(4, 128)),
    "w4, odd groups": (128, 190, 5, WeightFormat(4, 48)),
    "w8, odd inputs": (300, 131, 1, WeightFormat(8, 0)),
    "w8, odd outputs": (131, 192, 16, WeightFormat(8, 0)),
}


def _marks(name, case):
    """What JAX 0.10 interprets for GPUs in a few seconds, and what the extra tier adds."""
    if (name, case) == ("interpret_gpu", "w8, whole rows"):
        return pytest.mark.long  # in as long as twenty cases for TPUs
    if name == "interpret_gpu" and case in list(SHAPES)[2:]:
        return SLOW
    return pytest.mark.accelerator if name == "native" else ()


@pytest.mark.default_cases("interpret_gpu-*", "*-w4, short last group", "*-w8, groups of 64")
@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        pytest.param(name, case, marks=_marks(name, case))
        for name in ("interpret_gpu", "interpret_tpu", "native")
        for case in (*SHAPES, *ODD)
    ],
)
def test_against_float64(implementation, case):
    outputs, inputs, rows, fmt = (SHAPES | ODD)[case]
    x, weight = rows_of(rows, inputs), weight_of(outputs, inputs, fmt)
    on_gpu = jax.default_backend() == "gpu" if implementation == "native" else "gpu" in implementation
    if on_gpu and case in ODD:
        with pytest.raises(Refused, match=r"_gpu: (\d+ inputs in groups|\d+ outputs)"):
            multiplied(x, weight, implementation)
        return
    check(x, weight, implementation)


@SLOW
@pytest.mark.parametrize("splits", [1, 4])
def test_blocks_of_many_steps(splits, monkeypatch):
    """More than are on their way at once, and a last block with fewer."""
    monkeypatch.setattr(mosaic_gpu, "_splits", lambda tiles, steps: splits)
    check(rows_of(3, 448), weight_of(128, 448, WeightFormat(4, 32)), "interpret_gpu")


@pytest.mark.parametrize("rows", [1, 16])
def test_the_reference_against_float64(rows):
    weight = weight_of(70, 300, WeightFormat(4, 128))
    check(rows_of(rows, 300).astype(jnp.float32), weight, None)
    check(rows_of(rows, 300), weight, "xla", tolerance=2.0**-8)  # weights are rounded to bfloat16


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_are_optional(implementation, bits):
    weight = weight_of(128, 256, WeightFormat(bits, 128))
    zeros = None
    if bits == 8:
        zeros = jnp.asarray(np.random.default_rng(3).integers(0, 256, weight.scale.shape), jnp.uint8)
    # An integer of 9 bits is rounded to bfloat16's 8.
    tolerance = 2.0**-8 if bits == 8 and implementation == "interpret_gpu" else 1e-6
    check(rows_of(2, 256), weight.replace(zero=zeros), implementation, tolerance)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_computed_as_if_alone(implementation, bits):
    size = 3584 if implementation == "native" else 256
    weight = weight_of(size, size, WeightFormat(bits, 128 if bits == 4 else 0))
    # A CPU's own product of more rows than 16 is not row-invariant.
    x = rows_of(64 if implementation == "native" else 13, size)
    together = np.asarray(multiplied(x, weight, implementation))
    for rows in [slice(12, 13), *(slice(0, n) for n in (2, 9, 33) if n < len(x))]:
        np.testing.assert_array_equal(multiplied(x[rows], weight, implementation), together[rows])
    if implementation == "native":
        check(x, weight, implementation, 4e-6)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_what_is_not_a_number_stays_in_its_row_or_output(implementation):
    """Also where blocks reach beyond the matrix, and padding beyond the groups."""
    weight, x = weight_of(136, 256, WeightFormat(4, 128)), rows_of(3, 256)
    y = np.asarray(multiplied(x.at[1].set(jnp.nan), weight, implementation))
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], np.asarray(multiplied(x, weight, implementation))[[0, 2]])
    broken = weight.replace(scale=weight.scale.at[135, 1].set(jnp.nan))
    y = np.asarray(multiplied(x, broken, implementation))
    assert np.isnan(y[:, 135]).all() and np.isfinite(y[:, :135]).all()


@pytest.mark.parametrize("implementation", ["interpret_gpu", "interpret_tpu"])
def test_what_kernels_refuse(implementation):
    for fmt, rows, dtype, why in (
        (WeightFormat(8, 0, "int8"), 2, jnp.bfloat16, "activations are rounded to int8"),
        (WeightFormat(4, 128), 2, jnp.float32, "activations are float32, it multiplies bfloat16"),
        (WeightFormat(4, 128), 257, jnp.bfloat16, "257 rows, it multiplies 1 to 256; lower speculation"),
    ):
        with pytest.raises(Refused, match=why):
            multiplied(rows_of(rows, 256).astype(dtype), weight_of(128, 256, fmt), implementation)


def test_more_rows_than_a_kernel_holds():
    weight, x = weight_of(128, 256, WeightFormat(4, 128)), rows_of(70, 256)
    together = np.asarray(multiplied(x, weight, "interpret_tpu"))
    assert together.shape == (70, 128)
    assert np.array_equal(together[64:], np.asarray(multiplied(x[64:], weight, "interpret_tpu")))
    assert np.array_equal(together[:64], np.asarray(multiplied(x[:64], weight, "interpret_tpu")))


# -- whole compilations ------------------------------------------------------------------------------------

# (out, in) of projections: SmolLM2-135M, Qwen2.5-0.5B, 1.5B, 7B and Llama-3.1-8B
MATRICES = [
    (200, 896),  # the last tile overlaps the one before it
    (192, 576),
    (896, 4864),
    (576, 1536),
    (1536, 8960),
    (18_944, 3584),
    (3584, 18_944),
    (1024, 4096),
    (14_336, 4096),
]


def abstract_weight(outputs, inputs, bits):
    fmt = WeightFormat(bits, 128 if bits == 4 else 0)
    return jax.eval_shape(
        lambda matrix: rtn(matrix, fmt), jax.ShapeDtypeStruct((outputs, inputs), jnp.float32)
    )


@pytest.mark.parametrize(
    ("device", "bits", "rows"),
    [
        ("v5e", 4, 16),
        ("v5e", 8, 1),
        ("v6e", 4, 64),
        ("v6e", 8, 16),
        (HOPPER, 4, 16),
        (HOPPER, 4, 64),
        (HOPPER, 8, 1),
    ],
)
@pytest.mark.long
def test_compiles_for_real_policies(device, bits, rows):
    kernel = mosaic_gpu if device == HOPPER else mosaic_tpu
    for outputs, inputs in MATRICES if (bits, rows) == (4, 16) else MATRICES[::3]:
        x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
        text = compile_for(
            device, kernel.quantized_product, x, abstract_weight(outputs, inputs, bits)
        ).as_text()
        # Nothing but the kernel itself touches the matrix: what it is given is the matrix, seen as words. (A
        # TPU may fetch small ones ahead, and lays out those anew whose rows are not of whole lanes.)
        columns = inputs // 2 if bits == 4 else inputs
        if device == HOPPER or (columns % 128 == 0 and outputs * columns > 2**24):
            touching = [line for line in text.splitlines() if f"8[{outputs},{columns}]" in line]
            allowed = ("parameter(", "custom-call", "bitcast", "ENTRY", "HloModule")
            assert not [line for line in touching if not any(word in line for word in allowed)]


# -- in the engine -----------------------------------------------------------------------------------------

POLICY = ModelConfig("llama", 96, 128, 1, 2, 2, 64, 192)
STEPS = 3


def drafted(implementation):
    """Chains of a quantized self-drafter whose products one backend computes, and the pool's keys."""
    numerics = Numerics(True, "bfloat16", KernelChoice(quantized_product=implementation))
    buckets = Buckets((2,), (64,), (8,), STEPS)
    engine = DecodeEngine(POLICY, numerics, SamplingParams(), buckets, (), pool=stored_pool())
    params = engine.load_params(init_params(POLICY, seed=0))
    policy = QuantizedPolicy(WeightFormat(4, 64), kernels=numerics.kernels)
    weights = policy.refresh(params)
    prefix = engine.prefill(params, [[1, 2, 3], [4, 5, 6, 7]])
    state = engine.init_state(2, 32)
    state = engine.bulk_insert(prefix, state, [Assignment(i, i, request_key(0, i), 20) for i in range(2)])
    _, drafts = engine.draft(weights, state, STEPS)
    return np.asarray(drafts.tokens), np.asarray(drafts.margins), str(jax.tree.structure(weights))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_drafter_drafts_the_same_with_a_kernel(implementation):
    tokens, margins, structure = drafted("xla")
    implementation = NATIVE[jax.default_backend()] if implementation == "native" else implementation
    ours, our_margins, our_structure = drafted(implementation)
    np.testing.assert_array_equal(ours, tokens)
    np.testing.assert_allclose(our_margins, margins, atol=0.05)  # weights are not rounded to bfloat16
    assert our_structure != structure  # programs are pooled by it


def test_the_drafter_takes_the_engines_choice(monkeypatch):
    """Of who multiplies, and of who rounds the weights as the engine has them, in bfloat16."""
    asked = []

    def rounding(weight, bits, group):
        asked.append(weight.dtype)
        return base.round_to_nearest(weight, bits, group)

    monkeypatch.setattr(mosaic_gpu_rounding, "round_to_nearest", lambda *args, interpret: rounding(*args))
    kernels = KernelChoice(quantized_product=("mosaic_gpu", "xla"), round_to_nearest="interpret_gpu")
    numerics = Numerics(True, "bfloat16", kernels)
    engine = DecodeEngine(POLICY, numerics, SamplingParams(), Buckets((2,), (64,), (8,), STEPS), ())
    drafter = make_drafter("quantized", bits=4)
    drafter.attach(engine)
    drafter.refresh(engine.load_params(init_params(POLICY, seed=0)))
    layer = drafter.policy_weights.weights()["layers"][0]
    assert {layer[name].implementation for name in ("q", "down")} == {("mosaic_gpu", "xla")}
    assert asked == [jnp.bfloat16] * 14  # a program with, and one without weights whose memory it takes
    assert dataclasses.replace(layer["q"], implementation=None).shape == layer["q"].shape
