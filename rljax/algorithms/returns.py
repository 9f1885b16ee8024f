"""Rewards and advantages of single tokens, for estimators that spread the reward of a response over them.

Arrays are [N, L]: one response per row, from its first token on, padded to the right. `mask` is True for the
tokens that the policy sampled: those of the response without the answers of tools, which are skipped.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax


def token_rewards(rewards: Array, penalties: Array | None, mask: Array) -> Array:
    """Returns a reward for each token: the response's reward at its last token, less the penalty of each.

        r[t] = 1[t is last] R - penalty[t]

    Ouyang et al., arXiv 2203.02155, and REINFORCE++ (arXiv 2501.03262): the penalty is the KL to a reference
    times its coefficient.

    Args:
      rewards: float32 [N], rewards of the responses.
      penalties: float32 [N, L]; None for none.
      mask: bool [N, L].

    Returns:
      float32 [N, L], 0 outside the mask.
    """
    if rewards.shape != mask.shape[:1]:
        raise ValueError(f"rewards {rewards.shape} and mask {mask.shape}: expected [N] and [N, L]")
    places = jnp.where(mask, jnp.arange(mask.shape[1])[None], -1)
    last = mask & (places == jnp.max(places, axis=1, keepdims=True))
    spread = jnp.where(last, rewards[:, None], 0.0)
    return spread if penalties is None else spread - jnp.where(mask, penalties, 0.0)


@functools.partial(jax.jit, static_argnames=("discount", "gae_lambda"))  # a scan compiles: once
def generalized_advantages(
    rewards: Array, values: Array, mask: Array, discount: float, gae_lambda: float
) -> Array:
    """Returns generalized advantage estimates, GAE(gamma, lambda).

        delta[t] = r[t] + gamma V[t + 1] - V[t],    V = 0 after the last token
        A[t] = delta[t] + gamma lambda A[t + 1]

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv
    1506.02438, Eq. 11 and 16. lambda = 1 gives the return less the value; with values of 0 the advantage is
    the (discounted) return itself, as in REINFORCE.

    Args:
      rewards: float32 [N, L], from `token_rewards`.
      values: float32 [N, L], value of the state before each token.
      mask: bool [N, L].
      discount: gamma.
      gae_lambda: lambda.

    Returns:
      float32 [N, L], 0 outside the mask.
    """
    if not rewards.shape == values.shape == mask.shape or mask.ndim != 2:
        raise ValueError(
            f"rewards {rewards.shape}, values {values.shape} and mask {mask.shape}: expected one [N, L]"
        )
    rewards, values = (jnp.where(mask, array, 0.0) for array in (rewards, values))

    def step(
        carry: tuple[Array, Array], now: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        later_advantage, later_value = carry
        reward, value, sampled = now
        delta = reward + discount * later_value - value
        advantage = delta + discount * gae_lambda * later_advantage
        carry = (jnp.where(sampled, advantage, later_advantage), jnp.where(sampled, value, later_value))
        return carry, advantage

    nothing = jnp.zeros(mask.shape[0], jnp.float32)
    _, advantages = lax.scan(step, (nothing, nothing), (rewards.T, values.T, mask.T), reverse=True)
    return jnp.where(mask, advantages.T, 0.0)


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
    """Returns the share of the returns' variance that the values explain, [], at most 1."""

    def variance(x: Array) -> Array:
        count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
        x = jnp.where(mask, x, 0.0)
        return jnp.sum(jnp.where(mask, x - jnp.sum(x) / count, 0.0) ** 2) / count

    total = variance(returns)
    return jnp.where(total > 0, 1.0 - variance(returns - values) / jnp.where(total > 0, total, 1.0), 0.0)
