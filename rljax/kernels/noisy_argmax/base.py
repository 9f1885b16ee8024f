"""The reference in plain JAX."""

from jax import Array

from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams, first_maximum, token_logprobs, transform_logits
from rljax.sampling.noise import gumbel_rows


def noisy_argmax(
    logits: Array, keys: Array, positions: Array, sampling: SamplingParams, numerics: Numerics
) -> tuple[Array, Array]:
    """See the package's `noisy_argmax`."""
    transformed = transform_logits(logits, sampling, numerics)
    noisy = transformed
    if not sampling.greedy:
        noisy = transformed + gumbel_rows(keys, positions, logits.shape[-1])
    tokens = first_maximum(noisy)
    return tokens, token_logprobs(transformed, tokens, numerics)
