"""Corrects for differences between training and rollout probabilities of the sampled tokens.

A step involves three policies: mu, which sampled the tokens (the rollout's logprobs); pi_old, the same
weights in the training pass; and pi, the weights in training. In this codebase mu and pi_old are the same
numbers on a CPU; on an accelerator they may differ, and rollouts from elsewhere certainly do. Without a
correction, mu takes the place of pi_old in the clipped ratio. With one, clipping and correction are separate
(Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641):

    loss = -sum_t w[t] c[t] min(r[t] A[t], clip(r[t]) A[t]),    r = pi / pi_old,    c = f(pi_old / mu)

- f(x) = min(x, cap), truncated importance sampling (Ionides, "Truncated Importance Sampling", 2008; Yao et
  al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025): it corrects for
  sampling from mu instead of pi_old, and no token weighs more than the cap.
- Tokens, or whole responses, whose x leaves [low, high] are left out (masked importance sampling; Liu et al.,
  "When Speed Kills Stability", 2025). The x of a response is the geometric mean over its tokens, so that one
  band suits all lengths. Tokens that are left out do not count in the average over tokens either.

c is not negative and has no gradient, so c min(r A, clip(r) A) = min(r cA, clip(r) cA): the factor can be
multiplied into the advantages, and the loss needs no argument for it.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array


class Correction(NamedTuple):
    """Factors and mask that correct for the rollout's probabilities.

    Attributes:
      factors: float32 [N, L], factors to multiply the advantages by; 1 without a cap.
      kept: bool [N, L], tokens to learn from: those of the mask that were not left out.
      metrics: scalars over the tokens of the mask: `ratio_mean`, `ratio_max`, `kl` (KL(mu || pi_old) by
        (x - 1) - log x), `truncated` and `masked`, the shares of tokens that the cap and the mask affect.
    """

    factors: Array
    kept: Array
    metrics: dict[str, Array]


def rollout_correction(
    old_logprobs: Array,
    rollout_logprobs: Array,
    mask: Array,
    cap: float | None,
    left_out: Literal["none", "token", "sequence"],
    low: float,
    high: float,
) -> Correction:
    """Returns the correction described at the top of this module.

    Args:
      old_logprobs: float32 [N, L], logprobs of the training pass before the step's first update; -inf, and so
        a ratio of 0, where a sampling filter excludes the token there.
      rollout_logprobs: float32 [N, L], logprobs under the distribution that the rollout sampled from.
      mask: bool [N, L], True at response tokens.
      cap: largest factor; None for factors of 1.
      left_out: tokens or responses to leave out where the ratio leaves the band.
      low, high: the band.
    """
    if not old_logprobs.shape == rollout_logprobs.shape == mask.shape or mask.ndim != 2:
        raise ValueError(
            f"old_logprobs {old_logprobs.shape}, rollout_logprobs {rollout_logprobs.shape} and mask"
            f" {mask.shape}: expected one [N, L]"
        )
    log_ratio = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0)
    ratio = jnp.exp(log_ratio)
    factors = jnp.ones_like(ratio) if cap is None else jnp.minimum(ratio, cap)
    if left_out == "none":
        kept = mask
    elif left_out == "token":
        kept = mask & (ratio >= low) & (ratio <= high)
    elif left_out == "sequence":
        length = jnp.maximum(jnp.sum(mask.astype(jnp.float32), axis=1, keepdims=True), 1.0)
        mean_ratio = jnp.exp(jnp.sum(log_ratio, axis=1, keepdims=True) / length)
        kept = mask & (mean_ratio >= low) & (mean_ratio <= high)
    else:
        raise ValueError(f'left_out: {left_out!r}, expected "none", "token" or "sequence"')

    def mean(x: Array) -> Array:
        tokens = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
        return jnp.sum(jnp.where(mask, x, 0.0)) / tokens

    truncated = jnp.zeros_like(mask) if cap is None else ratio > cap
    finite_log_ratio = jnp.where(jnp.isfinite(log_ratio), log_ratio, 0.0)
    metrics = {
        "ratio_mean": mean(ratio),
        "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0)),
        "kl": mean(jnp.expm1(finite_log_ratio) - finite_log_ratio),
        "truncated": mean(truncated.astype(jnp.float32)),
        "masked": mean((~kept).astype(jnp.float32)),
    }
    return Correction(factors, kept, metrics)
