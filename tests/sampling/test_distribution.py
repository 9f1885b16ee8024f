"""Sampling: exactly the stated distribution, its transform in the stated order, its own log-probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rljax.engine.sampling import sample
from rljax.numerics.rows import Numerics
from rljax.sampling import noise
from rljax.sampling.distribution import (
    SamplingParams,
    entropy,
    first_maximum,
    penalized_logits,
    token_logprobs,
    transform_logits,
    without_padding,
)
from rljax.sampling.slots import SlotSampling

NUMERICS = Numerics()
REQUESTS, POSITIONS, VOCAB = 250, 100, 24
LOGITS = np.random.default_rng(5).normal(0, 1.7, VOCAB).astype(np.float32)
MANY = np.random.default_rng(2).normal(0, 3, (40, VOCAB)).astype(np.float32)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
]


@functools.partial(jax.jit, static_argnums=1)
def transform(logits, params):
    return transform_logits(logits, params, NUMERICS)


entropies = jax.jit(lambda transformed: entropy(transformed, NUMERICS))
logprobs_of = jax.jit(lambda transformed, tokens: token_logprobs(transformed, tokens, NUMERICS))


def describe(params):
    return f"T={params.temperature} k={params.top_k} p={params.top_p} m={params.min_p}"


def reference(logits, params):
    """The transform of one row, token by token in float64: probabilities [V]."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = [token for token in order if np.isfinite(scaled[token])]
    if params.top_k:
        threshold = scaled[kept[min(params.top_k, len(kept)) - 1]]
        kept = [token for token in kept if scaled[token] >= threshold]
    weights = {token: np.exp(scaled[token] - scaled[order[0]]) for token in kept}
    if params.top_p < 1:
        total, mass, nucleus = sum(weights.values()), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token] / total
            if mass >= params.top_p:
                break
        kept = [token for token in kept if scaled[token] >= scaled[nucleus[-1]]]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    probs = np.zeros(len(scaled))
    probs[kept] = [weights[token] for token in kept]
    return probs / probs.sum()


@functools.lru_cache
def identities():
    keys = np.stack([noise.request_key(1, 0, 0, i // 10, i % 10) for i in range(REQUESTS)])
    return np.repeat(keys, POSITIONS, axis=0), np.tile(np.arange(POSITIONS, dtype=np.int32), REQUESTS)


@functools.lru_cache
def draw(params):
    """Tokens and logprobs of LOGITS at each (request, position)."""
    keys, positions = identities()
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (len(keys), VOCAB))
    run = jax.jit(lambda *args: sample(*args, params, NUMERICS))
    tokens, logprobs = run(logits, jnp.asarray(keys), jnp.asarray(positions))
    return np.asarray(tokens), np.asarray(logprobs)


def goodness_of_fit(tokens, probs):
    """p-value of chi-square; 0 where something impossible was sampled."""
    counts = np.bincount(tokens, minlength=len(probs))
    expected = probs * len(tokens)
    if counts[probs == 0].any():
        return 0.0
    few = expected < 5
    if few.any():
        counts = np.append(counts[~few], counts[few].sum())
        expected = np.append(expected[~few], expected[few].sum())
        counts, expected = counts[expected > 0], expected[expected > 0]
    return stats.chisquare(counts, expected).pvalue


@pytest.mark.parametrize("params", PARAMS, ids=describe)
def test_samples_follow_the_softmax(params):
    tokens, _ = draw(params)
    assert goodness_of_fit(tokens, reference(LOGITS, params)) > 1e-3


@pytest.mark.parametrize("params", PARAMS, ids=describe)
def test_logprobs_are_those_of_the_distribution_sampled(params):
    tokens, logprobs = draw(params)
    with np.errstate(divide="ignore"):
        expected = np.log(reference(LOGITS, params))
    np.testing.assert_allclose(logprobs, expected[tokens], rtol=2e-6, atol=2e-6)
    transformed = transform(np.broadcast_to(LOGITS, MANY.shape), params)
    every = logprobs_of(transformed[:VOCAB], np.arange(VOCAB, dtype=np.int32))
    np.testing.assert_allclose(every, expected, rtol=2e-6, atol=2e-6)  # -inf for what is filtered out
    finite = expected[np.isfinite(expected)]
    np.testing.assert_allclose(entropies(transformed)[0], -np.sum(np.exp(finite) * finite), rtol=1e-5)


@pytest.mark.parametrize("params", PARAMS, ids=describe)
def test_transform_is_the_reference_row_by_row(params):
    transformed = np.asarray(transform(MANY, params))
    expected = np.stack([reference(row, params) for row in MANY])
    np.testing.assert_array_equal(np.isfinite(transformed), expected > 0)
    kept = expected > 0
    np.testing.assert_allclose(transformed[kept], (MANY / params.temperature)[kept], rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "params", "left"),
    [
        # The temperature comes before top-p and min-p.
        ([3, 2, 1, 0], {"top_p": 0.8}, [0, 1]),
        ([3, 2, 1, 0], {"temperature": 2.0, "top_p": 0.8}, [0, 1, 2]),
        ([3, 2, 1, 0], {"min_p": 0.2}, [0, 1]),
        ([3, 2, 1, 0], {"temperature": 2.0, "min_p": 0.2}, [0, 1, 2, 3]),
        # Top-k comes before top-p: the first has 0.73 of the two that it leaves, but 0.64 of all four.
        ([3, 2, 1, 0], {"top_k": 2, "top_p": 0.7}, [0]),
        ([3, 2, 1, 0], {"top_p": 0.7}, [0, 1]),
        # Ties stay together.
        ([2, 2, 2, 0], {"top_k": 2}, [0, 1, 2]),
        ([2, 2, 2, 0], {"top_p": 0.3}, [0, 1, 2]),
        ([1, 2, 2, 0], {"top_k": 1}, [1, 2]),
        # At least the most likely token is kept.
        ([0, 30, 1, -30], {"top_p": 1e-6}, [1]),
        ([0, 30, 1, -30], {"min_p": 1.0}, [1]),
        ([0, 30, 1, -30], {"top_k": 1}, [1]),
        ([0, 30, 1, -30], {"top_k": 4}, [0, 1, 2, 3]),
        ([0, 30, 1, -30], {"top_k": 99}, [0, 1, 2, 3]),
    ],
)
def test_what_filters_keep_by_hand(logits, params, left):
    row = transform(jnp.asarray(logits, jnp.float32)[None], SamplingParams(**params))[0]
    assert np.flatnonzero(np.isfinite(np.asarray(row))).tolist() == left


def test_greedy_takes_the_first_of_the_largest_whatever_the_noise():
    logits = np.asarray([[0.0, 2.0, 2.0, 1.0], [5.0, 4.0, 3.0, 5.0]], np.float32)
    draw = jax.jit(lambda *args: sample(*args, SamplingParams(temperature=0.0), NUMERICS))
    for seed in range(3):
        keys = np.stack([noise.request_key(seed, row) for row in range(2)])
        tokens, logprobs = draw(logits, keys, np.array([3, 9], np.int32))
        assert tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, [1, 0])
        np.testing.assert_array_equal(logprobs, [0.0, 0.0])


@pytest.mark.parametrize("params", [PARAMS[2], PARAMS[5], PARAMS[-1]], ids=describe)
def test_gradients_pass_the_filters(params):
    """Those of a softmax over what is kept, and nothing, not even NaN, for what is not."""
    probs = reference(LOGITS, params)
    token = int(np.argmax(probs))

    def logprob(logits):
        transformed = transform_logits(logits, params, NUMERICS)
        return token_logprobs(transformed, jnp.array([token], jnp.int32), NUMERICS)[0]

    gradient = jax.jit(jax.grad(logprob))(jnp.asarray(LOGITS)[None])[0]
    expected = (np.eye(VOCAB)[token] - probs) / params.temperature
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, float("nan")]),
        ("top_k", [-1]),
        ("top_p", [0.0, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0.0]),
    ],
)
def test_impossible_parameters_are_refused(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_first_maximum_is_argmax():
    x = np.random.default_rng(0).integers(0, 5, (40, 3, 17)).astype(np.float32)  # many equals
    x[0, 0] = -np.inf
    np.testing.assert_array_equal(first_maximum(jnp.asarray(x)), np.argmax(x, axis=-1))
    x[1, 1, 4] = np.nan
    assert 0 <= int(first_maximum(jnp.asarray(x))[1, 1]) < 17


@pytest.mark.parametrize("wrap", [jax.jit, lambda function, **_: function], ids=["jitted", "not"])
def test_penalties_by_hand(wrap):
    """Repetition, then frequency and presence; a token that the response does not have is left alone."""
    logits = jnp.asarray([[3.0, -1.0, 2.0, -4.0]])
    counts = jnp.asarray([[2, 1, 0, 0]], jnp.int32)
    penalized = wrap(penalized_logits, static_argnums=2)
    for params, expected in [
        (SamplingParams(repetition_penalty=2.0), [1.5, -2.0, 2.0, -4.0]),
        (SamplingParams(frequency_penalty=0.5), [2.0, -1.5, 2.0, -4.0]),
        (SamplingParams(presence_penalty=0.25), [2.75, -1.25, 2.0, -4.0]),
        (SamplingParams(1.0, 0, 1.0, 0.0, 2.0, 0.5, 1.0), [-0.5, -3.5, 2.0, -4.0]),  # all of them
        (SamplingParams(frequency_penalty=-1.0), [5.0, 0.0, 2.0, -4.0]),
    ]:
        np.testing.assert_array_equal(penalized(logits, counts, params), [expected])
    assert penalized_logits(logits, None, SamplingParams()) is logits


def test_the_frequency_penalty_is_rounded_to_exact_products():
    """0.1 has no short binary form: what is subtracted is exact for any count below 65,536."""
    counts = jnp.asarray([[1, 7, 1000, 65_535]], jnp.int32)
    taken = -penalized_logits(jnp.zeros((1, 4)), counts, SamplingParams(frequency_penalty=0.1))
    one = float(taken[0, 0])
    assert one == pytest.approx(0.1, rel=2**-8)
    assert taken[0].tolist() == [one, 7 * one, 1000 * one, 65_535 * one]


def test_rows_of_no_token_are_never_sampled():
    """Whatever their logits, and as if they were not there; with settings inside the program or by slot."""
    half, keys = 32, noise.request_key(3)[None].repeat(64, 0)
    positions = jnp.arange(2 * half, dtype=jnp.int32)
    narrow = jnp.broadcast_to(jnp.asarray(LOGITS), (2 * half, VOCAB))
    wide = jnp.concatenate([narrow, jnp.full((2 * half, 8), 9.0)], axis=1)
    assert without_padding(wide, VOCAB + 8) is wide

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drawn(logits, used_rows, params, settings=None):
        logits = without_padding(logits, used_rows)
        return sample(logits, keys, positions, params, NUMERICS, None, settings)

    mixed = [PARAMS[-1]] * half + [SamplingParams(temperature=0.0)] * half
    expected = drawn(narrow, VOCAB, PARAMS[0], SlotSampling.of(mixed, VOCAB))
    by_slot = drawn(wide, VOCAB, PARAMS[0], SlotSampling.of(mixed, VOCAB + 8))
    inside = drawn(wide, VOCAB, PARAMS[-1])
    np.testing.assert_array_equal(by_slot[0], expected[0])
    np.testing.assert_array_equal(inside[0][:half], expected[0][:half])
    np.testing.assert_allclose(by_slot[1], expected[1], atol=1e-6)
    np.testing.assert_allclose(inside[1][:half], expected[1][:half], atol=1e-6)
