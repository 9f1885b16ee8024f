"""Estimators of the KL divergence to a reference policy, from the logprobs of tokens that the policy sampled.

Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html). GRPO penalises the policy with
k3 (arXiv 2402.03300, Eq. 4). With r = reference(x) / policy(x) and x drawn from the policy, all three
estimate KL(policy || reference) = E[-log r]:

    k1 = -log r             unbiased; either sign; high variance
    k2 = (log r)^2 / 2      biased, slightly while the policies are close; never negative
    k3 = r - 1 - log r      unbiased; never negative; low variance

As a *loss* they differ from what their values suggest, for the gradient passes through the logprob of a
sampled token and not through the sampling. Expected gradients, from on-policy samples:

    k1   0: it regularises nothing
    k2   the gradient of KL(policy || reference)
    k3   the gradient of KL(reference || policy), which agrees with k2's to first order
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Array, reference_logprobs: Array, estimator: Estimator) -> Array:
    """Returns an estimate of KL(policy || reference) at each sampled token.

    Weigh and sum it like the policy loss. Where a logprob may be infinite or NaN outside the mask, select
    before this call: a NaN gradient survives multiplication by 0.

    Args:
      logprobs: float [...], logprobs of the sampled tokens under the policy.
      reference_logprobs: float [...], logprobs of the same tokens under the reference.
      estimator: "k1", "k2" or "k3".

    Returns:
      [...], one estimate per token.
    """
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"logprobs {logprobs.shape} and reference_logprobs {reference_logprobs.shape} differ in shape"
        )
    log_ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    if estimator == "k3":
        return jnp.expm1(log_ratio) - log_ratio  # near 0, exp(x) - 1 would be a rounding error
    raise ValueError(f'estimator: {estimator!r}, expected "k1", "k2" or "k3"')
