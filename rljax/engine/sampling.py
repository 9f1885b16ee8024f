"""Logits of the policy in decoding, and a token sampled from each row of them.

On a mesh with a tensor axis, the vocabulary of the logits is split over it, and no logits travel
(`rljax/sampling/split.py`). On one device the kernel that the config names samples.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling import split
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import constrain, logits_sharding, splits_vocab


def decode_logits(
    params: Params, config: ModelConfig, hidden: Array, numerics: Numerics, mesh: Mesh | None
) -> Array:
    """Returns logits of hidden states [R, d] under weights in the layout of decoding: float32 [R, V]. On a
    mesh V is split, and rounded up to `padded_vocab_size` with entries of -inf.
    """
    logits = transformer.logits(params, config, hidden, numerics)
    if not splits_vocab(mesh):
        return logits
    logits = constrain(logits, logits_sharding(mesh))
    if logits.shape[1] == config.vocab_size:
        return logits
    in_vocab = lax.broadcasted_iota(jnp.int32, logits.shape, 1) < config.vocab_size
    return jnp.where(in_vocab, logits, -jnp.inf)


def whole_logits(logits: Array, config: ModelConfig, mesh: Mesh | None) -> Array:
    """Gathers logits of `decode_logits`, or their log-softmax, for readers of whole rows: [R, V]."""
    if not splits_vocab(mesh):
        return logits
    return constrain(logits[:, : config.vocab_size], logits_sharding(mesh, whole=True))


def sample(
    logits: Array,
    keys: Array,
    positions: Array,
    params: SamplingParams,
    numerics: Numerics,
    mesh: Mesh | None = None,
) -> tuple[Array, Array]:
    """Samples a token at each position.

    Args:
      logits: float32 [B, V].
      keys: request keys, uint32 [B, 2].
      positions: positions of the tokens to be sampled, int32 [B].
      params: the sampling distribution.
      numerics: see `Numerics`.
      mesh: devices over whose tensor axis V is split; None for one.

    Returns:
      tokens: int32 [B].
      logprobs: float32 [B], under the distribution that the tokens were sampled from.
    """
    if splits_vocab(mesh):
        return split.noisy_argmax(logits, keys, positions, params, numerics)
    return noisy_argmax(logits, keys, positions, params, numerics, numerics.kernels.noisy_argmax)
