"""Shared by the kernels: bounds that exclude entries (Hopper), and the merge of partial results.

Noise takes two accurate logarithms per entry, which would take a GPU longer than reading the logits. But few
entries can win, and the words of the noise suffice to exclude the others. An entry's noise is -log E with E =
-log(1 - u) at least u, so

    x + G > best    only if    u < e^(x - best),

and e^(x - top) is already computed for the sum of exponentials. So words are compared with exponentials, and
noise is computed only for blocks with an entry that may win: after the first few blocks, hardly any. (The
Gumbel argmax as a race of exponential clocks, of which the first to ring wins: Maddison, Tarlow and Minka,
"A* Sampling", 2014.)
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.numerics.rows import Numerics, row_sum
from rljax.sampling.distribution import SamplingParams, kept_from, scaled_logits

LOG2_E = float(np.log2(np.e))
_STEPS = float(2**31)
_LARGE = 3e38  # instead of infinity, whose product with an exponential of 0 is NaN


def scaled(logits: Array, sampling: SamplingParams) -> Array:
    """Returns the entries `x` without filters; at temperature 0 the logits, with NaN as the largest."""
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

    This holds for `x` down to 25.8 below `top`. Lower entries may be skipped, as they lose to the top itself:
    noise lies within [-2.9, 22.9].

    Args:
      top: value that the exponentials subtract from `x`: the largest `x` of the tile, or more.
      best: largest noisy entry so far.
    """
    # The margin is many times the rounding error of sums and exponentials.
    margin = 0.01 + 1e-6 * (jnp.abs(top) + jnp.abs(best))
    return jnp.minimum(jnp.exp2((top - best + margin) * LOG2_E), _LARGE / _STEPS) * _STEPS


def lead(words: Array, exponentials: Array, reach: Array) -> Array:
    """Returns numbers above 0 where an entry cannot win; float32, elementwise.

    Args:
      words: words of the noise field, uint32.
      exponentials: e^(x - top).
      reach: result of `reach` for the same `top`.
    """
    return (words >> np.uint32(1)).astype(jnp.int32).astype(jnp.float32) - exponentials * reach


def finite_or_zero(top: Array) -> Array:
    """Returns the value to subtract from entries whose largest is `top`; 0 if none is left."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def merge(
    best: Array, tokens: Array, chosen: Array, tops: Array, sums: Array, vocab_size: int, numerics: Numerics
) -> tuple[Array, Array]:
    """Returns tokens [B] and logprobs [B] from partial results.

    Args:
      best: largest noisy entry of each part of the vocabulary, float32 [B, S].
      tokens: first index of that entry, int32 [B, S].
      chosen: `x` of that entry, float32 [B, S].
      tops, sums: largest `x` and sum of e^(x - top) of parts, which may be others, float32 [B, T].
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
