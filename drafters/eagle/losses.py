"""The losses of heads, between the policy's distribution p and the head's q, position by position.

    EAGLE, HASS   smooth L1 of the hidden states + 0.1 cross entropy (EAGLE, section 3.2)
    EAGLE-3       cross entropy (EAGLE-3, section 3.1)
    OSD           reverse KL (Liu et al., 2023, "Online Speculative Decoding", arXiv 2310.07177; TLT, 6.6)
    LK            -log of the acceptance rate (Samarin et al., 2026, "LK Losses", arXiv 2602.23881)
    TV            1 - the acceptance rate (Bebop, 2026, arXiv 2606.12370)
    coupled       from the chance that both choose the same token under the same noise; below

Every function takes log-probabilities float32 [..., V] of p and q and returns one number for each
position, float32 [...]; the caller masks and averages.

**Shared noise.** The policy samples argmax(log p + G), and the head drafts argmax(log q + G) under the same
Gumbel noise G (`docs/design.md`): a race of independent exponential times, E[v] / p[v] and E[v] / q[v] with
E = exp(-G), in which the earliest wins. Token i wins both if E[j] >= E[i] max(p[j] / p[i], q[j] / q[i]) for
every j, so

    P(both take i) = 1 / sum_j max(p[j] / p[i], q[j] / q[i])

and, divided by p[i], the chance that i is drafted where the policy samples it:

    P(drafted | i is sampled) = 1 / sum_j max(p[j], q[j] p[i] / q[i])

The mean of the second over sampled tokens is the sum of the first over all i. The product of the second along
a sampled response is the chance that the draft is right so far, *whatever path the draft would take*: the
noise of every position is its own. So a head can be trained on the tokens that a draft will be accepted for.
"""

import jax.numpy as jnp
from jax import Array, lax
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
    (Leviathan et al., 2023, theorem 3.5), and the most that shared noise can accept.
    """
    return jnp.sum(jnp.exp(jnp.minimum(p, q)), axis=-1)


def lk(p: Array, q: Array) -> Array:
    """- log sum_v min(p[v], q[v]): the logarithm of the acceptance rate itself. Summed as logarithms: a head
    with no overlap at all still has a finite loss and a gradient.
    """
    return -logsumexp(jnp.minimum(p, q), axis=-1)


def coupled(p: Array, q: Array, rest: Array | None = None) -> Array:
    """log sum_i 1 / sum_j max(p[j] / p[i], q[j] / q[i]): the logarithm of the chance that the head drafts
    what the policy samples, under shared noise.

    In ascending order of q / p, the larger of p[j] / p[i] and q[j] / q[i] is the former up to i, and the
    latter behind it (equals may stand in any order). So sums of p from the front and of q from the back give
    all the denominators, in O(V log V). A gradient leaves the order as it is, for exchanging equals changes
    nothing.

    Args:
      p, q: [..., V], log-probabilities; -inf where there is none.
      rest: probability of the policy [...] beside the V tokens, which the head cannot draft; None for 0.
    """
    order = jnp.argsort(lax.stop_gradient(jnp.where(jnp.isneginf(q), q, q - p)), axis=-1)
    p, q = (jnp.exp(jnp.take_along_axis(x, order, axis=-1)) for x in (p, q))
    front = jnp.cumsum(p, axis=-1)
    if rest is not None:
        front += rest[..., None]
    back = lax.cumsum(q, axis=q.ndim - 1, reverse=True) - q
    total = front * q + back * p
    both = jnp.where(total > 0, p * q / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.log(jnp.maximum(jnp.sum(both, axis=-1), jnp.finfo(both.dtype).tiny))


def coupled_at(p: Array, q: Array, tokens: Array, rest: Array | None = None) -> Array:
    """- log sum_j max(p[j], q[j] p[i] / q[i]): the logarithm of the chance that the head drafts i where the
    policy samples i, under shared noise. -inf where one of them cannot choose i.

    Args:
      p, q, rest: as of `coupled`.
      tokens: int32 [...], the sampled i; -1 for one beside the V tokens.
    """
    at = jnp.maximum(tokens, 0)[..., None]
    here, drafted = (jnp.take_along_axis(x, at, axis=-1) for x in (p, q))
    known = (tokens >= 0) & ~jnp.isneginf(drafted + here)[..., 0]
    scale = jnp.where(known[..., None], here - drafted, 0.0)  # before the sum: inf has no gradient
    total = logsumexp(jnp.maximum(p, q + scale), axis=-1)
    if rest is not None:
        total = jnp.logaddexp(total, jnp.log(rest))
    return jnp.where(known, jnp.minimum(-total, 0.0), -jnp.inf)


def accepted_drafts(log_accepted: Array) -> Array:
    """sum_k prod_{j <= k} a[j]: the drafts of a chain that are expected to be accepted.

    Args:
      log_accepted: log a, float32 [k, ...], of the token at each depth, given that all before it were
        accepted; -inf from where a chain ends.
    """
    return jnp.sum(jnp.exp(jnp.cumsum(log_accepted, axis=0)), axis=0)


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
