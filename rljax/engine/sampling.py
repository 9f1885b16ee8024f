"""Sampling: the token that each row of logits becomes, by the kernel that the config names."""

from jax import Array

from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams


def sample(
    logits: Array, keys: Array, positions: Array, params: SamplingParams, numerics: Numerics
) -> tuple[Array, Array]:
    """The token at each position, and its log-probability under the distribution it was sampled from.

    Args:
      logits: float32 [B, V].
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, int32 [B].

    Returns:
      tokens int32 [B], logprobs float32 [B].
    """
    return noisy_argmax(logits, keys, positions, params, numerics, numerics.kernels.noisy_argmax)
