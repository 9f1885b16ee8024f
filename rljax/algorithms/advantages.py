"""Group-relative advantages: the baseline of a response is how its siblings fared on the same prompt.

GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.2. DAPO (arXiv 2503.14476, Eq. 9) uses the
same.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def group_relative_advantages(
    rewards: ArrayLike, normalization: Literal["std", "none"] = "std", epsilon: float = 1e-6
) -> Array:
    """How much better than its group each response did; one advantage for all tokens of a response.

        A[p, i] = (R[p, i] - mean_i R[p]) / (std_i R[p] + epsilon)      "std", GRPO
        A[p, i] =  R[p, i] - mean_i R[p]                                "none", Dr. GRPO (arXiv 2503.20783)

    The papers do not say which standard deviation they mean; this is the sample one (divided by G - 1), as in
    the public implementations of both. A group of equal rewards has advantages of exactly 0: rounding in its
    mean would otherwise be divided by a standard deviation that is rounding too.

    Args:
      rewards: [P, G], G responses to each of P prompts.
      normalization: "std" or "none".
      epsilon: keeps nearly equal rewards from becoming huge advantages.

    Returns:
      float32 [P, G].
    """
    rewards = jnp.asarray(rewards).astype(jnp.float32)
    if rewards.ndim != 2:
        raise ValueError(f"rewards: shape {rewards.shape}, expected [P, G]")
    if normalization not in ("std", "none"):
        raise ValueError(f'normalization: {normalization!r}, expected "std" or "none"')
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    if normalization == "std":
        degrees_of_freedom = max(rewards.shape[1] - 1, 1)
        std = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / degrees_of_freedom)
        centred = centred / (std + epsilon)
    equal = jnp.all(rewards == rewards[:, :1], axis=1, keepdims=True)
    return jnp.where(equal, 0.0, centred)
