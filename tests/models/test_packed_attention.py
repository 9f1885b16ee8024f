"""Attention of packed rows, held against plain softmax attention in float64."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import target
from rljax.engine.executables import row_invariant_compiler_options
from rljax.kernels.packed_attention import base, packed_attention
from rljax.models.packed_attention import PackedAttention
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.rows import Numerics
from tests.kernels.compilation import HOPPER, compile_for

HEADS = {"grouped": (6, 2, 64), "narrow": (2, 2, 32)}


def rows_of(*rows: list[int], length: int) -> np.ndarray:
    """Segment ids [N, length] of rows that hold segments of the given lengths; a negative one is a gap."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        start = 0
        for number, size in enumerate(lengths, 1):
            row[start : start + abs(size)] = number if size > 0 else 0
            start += abs(size)
    return ids


CASES = {
    "one short row": rows_of([5, 9], length=16),
    "one chunk": rows_of([100, 28, 120], [256], length=256),
    "a sequence over several chunks beside short ones": rows_of(
        [700, 40], [200, -56, 300, -212, 90], [60] * 12, length=1024
    ),
    "an uneven length": rows_of([300], [10, 290], length=300),
    "an empty row": rows_of([], [600], length=768),
}


def plain(q, k, v, segment_ids, weights):
    """[N, T, H, D] in float64 with every score at once, and the gradients of `sum(weights * outputs)`."""
    group = q.shape[2] // k.shape[2]
    q, k, v, weights = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, weights))
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    mask = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask &= np.tri(segment_ids.shape[1], dtype=bool)[None]
    scores = np.where(mask[:, None], q @ keys.swapaxes(2, 3) * scale, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = shares @ values
    d_scores = weights @ values.swapaxes(2, 3) - (weights * out).sum(-1, keepdims=True)
    d_scores *= shares * scale
    grouped = lambda x: x.reshape(*k.shape[:2], group, *k.shape[2:]).sum(2)  # noqa: E731
    d_keys, d_values = (grouped(x.swapaxes(2, 3) @ y) for x, y in ((d_scores, q), (shares, weights)))
    return out.swapaxes(1, 2), [x.swapaxes(1, 2) for x in (d_scores @ keys, d_keys, d_values)]


def random_inputs(segment_ids, heads: int, kv_heads: int, head_dim: int, dtype=jnp.float32):
    """Queries, keys, values and the weights of outputs, of which those of padding mean nothing: numbers of
    `dtype`, in float32.
    """
    rng, rows = np.random.default_rng(0), segment_ids.shape
    sizes = (heads, kv_heads, kv_heads, heads)
    drawn = [rng.standard_normal((*rows, count, head_dim), dtype=np.float32) for count in sizes]
    drawn[-1] *= (segment_ids > 0)[:, :, None, None]
    return tuple(x.astype(dtype).astype(np.float32) for x in drawn)


def with_gradients(attend):
    """(q, k, v, weights, segment ids) -> (gradients of `sum(weights * outputs)`, outputs)."""

    def loss(q, k, v, weights, segment_ids):
        out = attend(q, k, v, segment_ids)
        return jnp.sum(weights * out.astype(jnp.float32)), out

    return jax.grad(loss, (0, 1, 2), has_aux=True)


def attention(numerics=Numerics(), span=None):  # noqa: B008 (frozen)
    return lambda q, k, v, segment_ids: PackedAttention(segment_ids, numerics, span=span)(None, q, k, v)[0]


@pytest.mark.default_cases(
    "a sequence over several chunks beside short ones-grouped-True", "one short row-grouped-True"
)
@pytest.mark.parametrize(
    ("case", "heads", "row_invariant"),
    [
        *((case, heads, True) for case, heads in zip(CASES, ["grouped", "narrow"] * 3, strict=False)),
        ("a sequence over several chunks beside short ones", "narrow", False),
    ],
)
def test_outputs_and_gradients_are_those_of_plain_attention(case, heads, row_invariant):
    segment_ids = CASES[case]
    q, k, v, weights = random_inputs(segment_ids, *HEADS[heads])
    ours = jax.jit(with_gradients(attention(Numerics(row_invariant))))
    gradients, out = ours(q, k, v, weights, segment_ids)
    exact_out, exact_gradients = plain(q, k, v, segment_ids, weights)
    real = segment_ids > 0
    np.testing.assert_allclose(np.asarray(out)[real], exact_out[real], rtol=1e-5, atol=1e-5)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-4, atol=1e-4)


def test_the_backward_pass_keeps_nothing_of_the_size_of_the_scores():
    """Temporaries grow with the length of a row, not with its square."""

    def temporaries(length: int) -> int:
        segment_ids = rows_of([length], length=length)
        inputs = random_inputs(segment_ids, 2, 1, 64)
        compiled = jax.jit(with_gradients(attention())).lower(*inputs, segment_ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.2 * temporaries(1024)


@pytest.mark.parametrize(
    ("platform", "case"),
    [
        ("tpu", "a sequence over several chunks beside short ones"),
        ("gpu", "one chunk"),
    ],
)
def test_an_accelerator_multiplies_bfloat16_as_its_kernels_do(case, platform):
    """Every product takes bfloat16 as it is, gradients included; only the shares are rounded."""
    segment_ids = CASES[case]
    q, k, v, weights = random_inputs(segment_ids, 4, 2, 128, jnp.bfloat16)
    gradient = with_gradients(attention(Numerics(compute_dtype="bfloat16")))
    arguments = *(x.astype(jnp.bfloat16) for x in (q, k, v)), weights, segment_ids
    with target.tracing_for(jax.devices()[0], 1, platform):
        lines = str(jax.make_jaxpr(gradient)(*arguments)).splitlines()
        products = [line for line in lines if "dot_general" in line]
        gradients, out = jax.jit(gradient)(*arguments)
    assert products and not any("HIGHEST" in line for line in products) and out.dtype == jnp.bfloat16
    expected_out, expected = plain(q, k, v, segment_ids, weights)
    real = segment_ids > 0
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], expected_out[real], rtol=0.02, atol=0.02)
    for its, other in zip(gradients, expected, strict=True):
        error = np.abs(np.asarray(its, np.float32) - other)
        assert error.max() < 0.03 * np.abs(other).max() and error.mean() < 0.01 * np.abs(other).mean()


def test_rows_one_after_another_have_the_bits_of_all_at_once(monkeypatch):
    segment_ids = CASES["a sequence over several chunks beside short ones"]
    arguments = *random_inputs(segment_ids, 6, 2, 64), segment_ids
    shapes, attend = [], base._attend

    def seen(queries, *rest):
        shapes.append(queries.shape[:2])
        return attend(queries, *rest)

    monkeypatch.setattr(base, "_attend", seen)

    def gradients(one_cpu):
        monkeypatch.setattr(base, "_is_one_cpu", lambda: one_cpu)
        program = jax.jit(with_gradients(attention()), compiler_options=row_invariant_compiler_options())
        return program(*arguments)

    joined, at_once = gradients(True), gradients(False)
    rows, chunks = len(segment_ids), -(-segment_ids.shape[1] // 256)
    assert shapes == [(rows * chunks, 1), (chunks, rows)]
    real = segment_ids > 0
    np.testing.assert_array_equal(joined[1][real], at_once[1][real])
    for one, other in zip(joined[0], at_once[0], strict=True):
        np.testing.assert_allclose(one[real], other[real], rtol=1e-5, atol=1e-5)


def test_windows_on_an_accelerator_have_the_bits_of_the_loops_on_a_cpu(monkeypatch):
    """Keys of other sequences, and zeros before a row, add exact zeros, however wide the windows are. The
    number of turns of every loop is known, in the backward pass, too.
    """
    segment_ids = rows_of([1100, 180], [300, -212, 256, 60, 400], length=1280)
    q, k, v, weights = random_inputs(segment_ids, 4, 2, 64)
    real = segment_ids > 0
    monkeypatch.setattr(base, "_is_one_cpu", lambda: False)

    def outputs(span):
        gradients = jax.make_jaxpr(with_gradients(attention(span=span)))
        loops = str(gradients(q, k, v, weights, segment_ids)).count("while[")
        program = jax.jit(attention(span=span), compiler_options=row_invariant_compiler_options())
        return loops, np.asarray(program(q, k, v, segment_ids))[real]

    loops, expected = outputs(None)
    assert loops == 4  # two in the forward pass, and two of the backward pass, one in the other
    with target.tracing_for(jax.devices()[0], 1, "gpu"):
        for span in (5, None):
            loops, found = outputs(span)
            assert loops == 0
            np.testing.assert_array_equal(found, expected)
        assert np.any(outputs(4)[1] != expected)  # the first sequence lies in five chunks


@pytest.mark.parametrize("implementation", ["interpret_triton", "interpret_tpu"])
def test_flash_attention_is_plain_attention_up_to_rounding(implementation):
    segment_ids = rows_of([150, 40], [90, -30, 70], length=200)
    q, k, v, weights = random_inputs(segment_ids, 4, 2, 64, jnp.bfloat16)
    numerics = Numerics(False, "bfloat16")
    attend = functools.partial(packed_attention, numerics=numerics, implementation=implementation)
    arguments = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    gradients, out = jax.jit(with_gradients(attend))(*arguments, weights, segment_ids)
    expected_out, expected = plain(q, k, v, segment_ids, weights)
    real = segment_ids > 0
    for ours, other in zip([out[real], *gradients], [expected_out[real], *expected], strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float32) - other) / np.linalg.norm(other)
        assert error < 2**-7, error
    with pytest.raises(Refused, match="share_prompts=off"):
        packed_attention(*arguments, segment_ids, numerics, None, None, segment_ids, implementation)
    with pytest.raises(Refused, match="heads of 64 or 128, not float32"):
        packed_attention(q, k, v, segment_ids, numerics, implementation=implementation)


@pytest.mark.parametrize(
    ("device", "name", "heads"),
    [
        (HOPPER, "triton", (9, 3, 64)),
        ("v5e", "mosaic_tpu", (9, 3, 64)),
        pytest.param(HOPPER, "triton", (16, 8, 128), marks=pytest.mark.long),
        pytest.param("v5e", "mosaic_tpu", (16, 8, 128), marks=pytest.mark.long),
    ],
)
def test_flash_attention_compiles_without_the_device(device, name, heads):
    num_heads, kv_heads, head_dim = heads
    q, k, v = (
        jax.ShapeDtypeStruct((2, 1024, count, head_dim), jnp.bfloat16)
        for count in (num_heads, kv_heads, kv_heads)
    )
    module = importlib.import_module(f"rljax.kernels.packed_attention.{name}")
    attend = functools.partial(module.packed_attention, numerics=Numerics(False, "bfloat16"))
    weights, ids = jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    compiled = compile_for(device, with_gradients(attend), q, k, v, weights, ids)
    assert "while(" not in compiled.as_text()
