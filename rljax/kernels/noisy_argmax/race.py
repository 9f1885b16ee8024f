"""Shared by the kernels: bounds that rule entries out (Hopper), and the merge of partial results.

Noise takes two accurate logarithms an entry, for which a GPU has no time while it reads the logits. But
hardly any entry comes near winning, and that can be told from the words of the noise alone. An entry's noise
is -log E with E = -log(1 - u) at least u, so

    x + G > best    only if    u < e^(x - best),

and e^(x - top) is there already, for the sum of exponentials. So words are compared with exponentials, and
noise is made only for blocks of entries of which one may win: after the first few, next to none. (The Gumbel
argmax as a race of exponential clocks, of which the first to ring wins: Maddison, Tarlow and Minka,
"A* Sampling", 2014.)
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.numerics.rows import Numerics, row_sum
from rljax.sampling.distribution import SamplingParams, kept_from, scaled_logits

LOG2_E = float(np.log2(np.e))
_STEPS = float(2**31)
_LARGE = 3e38  # instead of infinity, which times an exponential of 0 is NaN


def scaled(logits: Array, sampling: SamplingParams) -> Array:
    """The entries `x` but for the filters; at temperature 0 the logits, NaN being the largest."""
    if sampling.greedy:
        return jnp.where(logits == logits, logits, jnp.inf)
    return scaled_logits(logits, sampling)


def threshold(logits: Array, sampling: SamplingParams, numerics: Numerics) -> Array | None:
    """Returns the smallest scaled logit that the filters keep, float32 [B]; None without filters."""
    if sampling.greedy or not sampling.filters(logits.shape[-1]):
        return None
    return kept_from(scaled_logits(logits, sampling), sampling, numerics)[:, 0]


def reach(top: Array, best: Array) -> Array:
    """Bounds the noise of words, elementwise: with noise, `x` exceeds `best` only if `lead` is not above 0.

    This holds for `x` down to 25.8 below `top`. What is further below may be passed over, as it loses to the
    top itself: noise lies within [-2.9, 22.9].

    Args:
      top: what is taken off the entries' `x` under the exponential: the largest `x` of the tile, or more.
      best: largest noisy entry so far.
    """
    # The margin covers the rounding of sums and exponentials, many times over.
    margin = 0.01 + 1e-6 * (jnp.abs(top) + jnp.abs(best))
    return jnp.minimum(jnp.exp2((top - best + margin) * LOG2_E), _LARGE / _STEPS) * _STEPS


def lead(words: Array, exponentials: Array, reach: Array) -> Array:
    """Above 0 where an entry cannot win; float32, elementwise.

    Args:
      words: words of the noise field, uint32.
      exponentials: e^(x - top).
      reach: of the same `top`.
    """
    return (words >> np.uint32(1)).astype(jnp.int32).astype(jnp.float32) - exponentials * reach


def finite_or_zero(top: Array) -> Array:
    """Returns the value to subtract from entries whose largest is `top`; 0 if none is left."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def merge(
    best: Array, tokens: Array, chosen: Array, tops: Array, sums: Array, vocab_size: int, numerics: Numerics
) -> tuple[Array, Array]:
    """Tokens and logprobs, each [B], from partial results.

    Args:
      best: largest noisy entry of each part of the vocabulary, float32 [B, S].
      tokens: the first to have it, int32 [B, S].
      chosen: its `x`, float32 [B, S].
      tops, sums: of parts, not necessarily the same, largest `x` and sum of e^(x - top), float32 [B, T].
      vocab_size: V.
      numerics: numerics of sums.
    """
    ahead = best == jnp.max(best, axis=1, keepdims=True)
    token = jnp.min(jnp.where(ahead, tokens, vocab_size - 1), axis=1)
    chosen = jnp.max(jnp.where(ahead & (tokens == token[:, None]), chosen, -jnp.inf), axis=1)
    top = jnp.max(tops, axis=1, keepdims=True)
    total = row_sum(sums * jnp.exp(tops - finite_or_zero(top)), numerics)
    top, total = top[:, 0], total[:, 0]
    undefined = jnp.isnan(total) & (top != jnp.inf)
    return jnp.where(undefined, vocab_size - 1, token), chosen - (top + jnp.log(total))
