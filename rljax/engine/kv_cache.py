"""The KV cache of the decode engine, and attention against it.

Keys are stored in blocks of `KEY_BLOCK` positions, transposed within a block, so that the scores of a block
are read off one contiguous piece of memory with the positions in the vector lanes: on a CPU this runs at
memory bandwidth, where a batched product over [S, D] keys reached a tenth of it (`docs/engine.md`). Values
stay [S, D]. Entries at or behind the length of a slot have no effect, whatever they hold.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax import target
from rljax.engine.slot_exchange import copy_slots
from rljax.kernels import on_mesh
from rljax.models.config import ModelConfig
from rljax.models.outlining import traced_once
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.rows import Numerics


@struct.dataclass
class KVCache:
    """Keys and values of every layer.

    Attributes:
      keys: a list over layers of [B, Hk, S / KEY_BLOCK, D, KEY_BLOCK].
      values: a list over layers of [B, Hk, S, D].
    """

    keys: list[Array]
    values: list[Array]

    @property
    def batch(self) -> int:
        return self.values[0].shape[0]

    @property
    def length(self) -> int:
        """Number of positions per slot, S."""
        return self.values[0].shape[2]

    def layers(self) -> list[tuple[Array, Array]]:
        """Returns keys and values of each layer."""
        return list(zip(self.keys, self.values, strict=True))

    @classmethod
    def of_layers(cls, layers: Sequence[tuple[Array, Array]]) -> "KVCache":
        """Returns the cache with these keys and values of each layer."""
        return cls(keys=[keys for keys, _ in layers], values=[values for _, values in layers])


def cache_dtype(numerics: Numerics) -> jnp.dtype:
    """Returns the dtype of keys and values: the compute dtype, but float32 on a CPU.

    There, products of mixed types use kernels that round differently, and cost more than the memory they
    save.
    """
    return jnp.dtype(jnp.float32) if target.platform() == "cpu" else numerics.dtype


def empty_cache(config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> KVCache:
    """Returns a cache of zeros for `batch` slots of `length` positions (a multiple of KEY_BLOCK)."""
    heads, dim = config.num_kv_heads, config.head_dim
    return KVCache(
        keys=[
            jnp.zeros((batch, heads, length // KEY_BLOCK, dim, KEY_BLOCK), dtype)
            for _ in range(config.num_layers)
        ],
        values=[jnp.zeros((batch, heads, length, dim), dtype) for _ in range(config.num_layers)],
    )


def from_prefill(kept: list[tuple[Array, Array]], dtype: jnp.dtype) -> KVCache:
    """Returns a cache of prefilled keys and values, [N, T, Hk, D] per layer. T is a multiple of KEY_BLOCK."""

    def blocked(k: Array) -> Array:
        batch, length, heads, dim = k.shape
        return k.reshape(batch, length // KEY_BLOCK, KEY_BLOCK, heads, dim).transpose(0, 3, 1, 4, 2)

    return KVCache(
        keys=[blocked(k.astype(dtype)) for k, _ in kept],
        values=[v.astype(dtype).transpose(0, 2, 1, 3) for _, v in kept],
    )


def with_batch(cache: KVCache, batch: int) -> KVCache:
    """Returns zeros in the shape of `cache`, but for `batch` slots."""

    def zeros(arrays: list[Array]) -> list[Array]:
        return [jnp.zeros((batch, *x.shape[1:]), x.dtype) for x in arrays]

    return KVCache(keys=zeros(cache.keys), values=zeros(cache.values))


def copy_rows(
    target: KVCache, source: KVCache, rows: Array, slots: Array, shardings: KVCache | None = None
) -> KVCache:
    """Copies row rows[i] of `source` into slot slots[i] of `target`, which is at least as long. Slots out of
    range are skipped.

    Args:
      rows, slots: int32 [N].
      shardings: layout of both caches, as from `cache_shardings`, where devices split the slots.
    """
    blocks, length = source.keys[0].shape[2], source.length

    def copy(into: Array, from_: Array, extent: int) -> Array:
        return into.at[slots, :, :extent].set(from_[rows], mode="drop")

    if shardings is None:
        return KVCache(
            keys=[copy(t, s, blocks) for t, s in zip(target.keys, source.keys, strict=True)],
            values=[copy(t, s, length) for t, s in zip(target.values, source.values, strict=True)],
        )
    return jax.tree.map(
        lambda into, from_, sharding: copy_slots(into, from_, rows, slots, sharding),
        target,
        source,
        shardings,
    )


def commit(
    cache: KVCache,
    nodes: list[tuple[Array, Array]],
    path: Array,
    count: Array,
    lengths: Array,
    numerics: Numerics,
) -> KVCache:
    """Writes keys and values of an accepted path after the committed tokens.

    Args:
      cache: KV cache of the committed tokens.
      nodes: keys and values of the draft nodes, [B, M, Hk, D] per layer.
      path: int32 [B, M], node of the path at every depth.
      count: int32 [B], number of nodes to write.
      lengths: int32 [B], committed tokens.
      numerics: its kernels choose the implementation.
    """

    @traced_once
    def write(keys: Array, values: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return on_mesh.compaction(keys, values, k, v, path, count, lengths, numerics.kernels)

    layers = zip(cache.keys, cache.values, nodes, strict=True)
    return KVCache.of_layers([write(keys, values, *node) for keys, values, node in layers])


def take_slots(cache: KVCache, slots: Array, shardings: KVCache | None = None) -> KVCache:
    """Returns a cache of only `slots`, int32 [B'], in that order. `shardings` as in `copy_rows`."""
    if shardings is None:
        return KVCache(keys=[k[slots] for k in cache.keys], values=[v[slots] for v in cache.values])
    order = jnp.arange(len(slots), dtype=jnp.int32)
    return copy_rows(with_batch(cache, len(slots)), cache, slots, order, shardings)


def lengthen(cache: KVCache, length: int) -> KVCache:
    """Returns the cache with room for `length` positions per slot."""
    more = length - cache.length

    def pad(x: Array, amount: int) -> Array:
        return jnp.pad(x, [(0, amount) if axis == 2 else (0, 0) for axis in range(x.ndim)])

    return KVCache(
        keys=[pad(k, more // KEY_BLOCK) for k in cache.keys], values=[pad(v, more) for v in cache.values]
    )


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """Attention of one new token per slot against the cache: writes its key and value, then reads.

    Attributes:
      positions: position of each slot's token, int32 [B].
    """

    positions: Array
    numerics: Numerics

    def __call__(
        self, cache: tuple[Array, Array], q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Maps keys and values of the layer's cache, q [B, 1, H, D] and k, v [B, 1, Hk, D] to ([B, 1, H, D],
        keys and values with this token).
        """
        keys, values = cache
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        out, *cache = on_mesh.decode_attention(q, keys, values, self.positions, k, v, self.numerics)
        return out, tuple(cache)
