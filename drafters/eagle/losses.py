"""The losses of heads, between the policy's distribution p and the head's q, position by position.

    EAGLE, HASS   smooth L1 of the hidden states + 0.1 cross entropy (EAGLE, section 3.2)
    EAGLE-3       cross entropy (EAGLE-3, section 3.1)
    OSD           reverse KL (Liu et al., 2023, "Online Speculative Decoding", arXiv 2310.07177; TLT, 6.6)
    LK            -log of the acceptance rate (Samarin et al., 2026, "LK Losses", arXiv 2602.23881)

Every function takes log-probabilities float32 [..., V] of p and q and returns one number for each
position, float32 [...]; the caller masks and averages.
"""

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp


def smooth_l1(predicted: Array, target: Array) -> Array:
    """Mean over the d channels of hidden states [..., d] of

        0.5 x^2 where |x| < 1, |x| - 0.5 elsewhere,   x = predicted - target

    (EAGLE's L_reg; Girshick, "Fast R-CNN", 2015, equation 3).
    """
    distance = jnp.abs(predicted.astype(jnp.float32) - target.astype(jnp.float32))
    return jnp.mean(jnp.where(distance < 1.0, 0.5 * distance * distance, distance - 0.5), axis=-1)


def cross_entropy(p: Array, q: Array) -> Array:
    """- sum_v p[v] log q[v]: EAGLE's L_cls and EAGLE-3's loss. Forward KL plus p's entropy, a constant."""
    return -jnp.sum(jnp.exp(p) * q, axis=-1)


def reverse_kl(p: Array, q: Array) -> Array:
    """sum_v q[v] (log q[v] - log p[v]): OSD's distillation with the head's own distribution in front, which
    seeks a mode of p instead of covering all of it.
    """
    return jnp.sum(jnp.exp(q) * (q - p), axis=-1)


def acceptance(p: Array, q: Array) -> Array:
    """sum_v min(p[v], q[v]): the probability that speculative sampling accepts a token drafted from q
    (Leviathan et al., 2023, theorem 3.5); shared noise accepts about as often.
    """
    return jnp.sum(jnp.exp(jnp.minimum(p, q)), axis=-1)


def lk(p: Array, q: Array) -> Array:
    """- log sum_v min(p[v], q[v]): the logarithm of the acceptance rate itself. Summed as logarithms: a head
    with no overlap at all still has a finite loss and a gradient.
    """
    return -logsumexp(jnp.minimum(p, q), axis=-1)


def expected_accept_length(acceptances: Array) -> Array:
    """Returns the tokens that a verifying pass over a chain yields, with the policy's own last token:

        1 + sum_j prod_{i <= j} a[i]

    Args:
      acceptances: float32 [k, ...], acceptance of the token at each depth, given that all before it were
        accepted.

    Returns:
      float32 [...].
    """
    return 1.0 + jnp.sum(jnp.cumprod(acceptances, axis=0), axis=0)
