"""Rounding to nearest by every backend: the bits of the reference, and the reference's own are NumPy's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.quantized import WeightFormat, clipped
from rljax.kernels.round_to_nearest import base, mosaic_gpu, mosaic_tpu, round_to_nearest
from rljax.numerics.kernel_choice import Refused
from tests.kernels.compilation import HOPPER, compile_for

KERNELS = {"interpret_gpu": mosaic_gpu, "interpret_tpu": mosaic_tpu}
NATIVE = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}

# outputs, inputs, bits, group, type
CASES = {
    "w4": (72, 512, 4, 128, "bfloat16"),
    "w4, groups of 64": (64, 192, 4, 64, "bfloat16"),
    "w4, halves within groups": (64, 384, 4, 128, "float32"),
    "w4, half a group at the end": (64, 576, 4, 128, "bfloat16"),
    "w8, half a group at the end": (64, 192, 8, 128, "float32"),
    "w4, wide groups, the last one short": (40, 640, 4, 256, "bfloat16"),
    "w4, odd inputs": (37, 255, 4, 128, "float32"),
    "w4, whole rows": (33, 257, 4, 0, "float32"),
    "w8, whole rows": (300, 300, 8, 0, "bfloat16"),
}
REFUSED = {  # what a kernel leaves to others
    ("w4, groups of 64", "interpret_tpu"): "groups are multiples of 128 or the whole row, not 64 of 192",
    ("w4, wide groups, the last one short", "interpret_gpu"): "640 inputs in groups of 256: it takes mult",
    ("w4, odd inputs", "interpret_gpu"): "255 inputs in groups of 128: it takes multiples of 64 inputs",
    ("w4, whole rows", "interpret_gpu"): "257 inputs in groups of a whole row",
    ("w8, whole rows", "interpret_gpu"): "300 inputs in groups of a whole row",
}


def matrix(outputs, inputs, dtype, seed=0):
    """Rows with other offsets and spreads; of zeros, of one number, without negative ones; with what is not a
    number, or infinite; of numbers that are nearly 0; with a range that is beyond float32.
    """
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((outputs, inputs)) * rng.uniform(0.1, 4, (outputs, 1))
    weight += rng.uniform(-0.5, 0.5, (outputs, 1))
    weight[0], weight[1], weight[2] = 0, 0.3, np.abs(weight[2])
    weight[3, -1], weight[4, 5], weight[5, -2] = np.nan, np.inf, -np.inf
    weight[6], weight[7, :2] = 1e-39, (-3e38, 3e38)
    weight[-1, 0] = np.nan
    return jnp.asarray(weight, dtype)


@functools.cache
def rounded(case, implementation):
    outputs, inputs, bits, group, dtype = CASES[case]
    program = jax.jit(lambda weight: round_to_nearest(weight, bits, group, implementation))
    return [None if part is None else np.asarray(part) for part in program(matrix(outputs, inputs, dtype))]


def by_numpy(weight, bits, group):
    """A group at a time, in float32: integers [out, in], scale and zero [out, G]."""
    weight, size = np.asarray(weight, np.float32), group or weight.shape[1]
    firsts = range(0, weight.shape[1], size)
    values = np.zeros(weight.shape, np.int32)
    scale, zero = (np.zeros((len(weight), len(firsts)), np.float32) for _ in range(2))
    for g, first in enumerate(firsts):
        for row, x in enumerate(weight[:, first : first + size]):
            if not np.isfinite(x).all():
                scale[row, g] = np.inf
                continue
            low, high = np.minimum(x.min(), np.float32(0)), np.maximum(x.max(), np.float32(0))
            span = (max(-low, high), 127) if bits == 8 else (high - low, 15)
            step = span[0] * np.float32(1 / span[1])
            step = np.float32(1) if step < np.finfo(np.float32).tiny else step
            inverse = np.float32(1) / step
            offset = np.float32(0) if bits == 8 else np.round(-low * inverse)
            limits = (-127, 127) if bits == 8 else (0, 15)
            values[row, first : first + size] = np.clip(np.round(x * inverse) + offset, *limits)
            scale[row, g], zero[row, g] = step, offset
    return values, scale, zero


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_numpys(case):
    outputs, inputs, bits, group, dtype = CASES[case]
    ours, our_scale, our_zero = rounded(case, "xla")
    with np.errstate(over="ignore"):
        values, scale, zero = by_numpy(matrix(outputs, inputs, dtype), bits, group)
    half = -(-inputs // 2)
    if bits == 4:
        high = np.pad(values[:, half:], ((0, 0), (0, inputs % 2)))
        values = values[:, :half] | high << 4
        np.testing.assert_array_equal(our_zero, zero)
    np.testing.assert_array_equal(ours, values)
    np.testing.assert_array_equal(our_scale, scale)
    assert ours.dtype == (np.uint8 if bits == 4 else np.int8) and our_scale.dtype == np.float32
    assert our_zero is None if bits == 8 else our_zero.dtype == np.uint8


@pytest.mark.default_cases("*-w4, half a group at the end", "*-w8, whole rows")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_kernel_has_the_bits_of_the_reference(case, implementation):
    if why := REFUSED.get((case, implementation)):
        with pytest.raises(Refused, match=f"round_to_nearest: {implementation}: {why}"):
            rounded(case, implementation)
        return
    for ours, reference in zip(rounded(case, implementation), rounded(case, "xla"), strict=True):
        np.testing.assert_array_equal(ours, reference)
        assert ours is None or ours.dtype == reference.dtype


def test_many_blocks_of_rows(monkeypatch):
    """More than fit memory at once, and a last one that is not full."""
    monkeypatch.setattr(mosaic_tpu, "_BLOCK_BYTES", 64 * 256 * 4)
    weight = matrix(150, 256, "float32")
    for ours, reference in zip(
        jax.jit(lambda weight: mosaic_tpu.round_to_nearest(weight, 4, 128, interpret=True))(weight),
        jax.jit(lambda weight: base.round_to_nearest(weight, 4, 128))(weight),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, reference)


def test_what_kernels_refuse():
    def shape(outputs, inputs, dtype="bfloat16"):
        return jax.ShapeDtypeStruct((outputs, inputs), dtype)

    for name in KERNELS:
        with pytest.raises(Refused, match=f"{name}: weights are float32 or bfloat16, not float16"):
            round_to_nearest(shape(64, 128, "float16"), 4, 128, name)
    for outputs in (56, 68):
        with pytest.raises(Refused, match=f"{outputs} outputs, it needs a multiple of 8, and at least 64"):
            round_to_nearest(shape(outputs, 128), 4, 128, "interpret_gpu")
    with pytest.raises(
        Refused, match=r"interpret_gpu: .*; interpret_tpu: rows of 99968 inputs in 781 groups"
    ):
        round_to_nearest(shape(68, 99_968), 4, 128, ("interpret_gpu", "interpret_tpu"))
    with pytest.raises(Refused, match=r"kernels\.round_to_nearest: mosaic_tpu only rounds .* is clipped"):
        clipped(shape(64, 128), WeightFormat(4, 128), "mosaic_tpu")


# (out, in) of projections: SmolLM2-135M (whose last group of 576 is a half), Qwen2.5-0.5B (whose halves of
# 896 are within groups), 1.5B, 7B and Llama-3.1-8B
MATRICES = [(192, 576), (200, 896), (1536, 8960), (18_944, 3584), (3584, 18_944), (14_336, 4096)]


@pytest.mark.parametrize(
    ("device", "bits", "group"),
    [("v5e", 4, 128), (HOPPER, 4, 128), pytest.param("v6e", 8, 0, marks=pytest.mark.long)],
)
def test_compiles_for_real_policies(device, bits, group):
    """And nothing but the kernel itself touches the matrix, which so is read once."""
    shapes = [MATRICES[0], *MATRICES[1::3]]
    kernel = mosaic_gpu if device == HOPPER else mosaic_tpu
    for outputs, inputs in shapes:
        weight = jax.ShapeDtypeStruct((outputs, inputs), jnp.bfloat16)
        program = compile_for(device, lambda weight: kernel.round_to_nearest(weight, bits, group), weight)
        if device == HOPPER and inputs % group:
            continue  # the last group is filled up in a copy
        touching = [line for line in program.as_text().splitlines() if f"bf16[{outputs},{inputs}]" in line]
        allowed = ("parameter(", "custom-call", "ENTRY", "HloModule")
        assert touching and not [line for line in touching if not any(word in line for word in allowed)]
        assert program.memory_analysis().temp_size_in_bytes < outputs * inputs / 10


@pytest.mark.accelerator
@pytest.mark.parametrize("case", [*CASES, "Qwen2.5-7B, down"])
def test_natively(case, monkeypatch):
    """Two compilers may round 1 / scale differently, and so an integer that lies half-way."""
    monkeypatch.setitem(CASES, "Qwen2.5-7B, down", (3584, 18_944, 4, 128, "bfloat16"))
    name = NATIVE[jax.default_backend()]
    try:
        ours = rounded(case, name)
    except Refused:
        assert (case, name.replace("mosaic", "interpret")) in REFUSED
        return
    reference = rounded(case, "xla")
    np.testing.assert_array_equal(ours[1], reference[1])
    for part, other in zip(ours[::2], reference[::2], strict=True):
        if part is not None:
            assert np.mean(part != other) < 1e-3
            parts = [(15, 0), (15, 4)] if part.dtype == np.uint8 else [(-1, 0)]
            for mask, shift in parts:
                steps = ((np.int32(part) >> shift) & mask) - ((np.int32(other) >> shift) & mask)
                assert np.abs(steps).max() <= 1
