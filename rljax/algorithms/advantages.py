"""Advantages of whole responses over a baseline, and their normalization.

The baseline is the mean reward of the group, the responses to the same prompt. GRPO: Shao et al.,
"DeepSeekMath", arXiv 2402.03300, section 4.1.2. DAPO (arXiv 2503.14476, Eq. 9) uses the same, RLOO the group
without the response itself. `returns.py` has advantages of single tokens; `estimation.py` combines both.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def group_relative_advantages(
    rewards: ArrayLike,
    normalization: Literal["std", "none"] = "std",
    epsilon: float = 1e-6,
    scored: ArrayLike | None = None,
) -> Array:
    """Returns the advantage of each response over the mean of its group, the same for all of its tokens.

        A[p, i] = (R[p, i] - mean_i R[p]) / (std_i R[p] + epsilon)      "std", GRPO
        A[p, i] =  R[p, i] - mean_i R[p]                                "none", Dr. GRPO (arXiv 2503.20783)

    The papers do not define the standard deviation; this is the sample standard deviation (divided by G - 1),
    as in the public implementations of both. A group of equal rewards has advantages of exactly 0; otherwise
    a rounding error of the mean would be divided by a rounding error of the standard deviation.

    Args:
      rewards: [P, G], G responses to each of P prompts.
      normalization: "std" or "none".
      epsilon: bounds the advantages of groups whose rewards are nearly equal.
      scored: bool [P, G], False for responses that are left out: means and deviations are those of the
        others, and their own advantage is 0, whatever their reward. None scores all.

    Returns:
      float32 [P, G].
    """
    rewards = jnp.asarray(rewards).astype(jnp.float32)
    if rewards.ndim != 2:
        raise ValueError(f"rewards: shape {rewards.shape}, expected [P, G]")
    if normalization not in ("std", "none"):
        raise ValueError(f'normalization: {normalization!r}, expected "std" or "none"')
    members: Array | int = rewards.shape[1]  # an int where all count: the bits of a constant divisor
    if scored is not None:
        scored = jnp.asarray(scored)
        members = jnp.sum(scored, axis=1, keepdims=True, dtype=jnp.float32)
        rewards = jnp.where(scored, rewards, 0.0)
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True, where=scored)
    if scored is not None:
        centred = jnp.where(scored, centred, 0.0)
    if normalization == "std":
        std = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / _at_least_one(members - 1))
        centred = centred / (std + epsilon)
    lowest = jnp.min(rewards, axis=1, keepdims=True, where=scored, initial=jnp.inf)
    highest = jnp.max(rewards, axis=1, keepdims=True, where=scored, initial=-jnp.inf)
    return jnp.where(lowest < highest, centred, 0.0)


def leave_one_out_advantages(
    rewards: ArrayLike,
    normalization: Literal["std", "none"] = "none",
    epsilon: float = 1e-6,
    scored: ArrayLike | None = None,
) -> Array:
    """Returns the advantage of each response over the mean of the others in its group (RLOO).

        A[p, i] = R[p, i] - 1 / (G - 1) sum_{j != i} R[p, j] = G / (G - 1) (R[p, i] - mean_j R[p])

    The baseline does not depend on the response itself, so the policy gradient stays unbiased. Kool et al.,
    "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019; Ahmadian et al., "Back to Basics", arXiv
    2402.14740, section 3.2.

    Arguments and result are those of `group_relative_advantages`, from which these advantages differ by the
    factor G / (G - 1), G being the number of scored responses. A group of one has advantage 0.
    """
    advantages = group_relative_advantages(rewards, normalization, epsilon, scored)
    members: Array | int = advantages.shape[1]
    if scored is not None:
        members = jnp.sum(jnp.asarray(scored), axis=1, keepdims=True, dtype=jnp.float32)
    return advantages * (members / _at_least_one(members - 1))


def _at_least_one(count: Array | int) -> Array | int:
    return max(count, 1) if isinstance(count, int) else jnp.maximum(count, 1)


def whiten(advantages: Array, mask: Array, epsilon: float = 1e-6) -> Array:
    """Returns the advantages of a batch, normalized to mean 0 and standard deviation 1 over its tokens.

        A'[t] = (A[t] - mean A) / (std A + epsilon),    over all t of the mask

    REINFORCE++: Hu et al., arXiv 2501.03262 ("global advantage normalization"), and implementations of PPO.
    One scale for the whole batch: unlike division by the group's standard deviation, it does not enlarge the
    advantages of groups whose rewards hardly differ. The standard deviation is that of a sample. Advantages
    that are all equal become exactly 0.

    Args:
      advantages: float32 [N, L]; entries outside the mask are ignored.
      mask: bool [N, L], True at response tokens.

    Returns:
      float32 [N, L], 0 outside the mask.
    """
    if advantages.shape != mask.shape:
        raise ValueError(f"advantages {advantages.shape} and mask {mask.shape} differ in shape")
    count = jnp.sum(mask.astype(jnp.float32))
    inside = jnp.where(mask, advantages, 0.0)
    centred = jnp.where(mask, inside - jnp.sum(inside) / jnp.maximum(count, 1.0), 0.0)
    std = jnp.sqrt(jnp.sum(centred**2) / jnp.maximum(count - 1.0, 1.0))
    lowest = jnp.min(jnp.where(mask, advantages, jnp.inf))
    highest = jnp.max(jnp.where(mask, advantages, -jnp.inf))
    return jnp.where(lowest == highest, 0.0, centred / (std + epsilon))
