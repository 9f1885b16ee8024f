"""What is sampled: one logits transform, one choice under the noise, one log-probability.

`transform_logits` is the only place where temperature, top-k, top-p and min-p are applied, in that order:
sampling, verification, drafting and the trainer's log-probabilities all call it, or its parts
`scaled_logits` and `kept_from`, so they cannot disagree about the distribution.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.models.numerics import Numerics, log_normalizer, row_max, row_sum


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling distribution; static in every compiled program.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token (greedy).
      top_k: keep the k largest logits (ties with the k-th stay); 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches top_p (Holtzman et al., 2020); 1 keeps
        all.
      min_p: drop tokens less likely than min_p times the most likely one (Nguyen et al., 2024); 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"need top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1, got {self}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def filters(self, vocab_size: int) -> bool:
        """Whether anything of a vocabulary of this size may be left out."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0 or self.min_p > 0.0


def _running_sum(x: Array) -> Array:
    """Inclusive running sum over the last axis, by elementwise additions only (so that rows do not disturb
    each other).
    """
    return lax.associative_scan(jnp.add, x, axis=-1)


def transform_logits(logits: Array, params: SamplingParams, numerics: Numerics) -> Array:
    """Temperature, then top-k, top-p, min-p: float32 logits [..., V] -> [..., V], -inf where a token cannot
    be sampled.
    """
    if params.greedy:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        entries = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
        return jnp.where(entries == best, 0.0, -jnp.inf)
    scaled = scaled_logits(logits, params)
    if not params.filters(logits.shape[-1]):
        return scaled
    return jnp.where(scaled >= kept_from(scaled, params, numerics), scaled, -jnp.inf)


def scaled_logits(logits: Array, params: SamplingParams) -> Array:
    """Logits over the temperature, which is not 0."""
    return logits if params.temperature == 1.0 else logits * (1.0 / params.temperature)


def kept_from(scaled: Array, params: SamplingParams, numerics: Numerics) -> Array:
    """What top-k, top-p and min-p, in that order, leave of scaled logits [..., V]: those of at least this,
    float32 [..., 1]. No gradient.
    """
    scaled = left = lax.stop_gradient(scaled)
    lowest = jnp.full((*scaled.shape[:-1], 1), -jnp.inf, scaled.dtype)
    if 0 < params.top_k < scaled.shape[-1]:
        lowest = lax.top_k(scaled, params.top_k)[0][..., -1:]
        left = jnp.where(scaled >= lowest, scaled, -jnp.inf)
    if params.top_p < 1.0:
        ordered = -jnp.sort(-left, axis=-1)
        probs = jnp.exp(ordered - log_normalizer(ordered, numerics))
        before = _running_sum(probs) - probs
        last_kept = jnp.min(jnp.where(before < params.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        lowest = jnp.maximum(lowest, last_kept)
    if params.min_p > 0.0:
        likely = scaled - jnp.max(scaled, axis=-1, keepdims=True) >= jnp.log(params.min_p)
        least = jnp.min(jnp.where(likely, scaled, jnp.inf), axis=-1, keepdims=True)
        # No logit is at least NaN: nothing is kept beside an infinite one.
        lowest = jnp.maximum(lowest, jnp.where(jnp.isinf(least), jnp.nan, least))
    return lowest


def token_logprobs(transformed: Array, tokens: Array, numerics: Numerics) -> Array:
    """Log-probabilities of tokens [...] under transformed logits [..., V]: float32 [...]."""
    chosen = jnp.take_along_axis(transformed, tokens[..., None], axis=-1)
    return (chosen - log_normalizer(transformed, numerics))[..., 0]


def entropy(transformed: Array, numerics: Numerics, differentiable: bool = False) -> Array:
    """Entropy of transformed logits [..., V]: float32 [...]. Without a gradient, unless it is asked for.

        H = log sum_v e^x[v] - sum_v x[v] e^x[v] / sum_v e^x[v]

    The exponentials are those of the log-softmax beside it, and both sums are products, so the entropy costs
    next to nothing.
    """
    if not differentiable:
        transformed = lax.stop_gradient(transformed)
    x = transformed - lax.stop_gradient(jnp.max(transformed, axis=-1, keepdims=True))
    terms = jnp.exp(x)
    total = row_sum(terms, numerics)
    if differentiable:
        x = jnp.where(terms > 0, x, 0.0)  # before the product: the gradient of -inf times 0 is NaN
    weighted = row_sum(jnp.where(terms > 0, x * terms, 0.0), numerics)
    return (jnp.log(total) - weighted / total)[..., 0]


def first_maximum(x: Array) -> Array:
    """argmax over the last axis of [..., V], int32 [...]: the first of equals; the last index if one is NaN.

    In two passes. The one pass of `jnp.argmax` takes the noise into its fusion, and a CPU then computes all
    of it on a single core.
    """
    indices = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == row_max(x), indices, x.shape[-1] - 1), axis=-1)


def sample(
    logits: Array, keys: Array, positions: Array, params: SamplingParams, numerics: Numerics
) -> tuple[Array, Array]:
    """The token at each position, and its log-probability under the distribution it was sampled from.

    Args:
      logits: float32 [B, V].
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, int32 [B].

    Returns:
      tokens int32 [B], logprobs float32 [B].
    """
    return noisy_argmax(logits, keys, positions, params, numerics, numerics.kernels.noisy_argmax)


jax.tree_util.register_static(SamplingParams)
