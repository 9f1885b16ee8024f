"""Shardings of the decode state on a mesh, by the table of axes in `rljax/sharding.py`."""

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from rljax.engine.buckets import check_slots
from rljax.engine.kv_cache import KVCache
from rljax.engine.state import DecodeState
from rljax.models.config import ModelConfig
from rljax.models.sharding import replicated_axes
from rljax.sharding import named, row_multiple


def slot_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays [B] over the slots of a decode state."""
    return named(mesh, "slots")


def feature_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of features [B, T, S, d] of slots, or of prompts, for drafters."""
    return named(mesh, "slots", None, None, None)


def cache_shardings(cache: KVCache, config: ModelConfig, mesh: Mesh) -> KVCache:
    """A KVCache with a NamedSharding in the place of every array: slots over data and fsdp, heads over
    tensor.
    """
    check_slots(cache.batch, row_multiple(mesh))
    replicated = replicated_axes(config, mesh, decoding=True)

    def sharding(array: Array) -> NamedSharding:
        rest = (None,) * (array.ndim - 2)
        return named(mesh, "slots", "kv_heads", *rest, replicated=replicated)

    return KVCache(keys=[sharding(k) for k in cache.keys], values=[sharding(v) for v in cache.values])


def decode_state_shardings(state: DecodeState, config: ModelConfig, mesh: Mesh) -> DecodeState:
    """A DecodeState with a NamedSharding in the place of every array: all split by slots, counts by the
    vocabulary too.
    """

    def per_slot(array: Array) -> NamedSharding:
        return named(mesh, "slots", *(None,) * (array.ndim - 1))

    shardings: DecodeState = jax.tree.map(per_slot, state)
    return shardings.replace(
        cache=cache_shardings(state.cache, config, mesh),
        counts=None if state.counts is None else named(mesh, "slots", "vocab"),
    )
