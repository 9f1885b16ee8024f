"""What an update differentiates: the loss of a micro-batch, of the policy gradient and of the warm start.

Every token carries its weight in the mini-batch, so losses, gradients and metrics are plain sums:
micro-batches add up to the mini-batch however it was cut.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from rljax.algorithms.kl import kl_estimate
from rljax.algorithms.losses import policy_loss
from rljax.config import AlgorithmConfig
from rljax.learning.accumulation import Metrics
from rljax.learning.packing import PackedBatch
from rljax.models.transformer import Params

Score = Callable[[Params, PackedBatch], tuple[Array, Array]]
"""(params, batch) -> (logprobs [R, T], entropy [R, T])."""
Objective = Callable[[Array, Array, PackedBatch, Array | None], tuple[Array, Metrics]]
"""(logprobs, entropy, batch, reference logprobs) -> (loss [], metrics [] of the micro-batch)."""

TOKENS = "update/tokens"
WEIGHT = "update/weight"  # sum of the token weights if not 1: means over tokens are divided by it at the end


def policy_objective(
    logprobs: Array,
    entropy: Array,
    batch: PackedBatch,
    reference_logprobs: Array | None,
    algorithm: AlgorithmConfig,
) -> tuple[Array, Metrics]:
    """Returns the loss on a micro-batch.

        loss = policy_loss + kl_coefficient * sum_t w[t] KL[t] - entropy_coefficient * sum_t w[t] H[t]

    Args:
      logprobs, entropy: float32 [R, T], results of `score_packed` for the policy in training.
      batch: the micro-batch. With `old_logprobs`, ratios are relative to these instead of the rollout's, and
        tokens that a sampling filter excludes there (-inf) are not learned from.
      reference_logprobs: float32 [R, T], logprobs without sampling filters; None leaves out the KL term. A
        token that a filter now excludes under the policy has no estimate and is not counted.
      algorithm: ratio, clip range, coefficients and estimator.

    Returns:
      The loss [], and metrics []. `entropy` and `mismatch/logprob_abs_mean` are sums over response tokens, to
      be divided by `update/tokens`; `mismatch/logprob_abs_max` is their maximum; `mismatch/tokens` counts the
      tokens whose logprob differs from the rollout's. Everything else is weighted like the loss. If the
      weights do not sum to 1 over the mini-batch, `policy/...` are to be divided by `update/weight`.
    """
    mask = learned = batch.response_mask
    proximal_logprobs = batch.rollout_logprobs
    if batch.old_logprobs is not None:
        proximal_logprobs = batch.old_logprobs
        learned = mask & jnp.isfinite(proximal_logprobs)
    loss, policy_metrics = policy_loss(
        logprobs,
        proximal_logprobs,
        batch.advantages,
        learned,
        batch.weights,
        algorithm.clip_low,
        algorithm.clip_high,
        batch.segment_ids if algorithm.ratio == "sequence" else None,
    )
    metrics = {"loss/policy": loss} | {f"policy/{name}": value for name, value in policy_metrics.items()}
    if algorithm.aggregation == "constant" or algorithm.skips_responses:
        metrics[WEIGHT] = jnp.sum(jnp.where(mask, batch.weights, 0.0))
    if reference_logprobs is not None:
        counts = mask & jnp.isfinite(logprobs) & jnp.isfinite(reference_logprobs)
        estimate = kl_estimate(
            jnp.where(counts, logprobs, 0.0),
            jnp.where(counts, reference_logprobs, 0.0),
            algorithm.kl_estimator,
        )
        kl = jnp.sum(jnp.where(counts, batch.weights * estimate, 0.0))
        metrics["loss/kl"] = kl
        loss = loss + algorithm.kl_coefficient * kl
    if algorithm.entropy_coefficient > 0:
        bonus = jnp.sum(jnp.where(mask, batch.weights * entropy, 0.0))
        metrics["loss/entropy"] = bonus
        loss = loss - algorithm.entropy_coefficient * bonus
    mismatch = jnp.where(mask, jnp.abs(logprobs - batch.rollout_logprobs), 0.0)
    metrics["mismatch/logprob_abs_mean"] = jnp.sum(mismatch)
    metrics["mismatch/logprob_abs_max"] = jnp.max(mismatch)
    metrics["mismatch/tokens"] = jnp.sum(mismatch > 0.0, dtype=jnp.float32)
    metrics["entropy"] = jnp.sum(jnp.where(mask, entropy, 0.0))
    metrics[TOKENS] = jnp.sum(mask.astype(jnp.float32))
    return loss, metrics


def supervised_objective(
    logprobs: Array, entropy: Array, batch: PackedBatch, reference_logprobs: Array | None
) -> tuple[Array, Metrics]:
    """Returns the weighted cross entropy of the response tokens, the loss of the warm start. Arguments as in
    `policy_objective`.
    """
    del reference_logprobs
    mask = batch.response_mask
    loss = -jnp.sum(jnp.where(mask, batch.weights * logprobs, 0.0))
    return loss, {
        "loss/supervised": loss,
        "entropy": jnp.sum(jnp.where(mask, entropy, 0.0)),
        TOKENS: jnp.sum(mask.astype(jnp.float32)),
    }


def gradients(
    params: Params, batch: PackedBatch, reference_logprobs: Array | None, score: Score, objective: Objective
) -> tuple[Params, Metrics]:
    """Returns gradients and metrics of one micro-batch."""

    def loss(params: Params) -> tuple[Array, Metrics]:
        return objective(*score(params, batch), batch, reference_logprobs)

    return jax.grad(loss, has_aux=True)(params)
