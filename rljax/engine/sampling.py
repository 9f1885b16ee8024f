"""Samples a token from each row of logits, by the kernel that the config names."""

from jax import Array

from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams


def sample(
    logits: Array, keys: Array, positions: Array, params: SamplingParams, numerics: Numerics
) -> tuple[Array, Array]:
    """Samples a token at each position.

    Args:
      logits: float32 [B, V].
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, int32 [B].

    Returns:
      tokens: int32 [B].
      logprobs: float32 [B], under the distribution that the tokens were sampled from.
    """
    return noisy_argmax(logits, keys, positions, params, numerics, numerics.kernels.noisy_argmax)
