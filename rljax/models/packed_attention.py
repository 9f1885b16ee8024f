"""Attention inside packed rows: training, scoring and prefill.

Chunks of `KEY_CHUNK` queries meet chunks of as many keys, one pair at a time, and only the pairs that share a
sequence: rows are packed so that sequences not longer than a chunk lie within one
(`rljax/learning/packing.py`), so most queries meet only their own chunk, and of that only what is not behind
them. The scores of a whole row never exist, and nothing of their size is kept for the backward pass, which
computes them again (Dao et al., "FlashAttention", arXiv 2205.14135, algorithm 4). Unlike there, the forward
pass finds a query's largest score before it sums, since the sums must have the bits of the decoder's
(`rljax/engine/kv_cache.py`).
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.numerics.attention import scale_queries, weigh_chunk
from rljax.numerics.rows import KEY_CHUNK, Numerics, exact_products, row_max

_QUERY_BLOCK = 128
"""Queries that meet the same keys of their own chunk: those up to the block's end."""


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """Causal attention inside the segments of packed rows.

    Attributes:
      segment_ids: int32 [N, S]; tokens attend only within their segment, whose tokens lie side by side. 0 is
        padding (its outputs mean nothing). With fewer than S tokens, what is missing is padding, too.
      numerics: see `Numerics`.
      keep_kv: also return every layer's keys and values (prefill does).
    """

    segment_ids: Array
    numerics: Numerics
    keep_kv: bool = False

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array] | None]:
        """q [N, T, H, D], k and v [N, T, Hk, D] -> ([N, T, H, D], (k, v) [N, S, Hk, D] or None)."""
        batch, tokens, num_heads, head_dim = q.shape
        length = self.segment_ids.shape[1]
        q, k, v = (jnp.pad(x, ((0, 0), (0, length - tokens), (0, 0), (0, 0))) for x in (q, k, v))
        num_kv_heads = k.shape[2]
        block = min(_QUERY_BLOCK, length)
        chunk = min(KEY_CHUNK, -(-length // block) * block)
        num_chunks = -(-length // chunk)
        padding = num_chunks * chunk - length
        segment_ids = jnp.pad(self.segment_ids, ((0, 0), (0, padding)))
        segment_ids = segment_ids.reshape(batch, num_chunks, chunk).swapaxes(0, 1)
        queries = jnp.pad(scale_queries(q), ((0, 0), (0, padding), (0, 0), (0, 0)))
        queries = queries.reshape(batch, num_chunks, chunk // block, block, num_kv_heads, -1, head_dim)
        queries = queries.transpose(1, 0, 4, 2, 5, 3, 6)  # [chunks, N, Hk, blocks, H / Hk, block, D]

        def chunked(x: Array) -> Array:
            x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padding), (0, 0), (0, 0)))
            return x.reshape(batch, num_chunks, chunk, num_kv_heads, head_dim).transpose(1, 0, 3, 2, 4)

        # Built once for all layers, not in the loops: there it would be fused into everything that reads the
        # scores, which then compile to scalar code (three times slower on a CPU).
        own_mask = segment_ids[:, :, :, None] == segment_ids[:, :, None, :]
        own_mask &= np.tri(chunk, dtype=bool)[None, None]
        out = _attend(queries, chunked(k), chunked(v), segment_ids, own_mask, self.numerics)
        out = out.transpose(1, 0, 3, 5, 2, 4, 6).reshape(batch, num_chunks * chunk, num_heads, head_dim)
        return out[:, :tokens].astype(q.dtype), ((k, v) if self.keep_kv else None)


def _first_chunks(segment_ids: Array) -> Array:
    """The first chunk that each chunk of queries must meet, int32 [chunks]: where the earliest sequence that
    reaches into the block starts, over all rows. Segment ids are [chunks, N, chunk].
    """
    entering = segment_ids[:, None, :, 0]  # of the queries, [chunks, 1, N]
    leaving = segment_ids[None, :, :, -1]  # of the keys, [1, chunks, N]
    earlier = np.tri(len(segment_ids), k=-1, dtype=bool)
    shared = jnp.any((entering == leaving) & (entering > 0), axis=-1) & earlier
    own = jnp.arange(len(segment_ids), dtype=jnp.int32)
    return jnp.where(jnp.any(shared, axis=1), jnp.argmax(shared, axis=1).astype(jnp.int32), own)


def _own_blocks(chunk: int, block: int) -> Iterator[tuple[int, slice, slice]]:
    """Blocks of a chunk's queries: number, positions of the queries, and of the keys that they may see."""
    for number in range(chunk // block):
        yield number, slice(number * block, (number + 1) * block), slice(0, (number + 1) * block)


def _scores(queries: Array, keys: Array) -> Array:
    """Queries [N, Hk, ..., block, D] against keys [N, Hk, C, D]: float32 [N, Hk, ..., block, C]."""
    batch, heads, *rest, head_dim = queries.shape
    rows = queries.reshape(batch, heads, -1, head_dim)
    scores = jnp.einsum("nhrd,nhsd->nhrs", rows, keys, precision=exact_products())
    return scores.reshape(batch, heads, *rest, -1)


def _own_scores(queries: Array, keys: Array, mask: Array) -> Array:
    """Scores of a block of queries [N, Hk, g, block, D] and keys [N, Hk, C, D] of the same chunk, masked by
    [N, block, C].
    """
    return jnp.where(mask[:, None, None], _scores(queries, keys), -jnp.inf)


def _earlier_scores(queries: Array, keys: Array, query_segments: Array, key_segments: Array) -> Array:
    """Scores of a chunk of queries [N, Hk, blocks, g, block, D] against an earlier chunk of keys.

    All that a chunk can share with earlier ones is the sequence that its first position belongs to. Segments
    are [N, C].
    """
    shared = query_segments[:, :1]
    blocks, block = queries.shape[2], queries.shape[4]
    hide_queries = jnp.where(query_segments == shared, 0.0, -jnp.inf)
    hide_queries = hide_queries.reshape(-1, 1, blocks, 1, block, 1)
    hide_keys = jnp.where((key_segments == shared) & (shared > 0), 0.0, -jnp.inf)
    return _scores(queries, keys) + hide_keys[:, None, None, None, None, :] + hide_queries


def _weigh(terms: Array, values: Array, numerics: Numerics) -> tuple[Array, Array]:
    """`weigh_chunk` of terms [N, Hk, ..., C] and values [N, Hk, C, D]; [N, Hk, ..., 1], [N, Hk, ..., D]."""
    batch, heads, *rest, chunk = terms.shape
    sums = weigh_chunk(terms.reshape(batch, heads, -1, chunk), values, numerics)
    return jax.tree.map(lambda x: x.reshape(batch, heads, *rest, -1), sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    queries: Array, keys: Array, values: Array, segment_ids: Array, own_mask: Array, numerics: Numerics
) -> Array:
    """Attention of every chunk of queries.

    Args:
      queries: scaled, float32 [chunks, N, Hk, blocks, g, block, D] (g query heads per key head).
      keys, values: float32 [chunks, N, Hk, C, D].
      segment_ids: int32 [chunks, N, C].
      own_mask: bool [chunks, N, C, C], which keys of its own chunk a query sees: itself at least.

    Returns:
      float32, of the queries' shape.
    """
    return _forward(queries, keys, values, segment_ids, own_mask, numerics)[0]


def _forward(
    queries: Array, keys: Array, values: Array, segment_ids: Array, own_mask: Array, numerics: Numerics
) -> tuple[Array, tuple[Array, ...]]:
    first = _first_chunks(segment_ids)
    own_blocks = list(_own_blocks(keys.shape[3], queries.shape[5]))

    def attend(number: Array) -> tuple[Array, Array]:
        mine, my_segments = queries[number], segment_ids[number]

        def scores(chunk: Array) -> Array:
            return _earlier_scores(mine, keys[chunk], my_segments, segment_ids[chunk])

        def find_top(chunk: Array, top: Array) -> Array:
            return jnp.maximum(top, row_max(scores(chunk)))

        def add(chunk: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            more = _weigh(jnp.exp(scores(chunk) - top), values[chunk], numerics)
            return jax.tree.map(jnp.add, sums, more)

        own_scores = [
            _own_scores(mine[:, :, block], keys[number][:, :, seen], own_mask[number][:, own, seen])
            for block, own, seen in own_blocks
        ]
        top = jnp.stack([row_max(each) for each in own_scores], axis=2)
        top = lax.fori_loop(first[number], number, find_top, top)
        # One chunk after the other, the queries' own last: the order of the decoder.
        earlier = (jnp.zeros_like(top), jnp.zeros_like(mine))
        earlier = lax.fori_loop(first[number], number, add, earlier)
        last = [
            _weigh(jnp.exp(each - top[:, :, block]), values[number][:, :, seen], numerics)
            for each, (block, _, seen) in zip(own_scores, own_blocks, strict=True)
        ]
        last = jax.tree.map(lambda *each: jnp.stack(each, axis=2), *last)
        total, weighted = jax.tree.map(jnp.add, earlier, last)
        return weighted / total, top + jnp.log(total)

    out, normalizer = lax.map(attend, jnp.arange(len(queries), dtype=jnp.int32))
    return out, (queries, keys, values, segment_ids, own_mask, first, out, normalizer)


def _pair_gradients(
    queries: Array,
    keys: Array,
    values: Array,
    scores: Array,
    normalizer: Array,
    gradient: Array,
    offset: Array,
) -> tuple[Array, Array, Array]:
    """What queries and keys that have met add to each other's gradients, and to those of the values.

    Args:
      queries, gradient: [N, Hk, ..., D], the gradient of what the queries attended to.
      keys, values: [N, Hk, C, D].
      scores: [N, Hk, ..., C].
      normalizer, offset: [N, Hk, ..., 1], log-sum-exp of the scores; gradient times attended, summed.
    """
    batch, heads, chunk = scores.shape[0], scores.shape[1], scores.shape[-1]
    flat = (batch, heads, -1, queries.shape[-1])
    shares = jnp.exp(scores - normalizer)
    to_scores = (shares * (_scores(gradient, values) - offset)).reshape(batch, heads, -1, chunk)
    return (
        jnp.einsum("nhrs,nhsd->nhrd", to_scores, keys).reshape(queries.shape),
        jnp.einsum("nhrs,nhrd->nhsd", to_scores, queries.reshape(flat)),
        jnp.einsum("nhrs,nhrd->nhsd", shares.reshape(to_scores.shape), gradient.reshape(flat)),
    )


def _backward(numerics: Numerics, kept: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
    del numerics
    queries, keys, values, segment_ids, own_mask, first, out, normalizer = kept
    own_blocks = list(_own_blocks(keys.shape[3], queries.shape[5]))
    offset = jnp.sum(gradient * out, axis=-1, keepdims=True)
    Gradients = tuple[Array, Array, Array]  # of queries, keys and values

    def own_chunk(number: Array) -> Gradients:
        """Gradients of attention within one chunk."""
        to_blocks, to_keys, to_values = [], 0.0, 0.0
        for block, own, seen in own_blocks:
            my_queries, my_keys = queries[number][:, :, block], keys[number][:, :, seen]
            to_block, more_keys, more_values = _pair_gradients(
                my_queries,
                my_keys,
                values[number][:, :, seen],
                _own_scores(my_queries, my_keys, own_mask[number][:, own, seen]),
                normalizer[number][:, :, block],
                gradient[number][:, :, block],
                offset[number][:, :, block],
            )
            behind = [(0, 0), (0, 0), (0, keys.shape[3] - seen.stop), (0, 0)]
            to_blocks.append(to_block)
            to_keys += jnp.pad(more_keys, behind)
            to_values += jnp.pad(more_values, behind)
        return jnp.stack(to_blocks, axis=2), to_keys, to_values

    def earlier_chunks(number: Array, sums: Gradients) -> Gradients:
        def meet(chunk: Array, sums: Gradients) -> Gradients:
            scores = _earlier_scores(queries[number], keys[chunk], segment_ids[number], segment_ids[chunk])
            to_queries, to_keys, to_values = _pair_gradients(
                queries[number],
                keys[chunk],
                values[chunk],
                scores,
                normalizer[number],
                gradient[number],
                offset[number],
            )
            return (
                sums[0].at[number].add(to_queries),
                sums[1].at[chunk].add(to_keys),
                sums[2].at[chunk].add(to_values),
            )

        return lax.fori_loop(first[number], number, meet, sums)

    # Two passes: sums carried through the first would be copied at every chunk, needed or not.
    sums = lax.map(own_chunk, jnp.arange(len(queries), dtype=jnp.int32))
    sums = lax.fori_loop(jnp.int32(1), jnp.int32(len(queries)), earlier_chunks, sums)
    return *sums, None, None


_attend.defvjp(_forward, _backward)
