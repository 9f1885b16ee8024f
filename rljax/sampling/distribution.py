"""The sampling distribution: one logits transform, one choice under the noise, one log-probability.

`penalized_logits` applies the penalties, then `transform_logits` temperature, top-k, top-p and min-p, in that
order, and nothing else does: sampling, verification, drafting and the trainer's log-probabilities all call
them, or the parts `scaled_logits` and `kept_from`, so they cannot disagree about the distribution.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax import Array, lax

from rljax.numerics.rows import Numerics, log_normalizer, row_max, row_sum


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling distribution; static in every compiled program.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token (greedy).
      top_k: keep the k largest logits (ties with the k-th stay); 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches top_p (Holtzman et al., 2020); 1 keeps
        all.
      min_p: drop tokens less likely than min_p times the most likely one (Nguyen et al., 2024); 0 keeps all.
      repetition_penalty: positive logits of tokens that the response has are divided by it, negative ones
        multiplied (CTRL, Keskar et al., 2019, section 4.1); 1 is off.
      frequency_penalty: subtracted from a token's logit for each time that the response has it; 0 is off.
      presence_penalty: subtracted if the response has the token at all; 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"need top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1, got {self}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on what the response already has."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def filters(self, vocab_size: int) -> bool:
        """Whether anything of a vocabulary of this size may be left out."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0 or self.min_p > 0.0


def _running_sum(x: Array) -> Array:
    """Inclusive running sum over the last axis, by elementwise additions only (so that rows do not disturb
    each other).
    """
    return lax.associative_scan(jnp.add, x, axis=-1)


def penalized_logits(logits: Array, counts: Array | None, params: SamplingParams) -> Array:
    """Logits [..., V] under the penalties: repetition, then frequency and presence.

    Args:
      counts: int32 [..., V], how often each token stands in the response so far; the prompt does not count.
        None where nothing is penalized.

    The frequency penalty is rounded to 8 significant bits. Its product with a count is then exact, and the
    logits have the same bits whether a compiler fuses it with the subtraction or not.
    """
    if not params.penalizes:
        return logits
    present = counts > 0
    if params.repetition_penalty != 1.0:
        weaker, stronger = logits * (1.0 / params.repetition_penalty), logits * params.repetition_penalty
        logits = jnp.where(present, jnp.where(logits > 0, weaker, stronger), logits)
    if params.frequency_penalty != 0.0:
        rounded = np.float32(ml_dtypes.bfloat16(params.frequency_penalty))
        logits = logits - counts.astype(jnp.float32) * rounded
    return (
        logits
        if params.presence_penalty == 0.0
        else logits - jnp.where(present, params.presence_penalty, 0.0)
    )


@struct.dataclass
class Responses:
    """Sampled targets of packed rows, by response.

    Attributes:
      segment_ids: int32 [R, T].
      mask: bool [R, T], the target is a sampled token.
    """

    segment_ids: Array
    mask: Array

    def counts(self, targets: Array, columns: Array, vocab_size: int) -> Array:
        """Counts for `penalized_logits` at some columns: int32 [R, C, V].

        Args:
          targets: int32 [R, T].
          columns: int32 [C].
        """
        before = jnp.arange(targets.shape[1])[None] < columns[:, None]  # [C, T]
        same = self.segment_ids[:, columns, None] == self.segment_ids[:, None]
        counted = (before[None] & same & self.mask[:, None]).astype(jnp.int32)
        rows = jnp.arange(len(targets))[:, None, None]
        nothing = jnp.zeros((len(targets), len(columns), vocab_size), jnp.int32)
        return nothing.at[rows, jnp.arange(len(columns))[None, :, None], targets[:, None]].add(counted)


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


jax.tree_util.register_static(SamplingParams)
