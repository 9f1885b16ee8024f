"""Log-probabilities without logits: values and gradients of every backend against float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax import target
from rljax.kernels.token_logprobs import mosaic_gpu, mosaic_tpu, passes, token_logprobs
from rljax.kernels.token_logprobs.base import chunk_tokens
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.training.scoring import score_packed
from tests.engines import scaled_params
from tests.kernels.compilation import HOPPER, compile_for
from tests.kernels.test_gated_product import SLOW

NUMERICS = Numerics(compute_dtype="bfloat16")
NATIVE = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
ON_THE_DEVICE = pytest.param("native", marks=pytest.mark.accelerator)
KERNELS = [pytest.param("interpret_gpu", marks=SLOW), "interpret_tpu"]
BACKENDS = ["xla", *KERNELS, ON_THE_DEVICE]
SMALL = (1, 6), 300  # tokens and vocabulary of three tests, which share a program


def arguments(shape, vocab_size, width=128, seed=0, scale=0.3, dtype=jnp.float32):
    """hidden [R, T, d], lm_head [V, d], targets [R, T], and the gradient that comes back to the logprobs."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(0, 1, (*shape, width)), jnp.bfloat16)
    lm_head = jnp.asarray(rng.normal(0, scale, (vocab_size, width)), dtype)
    targets = rng.integers(0, vocab_size, shape).astype(np.int32)
    targets.flat[:2] = 0, vocab_size - 1
    return hidden, lm_head, jnp.asarray(targets), jnp.asarray(rng.normal(0, 1, shape), jnp.float32)


def named(implementation):
    return NATIVE[jax.default_backend()] if implementation == "native" else implementation


@functools.cache
def program(implementation, sampling, used_rows):
    """Outputs and gradients of a loss; tests that patch a backend have shapes of their own."""

    def loss(hidden, lm_head, targets, gradient):
        others = {"implementation": named(implementation), "used_rows": used_rows}
        outputs = token_logprobs(hidden, lm_head, targets, sampling, NUMERICS, 64, **others)
        # The entropy carries no gradient, so that this adds nothing.
        return jnp.sum(outputs[0] * gradient) + jnp.sum(outputs[1]), outputs

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def computed(implementation, hidden, lm_head, targets, gradient, sampling=None, used_rows=None):
    """(logprobs, entropies, d hidden, d lm_head)."""
    run = program(implementation, sampling or SamplingParams(), used_rows)
    (_, outputs), gradients = run(hidden, lm_head, targets, gradient)
    assert all(each.dtype == jnp.float32 and each.shape == targets.shape for each in outputs)
    assert gradients[0].dtype == hidden.dtype and gradients[1].dtype == lm_head.dtype
    return tuple(np.asarray(each, np.float64) for each in (*outputs, *gradients))


def expected(hidden, lm_head, targets, gradient, temperature=1.0):
    """The same in float64, from what the products get: values in bfloat16."""
    h = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1])
    w = np.asarray(lm_head.astype(jnp.bfloat16), np.float64)
    target_ids, g = np.asarray(targets).ravel(), np.asarray(gradient, np.float64).ravel()
    x = h @ w.T / temperature
    x -= x.max(axis=1, keepdims=True)
    every = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    p = np.exp(every)
    errors = (np.eye(len(w))[target_ids] - p) * g[:, None] / temperature
    logprobs, entropies = every[np.arange(len(h)), target_ids], -np.sum(p * every, axis=1)
    shaped = [each.reshape(targets.shape) for each in (logprobs, entropies)]
    return *shaped, (errors @ w).reshape(hidden.shape), errors.T @ h


def assert_close(actual, reference):
    for values, right in zip(actual[:2], reference[:2], strict=True):
        np.testing.assert_allclose(values, right, rtol=1e-5, atol=2e-5)
    for values, right in zip(actual[2:], reference[2:], strict=True):
        # Errors are rounded to bfloat16 on their way into the products, and d hidden on its way out.
        assert np.linalg.norm(values - right) < 5e-3 * np.linalg.norm(right)


def padded(lm_head, rows):
    """The LM head with rows that stand for no token, whose logits would be the largest."""
    return jnp.concatenate([lm_head, jnp.full((rows, lm_head.shape[1]), 9.0, lm_head.dtype)])


@pytest.mark.parametrize(
    ("shape", "vocab_size", "padding", "temperature", "width", "dtype"),
    [
        ((1, 2), 300, 0, 1.0, 576, "float32"),
        ((2, 30), 400, 112, 0.7, 128, "float32"),
        ((1, 40), 300, 0, 1.0, 128, "bfloat16"),
    ],
    ids=["1x2 of 300", "2x30 of 400 in 512 rows", "an LM head in bfloat16"],
)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_values_and_gradients(implementation, shape, vocab_size, padding, temperature, width, dtype):
    hidden, lm_head, *others = arguments(shape, vocab_size, width, dtype=dtype)
    args = (hidden, padded(lm_head, padding), *others)
    found = computed(implementation, *args, SamplingParams(temperature), vocab_size)
    *values, d_head = expected(hidden, lm_head, *others, temperature)
    assert_close(found, (*values, np.pad(d_head, ((0, padding), (0, 0)))))
    assert not found[-1][vocab_size:].any()


@pytest.mark.parametrize("implementation", ["interpret_gpu", ON_THE_DEVICE])
def test_blocks_that_take_several_tiles(implementation, monkeypatch):
    """Two by two tiles, one after the other: loads of the next begin while one is finished, and its ten steps
    leave the ring of three or four somewhere in the middle.
    """
    monkeypatch.setattr(mosaic_gpu, "_BLOCKS", 1)
    args = arguments((1, 300), 129, width=640, scale=0.1)
    assert_close(computed(implementation, *args, SamplingParams(1.6)), expected(*args, 1.6))


def test_memory_is_given_back_only_when_its_products_are_done(monkeypatch):
    """No interpreter tells, as they multiply at once. A pipeline that gives memory back a step later never
    does so for its last step, and the next pipeline does not wait for it.
    """
    emit, specs = plgpu.emit_pipeline_warp_specialized, []

    def noted(*args, in_specs, **kwargs):
        specs.extend(in_specs)
        return emit(*args, in_specs=in_specs, **kwargs)

    monkeypatch.setattr(plgpu, "emit_pipeline_warp_specialized", noted)
    hidden, lm_head, targets, _ = arguments((1, 40), 300)

    def loss(hidden, lm_head):
        args = (hidden, lm_head, targets, SamplingParams(), NUMERICS, 64, None)
        return jnp.sum(mosaic_gpu.token_logprobs(*args)[0])

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, lm_head)
    assert re.findall(r"wgmma_wait\D*(\d+)", str(program)) == ["0", "0"]  # forward and backward
    assert specs and all(spec.delay_release == 0 for spec in specs)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_several_chunks_of_the_vocabulary(implementation, monkeypatch):
    """Whole chunks, and a last one that is shorter and no multiple of a tile."""
    monkeypatch.setattr(passes, "_CHUNK_ENTRIES", 1)
    monkeypatch.setattr(passes, "_CHUNK_STEP", 256)
    args = arguments((1, 7), 2 * 256 + 77)
    assert_close(computed(implementation, *args), expected(*args))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_policy_that_is_sure(implementation):
    """Logits in the hundreds: sums of exponentials neither overflow nor vanish."""
    args = arguments(*SMALL, scale=12.0)
    actual, right = computed(implementation, *args), expected(*args)
    assert right[0].min() < -200
    np.testing.assert_allclose(actual[0], right[0], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(actual[1], right[1], atol=1e-3)
    assert all(np.isfinite(each).all() for each in actual)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_logits_that_are_all_low(implementation):
    """What fills up the last tile, whose logits would be 0, has no part in the sums or the gradients."""
    hidden, lm_head, targets, gradient = arguments(*SMALL, scale=0.1)
    args = jnp.abs(hidden) + 1, lm_head - 1, targets, gradient
    actual, right = computed(implementation, *args), expected(*args)
    # What the entries have in common cancels in d hidden, but not what rounding the errors leaves of it.
    for values, reference, tolerance in zip(actual, right, (1e-6, 1e-6, 2e-2, 5e-3), strict=True):
        assert np.linalg.norm(values - reference) < tolerance * np.linalg.norm(reference)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_token_with_nan_spoils_no_other(implementation):
    hidden, lm_head, targets, gradient = arguments(*SMALL)
    right = expected(hidden, lm_head, targets, gradient)
    actual = computed(implementation, hidden.at[0, 3].set(jnp.nan), lm_head, targets, gradient)
    others = np.arange(6) != 3
    assert np.isnan(actual[0][0, 3])
    for values, reference in zip(actual[:2], right[:2], strict=True):
        np.testing.assert_allclose(values[0, others], reference[0, others], atol=2e-5)
    difference = actual[2][0, others] - right[2][0, others]
    assert np.linalg.norm(difference) < 5e-3 * np.linalg.norm(right[2])


@pytest.mark.parametrize("implementation", KERNELS)
def test_what_is_refused(implementation):
    args = arguments((1, 4), 300)
    for sampling in (SamplingParams(0.0), SamplingParams(top_k=5), SamplingParams(top_p=0.9)):
        with pytest.raises(Refused, match="neither top-k, top-p, min-p nor penalties"):
            computed(implementation, *args, sampling)
    with pytest.raises(Refused, match="it multiplies bfloat16, not float32"):
        computed(implementation, args[0].astype(jnp.float32), *args[1:])
    with pytest.raises(Refused, match="a multiple of 64, not 96"):
        computed(implementation, args[0][..., :96], args[1][:, :96], *args[2:])


CONFIG = ModelConfig("qwen3", 301, 128, 1, 2, 1, 64, 128, tie_embeddings=True, qk_norm=True)


@functools.lru_cache
def scored(implementation):
    """Logprobs of packed responses and the gradient of their sum, as training computes them."""
    rng = np.random.default_rng(0)
    lengths = [30, 25, 20]
    tokens = lambda count: rng.integers(0, 301, count)  # noqa: E731
    sequences = [TrainingSequence(tokens(3), tokens(length - 3), None, 0.0, 1.0) for length in lengths]
    packing = pack_sequences(lengths, 64)
    batch = build_batch(sequences, packing, range(packing.num_rows))
    numerics = Numerics(compute_dtype="bfloat16", kernels=KernelChoice(token_logprobs=named(implementation)))
    rope = jnp.asarray(rope_table(CONFIG, 64))

    def loss(params):
        logprobs, entropies = score_packed(
            params, CONFIG, batch, rope, numerics, SamplingParams(0.9), logprob_chunk=32
        )
        logprobs = jnp.where(batch.response_mask, logprobs, 0.0)
        return jnp.sum(logprobs), (logprobs, jnp.where(batch.response_mask, entropies, 0.0))

    params = scaled_params(CONFIG, 3, 3)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize("implementation", BACKENDS[1:])
def test_training_scores_the_same(implementation):
    (_, outputs), gradients = scored(implementation)
    (_, right), right_gradients = scored("xla")
    for values, reference in zip(outputs, right, strict=True):
        np.testing.assert_allclose(values, reference, atol=1e-4)
    for values, reference in zip(jax.tree.leaves(gradients), jax.tree.leaves(right_gradients), strict=True):
        values, reference = np.asarray(values, np.float64), np.asarray(reference, np.float64)
        # The layers' backward pass, in bfloat16 as well, magnifies what the last product rounds.
        assert np.linalg.norm(values - reference) < 3e-2 * np.linalg.norm(reference)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is another device")
def test_the_choice_reaches_training():
    with pytest.raises(Refused, match="token_logprobs: mosaic_tpu: it runs on TPUs"):
        scored("mosaic_tpu")


# Rows and width of LM heads: SmolLM2-135M, Qwen2.5-0.5B, Qwen2.5-7B, Llama-3.1-8B and GPT-2, which is odd
SMOL, SMALLEST, LARGE, WIDEST, ODD = (
    (49_152, 576),
    (151_936, 896),
    (152_064, 3584),
    (128_256, 4096),
    (50_257, 768),
)
WITH_GRADIENT = {"v5e": [WIDEST], "v6e": [SMALLEST], HOPPER: [SMALLEST]}
SIZES = [
    *((SMOL, device) for device in ("v5e", HOPPER)),
    ((50_304, 576), HOPPER),  # the last chunk is not whole: there XLA would cast all of the LM head
    *(
        pytest.param(*each, marks=pytest.mark.long)
        for each in [(WIDEST, "v5e"), (ODD, "v6e"), (SMALLEST, "v6e"), (SMALLEST, HOPPER), (LARGE, HOPPER)]
    ),
]


@pytest.mark.parametrize(("size", "device"), SIZES)
def test_compiles_for_the_device(device, size):
    """Forward and backward; scored in memory that depends neither on the vocabulary nor on the tokens."""
    (vocab_size, width), tokens = size, 2048
    function = (mosaic_gpu if device == HOPPER else mosaic_tpu).token_logprobs

    def loss(hidden, lm_head, targets):
        logprobs, entropies = function(hidden, lm_head, targets, SamplingParams(0.8), NUMERICS, 1024, None)
        return jnp.sum(logprobs), entropies

    shapes = (
        jax.ShapeDtypeStruct((2, tokens // 2, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocab_size, width), jnp.float32),
        jax.ShapeDtypeStruct((2, tokens // 2), jnp.int32),
    )
    if size in WITH_GRADIENT[device]:  # which has a forward pass, too
        compile_for(device, jax.value_and_grad(loss, (0, 1), has_aux=True), *shapes)
        return
    scoring = compile_for(device, lambda *args: loss(*args)[0], *shapes)
    # A chunk of the LM head in bfloat16, and statistics: 2048 tokens' logits of that chunk would take 64 MiB.
    most = 2 * passes._LARGEST_CHUNK * width + 2**24
    assert scoring.memory_analysis().temp_size_in_bytes < most


def test_a_chunk_fits_the_vocabulary_on_a_cpu():
    for vocab_size, tokens in ((320, 1024), (49_152, 256), (151_936, 64), (2**30, 2)):
        assert chunk_tokens(None, vocab_size) == tokens
        assert chunk_tokens(1000, vocab_size) == 1000
    with target.tracing_for(None, 1, "gpu"):
        assert chunk_tokens(None, 151_936) == 1024
