"""The decode state: the arrays that decoding carries on the device."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from rljax.engine.kv_cache import KVCache
from rljax.sampling.slots import SlotSampling


@struct.dataclass
class DecodeState:
    """Everything that decoding carries from step to step, for B slots.

    Attributes:
      cache: keys and values of the committed tokens.
      tokens: int32 [B], last token of each slot: sampled (or last of the prompt), and not yet in the cache.
      lengths: int32 [B], number of committed tokens, which is also the position of `tokens`.
      remaining: int32 [B], number of response tokens that the slot may still sample.
      active: bool [B], whether the slot decodes; an inactive slot is computed too, and does not change.
      noise_keys: uint32 [B, 2], see `rljax/sampling/noise.py`.
      counts: int32 [B, V], number of times that each token was sampled in the response; None unless sampling
        penalizes.
      sampling: temperature and filters of each slot; None where the programs have them inside.
    """

    cache: KVCache
    tokens: Array
    lengths: Array
    remaining: Array
    active: Array
    noise_keys: Array
    counts: Array | None = None
    sampling: SlotSampling | None = None

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]


@struct.dataclass
class Prefix:
    """Prefilled prompts, ready to be inserted into any number of slots.

    Attributes:
      cache: keys and values, one row per prompt.
      last_tokens: int32 [N], last token of each prompt.
      lengths: int32 [N], number of tokens of each prompt.
      states: [N, T, S, d], features at every position of the prompts; None unless the engine hands them out.
    """

    cache: KVCache
    last_tokens: Array
    lengths: Array
    states: Array | None = None


def half_full(state: DecodeState) -> DecodeState:
    """Returns the state with all slots active in half-filled caches, to time passes over it; a slot that
    sampled an EOS would be idle.
    """
    batch, length = state.batch, state.cache.length
    busy = {
        "active": np.ones(batch, bool),
        "lengths": np.full(batch, length // 2, np.int32),
        "remaining": np.full(batch, length, np.int32),
    }
    placed = {name: jax.device_put(value, getattr(state, name).sharding) for name, value in busy.items()}
    return state.replace(**placed)


def counted(counts: Array | None, tokens: Array, sampled: Array) -> Array | None:
    """Adds `tokens` [B, T], where they were `sampled` [B, T], to `counts` [B, V]."""
    if counts is None:
        return None
    return counts.at[jnp.arange(len(tokens))[:, None], tokens].add(sampled.astype(jnp.int32), mode="drop")
