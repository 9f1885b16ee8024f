"""The advantage of every token from rewards, by the settings of an algorithm.

Arrays [N, L] have one response of the step per row, N = P * G in the order of the rewards, from its first
token on and padded to the right.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from rljax.algorithms.advantages import group_relative_advantages, leave_one_out_advantages, whiten
from rljax.algorithms.returns import generalized_advantages, token_rewards

GROUP_BASELINES = {"group": group_relative_advantages, "leave_one_out": leave_one_out_advantages}
"""Baselines over the responses to one prompt: (rewards [P, G], normalization, ..., scored) -> advantages."""


class Estimate(NamedTuple):
    """Advantages, and targets of the critic.

    Attributes:
      advantages: float32 [N, L], 0 outside the mask.
      returns: float32 [N, L], regression targets of the critic's values; None without a critic.
    """

    advantages: Array
    returns: Array | None


def estimate_advantages(
    rewards: ArrayLike,
    mask: Array,
    baseline: Literal["group", "leave_one_out", "none", "critic"],
    normalization: Literal["std", "batch", "none"],
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    penalties: Array | None = None,
    values: Array | None = None,
    owners: Array | None = None,
    scored: ArrayLike | None = None,
) -> Estimate:
    """Returns the advantage of every token.

    Baselines of a group compare whole responses. A penalty in the reward (the KL to a reference) is then
    summed over the response first, as in RLOO (arXiv 2402.14740, Eq. 1 and 5):

        R'[i] = R[i] - sum_t penalty[i, t]

    Without a baseline, or with a critic, the penalty counts from its token on, as in REINFORCE++ (arXiv
    2501.03262) and PPO:

        A[i, t] = R[i] - sum_{u >= t} penalty[i, u]        "none", discount 1
        A[i, t] = GAE of the same rewards and V            "critic"

    Normalization "std" divides by the group's standard deviation, "batch" whitens the advantages over all
    tokens: with "none" that is REINFORCE++, with "group" REINFORCE++-baseline.

    Args:
      rewards: [P, G], G responses to each of P prompts.
      mask: bool [N, L], True at tokens of the response.
      baseline, normalization: as above.
      discount, gae_lambda: parameters of "none" (discount only) and "critic".
      penalties: float32 [N, L], penalties to subtract from the reward at each token; None for none.
      values: float32 [N, L], values of the critic before the update.
      owners: int [N], index of each row's reward among the P * G, where an episode has several rows or none;
        None where N = P * G and each row has its own.
      scored: bool [P, G], False for responses that are left out, with all tokens outside `mask`; None scores
        all.
    """
    rewards = jnp.asarray(rewards).astype(jnp.float32)
    if rewards.ndim != 2 or (owners is None and rewards.size != mask.shape[0]):
        raise ValueError(f"rewards {rewards.shape} and mask {mask.shape}: expected [P, G] and [P * G, L]")
    if (baseline == "critic") != (values is not None):
        raise ValueError(f"baseline: {baseline!r} with{'' if values is not None else 'out'} values")
    returns = None
    if baseline in GROUP_BASELINES:
        if penalties is not None:
            sums = jnp.sum(jnp.where(mask, penalties, 0.0), axis=1)
            if owners is not None:
                sums = jnp.zeros(rewards.size, sums.dtype).at[owners].add(sums)
            rewards -= sums.reshape(rewards.shape)
        group_advantages = GROUP_BASELINES[baseline](
            rewards, "std" if normalization == "std" else "none", scored=scored
        )
        of_rows = group_advantages.reshape(-1) if owners is None else group_advantages.reshape(-1)[owners]
        advantages = jnp.where(mask, of_rows[:, None], 0.0)
    else:
        if normalization == "std":
            raise ValueError(
                f'normalization: "std" needs the rewards of a group, which baseline {baseline!r} does not use'
            )
        of_rows = rewards.reshape(-1) if owners is None else rewards.reshape(-1)[owners]
        rewards_per_token = token_rewards(of_rows, penalties, mask)
        if values is None:
            zeros = jnp.zeros(mask.shape, jnp.float32)
            advantages = generalized_advantages(rewards_per_token, zeros, mask, discount, 1.0)
        else:
            advantages = generalized_advantages(rewards_per_token, values, mask, discount, gae_lambda)
            returns = advantages + jnp.where(mask, values, 0.0)
    if normalization == "batch":
        advantages = whiten(advantages, mask)
    return Estimate(advantages, returns)
