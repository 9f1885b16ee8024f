"""What decoding carries on the device."""

import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.engine.kv_cache import KVCache


@struct.dataclass
class DecodeState:
    """Everything that decoding carries from step to step; B slots.

    Attributes:
      cache: keys and values of the committed tokens.
      tokens: int32 [B], the last token of each slot: sampled (or the prompt's last), not yet in the cache.
      lengths: int32 [B], committed tokens, which is also the position of `tokens`.
      remaining: int32 [B], response tokens the slot may still sample.
      active: bool [B], decoding; an inactive slot computes along and changes nothing.
      noise_keys: uint32 [B, 2], see `rljax/sampling/noise.py`.
      counts: int32 [B, V], how often each token was sampled in the response; None unless sampling penalizes.
    """

    cache: KVCache
    tokens: Array
    lengths: Array
    remaining: Array
    active: Array
    noise_keys: Array
    counts: Array | None = None

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]


@struct.dataclass
class Prefix:
    """Prefilled prompts, ready to be inserted into any number of slots.

    Attributes:
      cache: the prompts' keys and values, one row a prompt.
      last_tokens: int32 [N], each prompt's last token.
      lengths: int32 [N], tokens of each prompt.
      states: [N, T, S, d], the policy's states at every position of the prompts; None unless the engine hands
        them out.
    """

    cache: KVCache
    last_tokens: Array
    lengths: Array
    states: Array | None = None


def counted(counts: Array | None, tokens: Array, sampled: Array) -> Array | None:
    """`counts` [B, V] with those of `tokens` [B, T] that were `sampled` [B, T]."""
    if counts is None:
        return None
    return counts.at[jnp.arange(len(tokens))[:, None], tokens].add(sampled.astype(jnp.int32), mode="drop")
