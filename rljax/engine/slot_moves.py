"""Programs that move slots of the decode state: prompts are inserted, slots compacted and added."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from rljax.engine import kv_cache
from rljax.engine.state import DecodeState, Prefix

_Slots = TypeVar("_Slots")
"""A pytree of arrays whose first axis is that of the slots."""


def insert(
    prefix: Prefix, state: DecodeState, rows: Array, slots: Array, remaining: Array, keys: Array
) -> DecodeState:
    return DecodeState(
        cache=kv_cache.copy_rows(state.cache, prefix.cache, rows, slots),
        tokens=state.tokens.at[slots].set(prefix.last_tokens[rows], mode="drop"),
        lengths=state.lengths.at[slots].set(prefix.lengths[rows] - 1, mode="drop"),
        remaining=state.remaining.at[slots].set(remaining, mode="drop"),
        active=state.active.at[slots].set(True, mode="drop"),
        noise_keys=state.noise_keys.at[slots].set(keys, mode="drop"),
        counts=None if state.counts is None else state.counts.at[slots].set(0, mode="drop"),
    )


def set_counts(state: DecodeState, slots: Array, tokens: Array) -> DecodeState:
    """Counts `tokens` [B, T] in slots [B], in place of the counts there; slot B and token V are ignored."""
    cleared = state.counts.at[slots].set(0, mode="drop")
    return state.replace(counts=cleared.at[slots[:, None], tokens].add(1, mode="drop"))


def compact(state: DecodeState, slots: Array, present: Array) -> DecodeState:
    return DecodeState(
        cache=kv_cache.take_slots(state.cache, slots),
        tokens=state.tokens[slots],
        lengths=state.lengths[slots],
        remaining=state.remaining[slots],
        active=state.active[slots] & present,
        noise_keys=state.noise_keys[slots],
        counts=None if state.counts is None else state.counts[slots],
    )


def with_slots(state: _Slots, batch: int) -> _Slots:
    """Pads all arrays to `batch` slots, their first axis; the new slots are free."""

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, batch - x.shape[0])] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(pad, state)
