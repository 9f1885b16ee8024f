"""Sampling from logits whose vocabulary is split over the devices of a mesh: no logits travel.

The functions are written over whole arrays, like those of `distribution.py`, and the compiler splits them
(GSPMD: Xu et al., arXiv 2105.04663). Over the vocabulary they only take maxima, minima and sums: every device
reduces its own entries, and then one number a row is reduced over the devices. Noise is a function of the
token's id, so every device computes the noise of its own tokens.

Only a sort would need whole rows. `kept_from` therefore finds the thresholds of top-k and top-p by bisection.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.numerics.rows import Numerics, log_normalizer, row_max
from rljax.sampling import distribution, slots
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel_rows
from rljax.sampling.slots import SlotSampling

_SIGN = np.int32(0x7FFFFFFF)


def noisy_argmax(
    logits: Array, keys: Array, positions: Array, params: SamplingParams, numerics: Numerics
) -> tuple[Array, Array]:
    """As `rljax.kernels.noisy_argmax`, without moving logits. The token of a row with NaN is 0."""
    transformed = transform_logits(logits, params, numerics)
    noisy = transformed
    if not params.greedy:
        noisy = transformed + gumbel_rows(keys, positions, logits.shape[-1])
    entries = lax.broadcasted_iota(jnp.int32, noisy.shape, 1)
    none = np.int32(noisy.shape[-1])
    tokens = jnp.min(jnp.where(noisy == row_max(noisy), entries, none), axis=-1)
    tokens = jnp.where(tokens == none, 0, tokens)
    return tokens, token_logprobs(transformed, tokens, numerics)


def token_logprobs(transformed: Array, tokens: Array, numerics: Numerics) -> Array:
    """As `distribution.token_logprobs`, for tokens [B] and logits [B, V]. A maximum reads the token's entry,
    which leaves the others where they are.
    """
    is_token = lax.broadcasted_iota(jnp.int32, transformed.shape, 1) == tokens[:, None]
    chosen = row_max(jnp.where(is_token, transformed, -jnp.inf))
    return (chosen - log_normalizer(transformed, numerics))[:, 0]


def transform_logits(logits: Array, params: SamplingParams, numerics: Numerics) -> Array:
    """As `distribution.transform_logits`, without moving logits [B, V]."""
    if params.greedy:
        logits = jnp.where(logits == logits, logits, jnp.inf)  # NaN is the largest, as for `jnp.argmax`
        entries, best = lax.broadcasted_iota(jnp.int32, logits.shape, 1), logits == row_max(logits)
        first = jnp.min(jnp.where(best, entries, logits.shape[1]), axis=1, keepdims=True)
        # Without `best`, nothing here would be split like the logits, and every device would compute it all.
        return jnp.where(best & (entries == first), 0.0, -jnp.inf)
    return distribution.transform_logits(logits, params, numerics, kept_from)


def kept_from(scaled: Array, params: SamplingParams, numerics: Numerics) -> Array:
    """As `distribution.kept_from` for scaled logits [B, V]: a threshold [B, 1] that keeps the same tokens.

    Top-k and min-p keep exactly the same tokens. Under top-p, probabilities are added in another order: a
    token may be kept by only one of both if the mass before it is within rounding of top_p.
    """
    lowest = jnp.full((scaled.shape[0], 1), -jnp.inf, scaled.dtype)
    left, levels = scaled, _levels(scaled)
    if 0 < params.top_k < scaled.shape[-1]:
        lowest = _threshold(levels, jnp.ones_like(levels), np.int32(params.top_k))
        left = jnp.where(scaled >= lowest, scaled, -jnp.inf)
    if params.top_p < 1.0:
        probs = jnp.exp(left - log_normalizer(left, numerics))
        lowest = jnp.maximum(lowest, _threshold(levels, probs, np.float32(params.top_p)))
    if params.min_p > 0.0:
        only_min_p = SamplingParams(min_p=params.min_p)
        lowest = jnp.maximum(lowest, distribution.kept_from(scaled, only_min_p, numerics))
    return lowest


def kept_from_of_slots(scaled: Array, settings: SlotSampling, numerics: Numerics) -> Array:
    """As `kept_from`, with settings that differ from row to row."""
    top_k, top_p = settings.top_k[:, None], settings.top_p[:, None]
    levels = _levels(scaled)
    lowest = jnp.where(top_k > 0, _threshold(levels, jnp.ones_like(levels), jnp.maximum(top_k, 1)), -jnp.inf)
    left = jnp.where(scaled >= lowest, scaled, -jnp.inf)
    probs = jnp.exp(left - log_normalizer(left, numerics))
    last_kept = jnp.where(top_p < np.inf, _threshold(levels, probs, top_p), -jnp.inf)
    return jnp.maximum(jnp.maximum(lowest, last_kept), slots.least_likely(scaled, settings))


def _threshold(levels: Array, weights: Array, limit: np.generic | Array) -> Array:
    """Returns the smallest float32 number above which the weights of a row add up to less than `limit`, by
    bisection over all float32 numbers: [B, 1]; infinity if there is none, in a row with NaN.

    An entry is kept if it is at least that number: if the entries above it, in descending order those before
    it, weigh less than `limit`. Equal entries are kept or dropped together.

    Args:
      levels: `_levels` of the entries, int32 [B, V].
      weights: not negative, [B, V].
      limit: more than 0, in the dtype of the weights; for all rows, or [B, 1].
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down, without overflow
        above = jnp.sum(jnp.where(levels > middle, weights, 0), axis=-1, keepdims=True)
        enough = above < limit
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    rows = (levels.shape[0], 1)
    low = jnp.full(rows, _levels(np.float32(-np.inf)) - 1, jnp.int32)
    high = jnp.full(rows, _levels(np.float32(np.inf)), jnp.int32)
    _, high = lax.fori_loop(0, 32, halve, (low, high))
    return lax.bitcast_convert_type(jnp.where(high < 0, high ^ _SIGN, high), jnp.float32)


def _levels(x: Array | np.ndarray) -> Array:
    """Maps float32 numbers to int32 numbers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ _SIGN, bits)
