"""The sampling distribution: the logits transform, the choice under the noise, and log-probabilities.

`without_padding` leaves out what is no token, `penalized_logits` applies the penalties, then
`transform_logits` applies temperature, top-k, top-p and min-p, in that order. Sampling, verification,
drafting and the trainer's log-probabilities all call these functions, or their parts `scaled_logits` and
`kept_from`, so they use the same distribution.
"""

import dataclasses
from collections.abc import Callable

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
      repetition_penalty: divides positive logits of tokens that the response contains, and multiplies
        negative ones (CTRL, Keskar et al., 2019, section 4.1); 1 is off.
      frequency_penalty: subtracted from a token's logit once per occurrence in the response; 0 is off.
      presence_penalty: subtracted once if the token occurs in the response; 0 is off.
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
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the response so far."""
        return self.penalties != (1.0, 0.0, 0.0)

    def filters(self, vocab_size: int) -> bool:
        """Returns whether top-k, top-p or min-p may exclude tokens of a vocabulary of this size."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0 or self.min_p > 0.0


def running_sum(x: Array) -> Array:
    """Returns the inclusive running sum over the last axis, by elementwise additions only, so that a row does
    not depend on the others.
    """
    return lax.associative_scan(jnp.add, x, axis=-1)


def without_padding(logits: Array, used_rows: int) -> Array:
    """Returns logits [..., V] with -inf from entry `used_rows` on: there, rows of the embedding stand for no
    token.
    """
    if logits.shape[-1] == used_rows:
        return logits
    entries = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(entries < used_rows, logits, -jnp.inf)


def penalized_logits(logits: Array, counts: Array | None, params: SamplingParams) -> Array:
    """Applies the penalties to logits [..., V]: repetition, then frequency and presence.

    Args:
      counts: int32 [..., V], occurrences of each token in the response so far, without the prompt. None if
        nothing is penalized.

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
    """Sampled targets of packed rows, with the response of each.

    Attributes:
      segment_ids: int32 [R, T].
      mask: bool [R, T], True where the target is a sampled token.
    """

    segment_ids: Array
    mask: Array

    def counts(self, targets: Array, columns: Array, vocab_size: int) -> Array:
        """Returns counts for `penalized_logits` at some columns: int32 [R, C, V].

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


def transform_logits(
    logits: Array,
    params: SamplingParams,
    numerics: Numerics,
    threshold: Callable[[Array, SamplingParams, Numerics], Array] | None = None,
) -> Array:
    """Applies temperature, then top-k, top-p and min-p to float32 logits [..., V]: [..., V], -inf where a
    token cannot be sampled.

    Args:
      logits: float32 [..., V].
      threshold: replacement for `kept_from`.
    """
    if params.greedy:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        entries = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
        return jnp.where(entries == best, 0.0, -jnp.inf)
    scaled = scaled_logits(logits, params)
    if not params.filters(logits.shape[-1]):
        return scaled
    lowest = (threshold or kept_from)(scaled, params, numerics)
    return jnp.where(scaled >= lowest, scaled, -jnp.inf)


def scaled_logits(logits: Array, params: SamplingParams) -> Array:
    """Divides logits by the temperature, which must not be 0."""
    return logits if params.temperature == 1.0 else logits * (1.0 / params.temperature)


def kept_from(scaled: Array, params: SamplingParams, numerics: Numerics) -> Array:
    """Returns the smallest scaled logit [..., V] that top-k, top-p and min-p keep, applied in that order:
    float32 [..., 1], without a gradient.
    """
    scaled = left = lax.stop_gradient(scaled)
    lowest = jnp.full((*scaled.shape[:-1], 1), -jnp.inf, scaled.dtype)
    if 0 < params.top_k < scaled.shape[-1]:
        lowest = lax.top_k(scaled, params.top_k)[0][..., -1:]
        left = jnp.where(scaled >= lowest, scaled, -jnp.inf)
    if params.top_p < 1.0:
        ordered = -jnp.sort(-left, axis=-1)
        probs = jnp.exp(ordered - log_normalizer(ordered, numerics))
        before = running_sum(probs) - probs
        last_kept = jnp.min(jnp.where(before < params.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        lowest = jnp.maximum(lowest, last_kept)
    if params.min_p > 0.0:
        likely = scaled - jnp.max(scaled, axis=-1, keepdims=True) >= jnp.log(params.min_p)
        least = jnp.min(jnp.where(likely, scaled, jnp.inf), axis=-1, keepdims=True)
        # Next to an infinite logit nothing is kept: no logit is at least NaN.
        lowest = jnp.maximum(lowest, jnp.where(jnp.isinf(least), jnp.nan, least))
    return lowest


def token_logprobs(transformed: Array, tokens: Array, numerics: Numerics) -> Array:
    """Returns log-probabilities of tokens [...] under transformed logits [..., V]: float32 [...]."""
    chosen = jnp.take_along_axis(transformed, tokens[..., None], axis=-1)
    return (chosen - log_normalizer(transformed, numerics))[..., 0]


def entropy(transformed: Array, numerics: Numerics, differentiable: bool = False) -> Array:
    """Returns the entropy of transformed logits [..., V], float32 [...]; no gradient unless `differentiable`.

        H = log sum_v e^x[v] - sum_v x[v] e^x[v] / sum_v e^x[v]

    The exponentials are shared with the log-softmax, and both sums are products, so the entropy costs next to
    nothing.
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
    """Returns the argmax over the last axis of [..., V], int32 [...]: the first of equals; the last index if
    an entry is NaN.

    It takes two passes. The single pass of `jnp.argmax` would be fused with the noise, which a CPU would then
    compute on a single core.
    """
    indices = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == row_max(x), indices, x.shape[-1] - 1), axis=-1)


jax.tree_util.register_static(SamplingParams)
