"""The clipped policy loss, with ratios per token or per response, and the weights of its average over tokens.

PPO: Schulman et al., arXiv 1707.06347, Eq. 7. GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300, Eq. 3.
DAPO: Yu et al., arXiv 2503.14476, Eq. 8, 10 and 12. Dr. GRPO: Liu et al., arXiv 2503.20783. GSPO: Zheng et
al., arXiv 2507.18071, Eq. 5-7.

Averaging is a weight on every token, fixed on the host before the mini-batch is cut into micro-batches. The
loss is then a plain weighted sum: micro-batch losses, gradients and metrics add up to those of the
mini-batch, however its tokens were packed and split.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from rljax.algorithms.segments import segment_means

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregation_weights(
    response_lengths: ArrayLike, mode: Aggregation, max_length: int | None = None
) -> np.ndarray:
    """Returns the weight of one token of each response.

        w[i] = 1 / sum_j |o_j|      "token_mean", DAPO Eq. 12: every token counts the same
        w[i] = 1 / (N |o_i|)        "sequence_mean", GRPO Eq. 3: every response counts the same
        w[i] = 1 / (N max_length)   "constant", Dr. GRPO: every token counts the same in every mini-batch

    Over all tokens of the mini-batch the weights of the first two sum to 1, those of the third to the mean
    length over `max_length`: a response's gradient is then a sum over its tokens, and its scale does not
    depend on its length or on that of the others. (Dr. GRPO, section 3.2, has no 1 / |o_i|; its
    implementation divides by the generation budget, as here.)

    DAPO writes its mean over the tokens of one group, under an expectation over prompts; here, as in its
    public implementation, it is over all tokens of the mini-batch. GRPO's groups are equally large, so its
    mean over each group and then over groups is the mean over the N responses. An empty response has no
    tokens and does not count in N.

    Args:
      response_lengths: int [N], tokens in each response of the *mini-batch*.
      mode: "token_mean", "sequence_mean" or "constant".
      max_length: the longest response that the rollout allows; only "constant" reads it.

    Returns:
      float32 [N].
    """
    lengths = np.asarray(response_lengths)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"response_lengths: {lengths.dtype}{list(lengths.shape)}, expected integers [N]")
    if np.any(lengths < 0) or not np.any(lengths > 0):
        raise ValueError(
            "response_lengths: must not be negative, and not all 0: there would be nothing to average"
        )
    present = lengths > 0
    if mode == "token_mean":
        weights = np.full(lengths.shape, 1.0 / lengths.sum())
    elif mode == "sequence_mean":
        weights = 1.0 / (present.sum() * np.maximum(lengths, 1))
    elif mode == "constant":
        if max_length is None or max_length < lengths.max():
            raise ValueError(f"max_length: {max_length}, expected at least the longest, {lengths.max()}")
        weights = np.full(lengths.shape, 1.0 / (present.sum() * max_length))
    else:
        raise ValueError(f'mode: {mode!r}, expected "token_mean", "sequence_mean" or "constant"')
    return np.where(present, weights, 0.0).astype(np.float32)


def policy_loss(
    logprobs: Array,
    proximal_logprobs: Array,
    advantages: Array,
    mask: Array,
    weights: Array,
    clip_low: float,
    clip_high: float,
    segment_ids: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Returns the clipped surrogate, to be minimised, and metrics.

        r[t] = pi(o_t) / pi_proximal(o_t)                                       per token, or with segment_ids
        r[t] = exp(mean over the response of t of log pi(o) / pi_proximal(o))   GSPO Eq. 7
        loss = -sum_t w[t] min(r[t] A[t], clip(r[t], 1 - clip_low, 1 + clip_high) A[t])

    A token whose ratio has left the interval in the direction that its advantage rewards has a gradient of
    exactly 0. clip_high > clip_low is DAPO's clip-higher (Eq. 10): unlikely tokens may grow, so entropy does
    not collapse. GSPO's ratio is the geometric mean of its tokens' ratios. Its logarithm is far smaller, and
    so is its clip range. With "sequence_mean" weights the sum over a response's tokens is GSPO's Eq. 5,
    gradient included. All arrays have one shape [...].

    Args:
      logprobs: logprobs under the policy in training; the only argument to differentiate.
      proximal_logprobs: logprobs under the policy that this one must stay near: that of the rollout, or of
        the training pass before the step's first update (`rollout_correction`).
      advantages: advantage of the token's response, or of the token.
      mask: bool, True at response tokens. Entries of the other arrays outside it have no effect, even NaN.
      weights: token weights, from `aggregation_weights`.
      clip_low, clip_high: largest distances of the ratio from 1 to either side.
      segment_ids: int32, for a ratio per response: arrays are then packed rows [R, T], and a response is the
        masked tokens with one id in a row. None for a ratio per token.

    Returns:
      The loss [], and metrics [], which are weighted sums as well and add up over micro-batches:
        ratio_mean: mean of r, 1 when on-policy.
        clip_fraction_low, clip_fraction_high: share of tokens without gradient, below and above the interval.
        rollout_kl: KL(proximal || policy) from the rollout's samples, by (r - 1) - log r of tokens.
    """
    arrays = {
        "logprobs": logprobs,
        "proximal_logprobs": proximal_logprobs,
        "advantages": advantages,
        "mask": mask,
        "weights": weights,
    }
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"policy_loss needs arrays of one shape, got {shapes}")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask: {mask.dtype}, expected bool")

    # Select before the exponential: a NaN or an overflow at a masked position would survive multiplication by
    # 0.
    token_log_ratio = jnp.where(mask, logprobs - proximal_logprobs, 0.0)
    advantages = jnp.where(mask, advantages, 0.0)
    weights = jnp.where(mask, weights, 0.0)
    log_ratio = token_log_ratio if segment_ids is None else segment_means(token_log_ratio, mask, segment_ids)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    objective = jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    loss = -jnp.sum(weights * objective)

    def weighted_sum(values: Array) -> Array:
        return jax.lax.stop_gradient(jnp.sum(weights * values))

    # The KL of a token that a filter now excludes is infinite.
    possible = jnp.isfinite(token_log_ratio)
    finite_log_ratio = jnp.where(possible, token_log_ratio, 0.0)
    metrics = {
        "ratio_mean": weighted_sum(ratio),
        "clip_fraction_low": weighted_sum(jnp.where((advantages < 0) & (ratio < 1.0 - clip_low), 1.0, 0.0)),
        "clip_fraction_high": weighted_sum(jnp.where((advantages > 0) & (ratio > 1.0 + clip_high), 1.0, 0.0)),
        "rollout_kl": weighted_sum(jnp.expm1(finite_log_ratio) - finite_log_ratio),
    }
    return loss, metrics
