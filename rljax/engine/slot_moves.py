"""Programs that move slots of the decode state: prompts are inserted, slots compacted and added."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from rljax.engine import kv_cache
from rljax.engine.kv_cache import KVCache
from rljax.engine.placement import cache_shardings
from rljax.engine.slot_exchange import copy_slots
from rljax.engine.state import DecodeState, Prefix
from rljax.models.config import ModelConfig
from rljax.sampling.slots import SlotSampling
from rljax.sharding import named, row_multiple

_Slots = TypeVar("_Slots")
"""A pytree of arrays whose first axis is that of the slots."""


@dataclasses.dataclass(frozen=True)
class SlotMoves:
    """Moves of slots within a decode state, and from a prefix into one.

    Where the mesh splits the slots, caches and counts are exchanged by `copy_slots`, array by array, so that
    no device ever holds the cache of all slots.

    Attributes:
      mesh: devices; None for one.
    """

    config: ModelConfig
    mesh: Mesh | None

    def insert(
        self,
        prefix: Prefix,
        state: DecodeState,
        rows: Array,
        slots: Array,
        remaining: Array,
        keys: Array,
        settings: SlotSampling | None = None,
    ) -> DecodeState:
        """Inserts rows[i] of the prefix into slots[i] of the state; slots out of range are skipped.
        `settings` are those of slots[i], for a state with sampling settings of its slots.
        """
        return DecodeState(
            cache=kv_cache.copy_rows(state.cache, prefix.cache, rows, slots, self._shardings(state.cache)),
            tokens=state.tokens.at[slots].set(prefix.last_tokens[rows], mode="drop"),
            lengths=state.lengths.at[slots].set(prefix.lengths[rows] - 1, mode="drop"),
            remaining=state.remaining.at[slots].set(remaining, mode="drop"),
            active=state.active.at[slots].set(True, mode="drop"),
            noise_keys=state.noise_keys.at[slots].set(keys, mode="drop"),
            counts=None if state.counts is None else state.counts.at[slots].set(0, mode="drop"),
            sampling=None if state.sampling is None else state.sampling.put(slots, settings),
        )

    def compact(self, state: DecodeState, slots: Array, present: Array) -> DecodeState:
        """Returns a state of only `slots`, int32 [B'], in that order; those not `present` are free."""
        return DecodeState(
            cache=kv_cache.take_slots(state.cache, slots, self._shardings(state.cache)),
            tokens=state.tokens[slots],
            lengths=state.lengths[slots],
            remaining=state.remaining[slots],
            active=state.active[slots] & present,
            noise_keys=state.noise_keys[slots],
            counts=self._taken_counts(state.counts, slots),
            sampling=None if state.sampling is None else state.sampling.take(slots),
        )

    def widen(self, state: DecodeState, batch: int) -> DecodeState:
        """Pads the state to `batch` slots; the new ones are free."""
        shardings = self._shardings(state.cache)
        if shardings is None:
            return with_slots(state, batch)
        same = jnp.arange(state.batch, dtype=jnp.int32)
        empty = kv_cache.with_batch(state.cache, batch)
        rest = with_slots(state.replace(cache=None), batch)
        return rest.replace(cache=kv_cache.copy_rows(empty, state.cache, same, same, shardings))

    def _shardings(self, cache: KVCache) -> KVCache | None:
        """Returns the layout of a cache whose slots are split; None where no device lacks a slot."""
        if self.mesh is None or row_multiple(self.mesh) == 1:
            return None
        return cache_shardings(cache, self.config, self.mesh)

    def _taken_counts(self, counts: Array | None, slots: Array) -> Array | None:
        if counts is None:
            return None
        if self.mesh is None or row_multiple(self.mesh) == 1:
            return counts[slots]
        into = jnp.zeros((len(slots), 1, counts.shape[1]), counts.dtype)
        order, sharding = jnp.arange(len(slots), dtype=jnp.int32), named(self.mesh, "slots", None, "vocab")
        return copy_slots(into, counts[:, None], slots, order, sharding)[:, 0]


def set_counts(state: DecodeState, slots: Array, tokens: Array) -> DecodeState:
    """Counts `tokens` [B, T] in slots [B], in place of the counts there; slot B and token V are ignored."""
    cleared = state.counts.at[slots].set(0, mode="drop")
    return state.replace(counts=cleared.at[slots[:, None], tokens].add(1, mode="drop"))


def with_slots(state: _Slots, batch: int) -> _Slots:
    """Pads all arrays to `batch` slots, their first axis; the new slots are free."""

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, batch - x.shape[0])] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(pad, state)
