"""The sampled token and its logprob: every backend against float64, and the same bits where that can be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.sampling import sample
from rljax.kernels.noisy_argmax import mosaic_gpu, mosaic_tpu, noisy_argmax, race
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from rljax.sampling import noise
from rljax.sampling.distribution import SamplingParams
from tests.kernels.compilation import HOPPER, compile_for

NUMERICS = Numerics()
NATIVE = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
BACKENDS = ["xla", "interpret_gpu", "interpret_tpu", pytest.param("native", marks=pytest.mark.accelerator)]
LARGE = (12, 9001)  # rows and vocabulary of four tests, which share a program
FILTERS = [
    SamplingParams(temperature=1.4, top_k=9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01),
]


@functools.cache
def program(implementation, params):
    name = NATIVE[jax.default_backend()] if implementation == "native" else implementation
    return jax.jit(lambda *args: noisy_argmax(*args, params, NUMERICS, name))


def computed(implementation, logits, params):
    """Tokens and logprobs of a backend."""
    args = (jnp.asarray(each) for each in (logits, *identities(len(logits))))
    tokens, logprobs = program(implementation, params)(*args)
    assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32
    return np.asarray(tokens), np.asarray(logprobs)


def identities(batch):
    """Keys and positions of as many requests."""
    keys = np.stack([noise.request_key(0, row) for row in range(batch)])
    return keys, np.arange(batch, dtype=np.int32) * 7


def normal(batch, vocab_size):
    return np.random.default_rng(0).normal(0, 2.5, (batch, vocab_size)).astype(np.float32)


def reference(logits, params):
    """(noisy [B, V], log-probabilities [B, V]) in float64; which entries are kept is decided in float32."""
    keys, positions = identities(len(logits))
    with np.errstate(over="ignore"):
        words = noise.token_bits(keys, positions, np.arange(logits.shape[1], dtype=np.uint32)[None])
    u = np.minimum((words >> 1).astype(np.float64) * 2.0**-31 + 2.0**-33, 1 - 2.0**-24)
    least = jax.jit(race.threshold, static_argnums=(1, 2))(logits, params, NUMERICS)
    x = logits.astype(np.float64) / params.temperature
    if least is not None:
        x = np.where(logits * np.float32(1 / params.temperature) >= np.asarray(least)[:, None], x, -np.inf)
    top = x.max(axis=1, keepdims=True)
    return x - np.log(-np.log1p(-u)), x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))


@pytest.mark.default_cases("xla-*", "*top_k=40*", "interpret_tpu-2-16388-*")
@pytest.mark.parametrize(
    ("batch", "vocab_size", "params"),
    [
        (1, 5, SamplingParams(0.6)),
        # Several tiles, stretches and blocks, with and without a last one that is cut short.
        *((2, size, SamplingParams()) for size in (2 * 8192 + 4, 20_011)),
        *((5, 1000, params) for params in FILTERS),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_samples_and_logprobs(implementation, batch, vocab_size, params):
    logits, rows = normal(batch, vocab_size), np.arange(batch)
    tokens, logprobs = computed(implementation, logits, params)
    noisy, every = reference(logits, params)
    # Nothing is ahead of the token by more than float32 can tell.
    np.testing.assert_array_less(noisy.max(axis=1) - noisy[rows, tokens], 1e-5)
    np.testing.assert_allclose(logprobs, every[rows, tokens], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("implementation", [BACKENDS[1], BACKENDS[-1]])
def test_blocks_that_share_a_row_do_not_change_its_bits(implementation, monkeypatch):
    logits, outputs = normal(1, 20_011), []
    for blocks in (1, 99):
        monkeypatch.setattr(mosaic_gpu, "_BLOCKS", blocks)
        program.cache_clear()
        outputs.append(computed(implementation, logits, SamplingParams()))
    program.cache_clear()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.default_cases("xla", "interpret_gpu")
@pytest.mark.parametrize("implementation", BACKENDS)
def test_the_winner_is_found_wherever_it_is(implementation):
    """First and last entry, on both sides of every boundary, against logits that alone say otherwise."""
    places = [0, 1, 127, 128, 1023, 1024, 4095, 4096, 8191, 8192, 8999, 9000]
    logits = np.full(LARGE, -40.0, np.float32)
    logits[np.arange(len(places)), places] = 10.0
    tokens, logprobs = computed(implementation, logits, SamplingParams())
    np.testing.assert_array_equal(tokens, places)
    np.testing.assert_allclose(logprobs, np.zeros(len(places)), atol=1e-6)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_large_noise_beats_a_large_logit(implementation):
    """The winner by noise alone is not passed over, however the rest of its tile looks."""
    keys, positions = identities(LARGE[0])
    every = np.asarray(jax.jit(noise.gumbel_rows, static_argnums=2)(keys, positions, LARGE[1]))
    loudest = every.argmax(axis=1)
    logits = np.zeros(LARGE, np.float32)
    tokens, _ = computed(implementation, logits, SamplingParams())
    np.testing.assert_array_equal(tokens, loudest)
    logits[:, 4000] = every.max(axis=1) - every[:, 4000] - 0.01  # just not enough
    tokens, _ = computed(implementation, logits, SamplingParams())
    np.testing.assert_array_equal(tokens, loudest)
    logits[:, 4000] += 0.02
    tokens, _ = computed(implementation, logits, SamplingParams())
    np.testing.assert_array_equal(tokens, np.full(LARGE[0], 4000))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_the_first_of_equals_wins(implementation):
    """Logits so large that the noise vanishes in them: equals in one piece, two tiles, two lanes."""
    logits = np.zeros(LARGE, np.float32)
    equals = [(700, 701), (130, 5000), (4097, 8193), (1153, 1025), (9000, 3)]
    for row, pair in enumerate(equals):
        logits[row, list(pair)] = 1e9
    tokens, logprobs = computed(implementation, logits, SamplingParams())
    np.testing.assert_array_equal(tokens[:5], [min(pair) for pair in equals])
    spacing = 64.0  # of floats at 1e9
    np.testing.assert_allclose(logprobs[:5], np.full(5, -np.log(2.0)), atol=spacing)


@pytest.mark.default_cases("xla", "interpret_gpu")
@pytest.mark.parametrize("implementation", BACKENDS)
def test_greedy_and_what_is_not_finite(implementation):
    logits = normal(4, 9001)
    logits[0, [5, 8500]] = 90.0
    logits[1, 8999] = np.nan
    logits[2] = -np.inf
    tokens, logprobs = computed(implementation, logits, SamplingParams(temperature=0.0))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_array_equal(logprobs, np.zeros(4))
    logits = normal(*LARGE)
    logits[0, 3000] = np.nan
    logits[1, [3000, 4900]] = np.inf
    logits[2] = -np.inf
    logits[3, 100:] = -np.inf
    tokens, logprobs = computed(implementation, logits, SamplingParams())
    assert np.all((tokens >= 0) & (tokens < LARGE[1]))
    np.testing.assert_array_equal(np.isnan(logprobs), np.arange(LARGE[0]) < 3)
    assert tokens[1] == 3000 and tokens[2] == 0 and tokens[3] < 100
    params = SamplingParams(top_p=0.9)  # of the row with NaN nothing is kept; all backends say the same
    (tokens, logprobs), expected = (computed(name, logits[:1], params) for name in (implementation, "xla"))
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-6)


def test_nothing_that_could_win_is_passed_over():
    rng = np.random.default_rng(0)
    count = 200_000
    words = rng.integers(0, 2**32, count, dtype=np.uint32)
    words[:8] = [0, 1, 2, 3, 2**31, 2**32 - 2, 2**32 - 1, 2**24]
    words[8:4000] >>= rng.integers(0, 31, 3992, dtype=np.uint32)  # large noise
    for scale in (1.0, 30.0, 3000.0):
        x = jnp.asarray(rng.normal(0, scale, count).astype(np.float32))
        top = x + jnp.asarray(rng.exponential(5.0, count).astype(np.float32))
        noisy = x + noise.gumbel_of_words(jnp.asarray(words))
        # Beaten by next to nothing: the hardest cases.
        best = jnp.nextafter(noisy, jnp.float32(-jnp.inf))
        leads = race.lead(jnp.asarray(words), jnp.exp2((x - top) * race.LOG2_E), race.reach(top, best))
        # What is further below the top loses to the top itself: noise lies within [-2.9, 22.9].
        could = np.asarray((noisy > best) & (x - top > -25.8))
        assert could.sum() > count / 3
        assert not np.asarray(leads > 0)[could].any()


def test_logarithm_of_a_device_without_log1p():
    """Compiled for a CPU: XLA simplifies what rounding makes exact, (1 + x) - 1 to x."""
    u = np.float32(2.0) ** -np.linspace(1e-3, 33, 20_000).astype(np.float32)
    exact = np.log1p(-u.astype(np.float64))
    np.testing.assert_allclose(jax.jit(mosaic_gpu._log1p)(jnp.asarray(-u)), exact, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [151_936, 50_257], ids=["Qwen2.5", "GPT-2, odd"])
@pytest.mark.parametrize("device", ["v5e", HOPPER])
def test_compiles_for_the_device(device, vocab_size):
    function = (mosaic_gpu if device == HOPPER else mosaic_tpu).noisy_argmax

    def run(batch, params):
        shapes = (
            jax.ShapeDtypeStruct((batch, vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((batch, 2), jnp.uint32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        )
        compiled = compile_for(device, lambda *args: function(*args, params, NUMERICS), *shapes)
        # Neither noise nor a copy of the logits; half a MiB is the device's own.
        assert compiled.memory_analysis().temp_size_in_bytes < 2**19 + batch * vocab_size * 4 / 20

    run(64, SamplingParams(temperature=0.7))
    run(*((13, SamplingParams()) if vocab_size % 2 else (4096, SamplingParams(temperature=0.0))))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is another device")
def test_the_choice_reaches_sampling():
    keys, positions = (jnp.asarray(each) for each in identities(1))
    numerics = Numerics(kernels=KernelChoice(noisy_argmax="mosaic_gpu"))
    with pytest.raises(Refused, match="noisy_argmax: mosaic_gpu: it runs on NVIDIA GPUs"):
        sample(jnp.zeros((1, 300)), keys, positions, SamplingParams(), numerics)
