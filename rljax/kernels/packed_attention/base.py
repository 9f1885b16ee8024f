"""Attention inside packed rows in plain JAX.

Scores are computed for pairs of a chunk of `KEY_CHUNK` queries and a chunk of as many keys. Rows are packed
so that sequences of at most one chunk lie within a chunk (`rljax/learning/packing.py`). So most queries are
paired with the keys of their own chunk only, and of these only with the blocks up to their own. The scores of
a whole row never exist, and nothing of their size is kept for the backward pass, which computes them again
(Dao et al., "FlashAttention", arXiv 2205.14135, algorithm 4). Unlike there, the forward pass finds a query's
largest score before it sums, since the sums must have the bits of the decoder's sums
(`rljax/engine/kv_cache.py`).

On a CPU a chunk of queries is paired with the earlier chunks of its sequence, one after another, in loops
whose turns depend on the segments. A GPU's host would wait for the device before every turn. So on an
accelerator a chunk is paired with all chunks that a sequence may reach back to, at once: a number that is
known when the program is traced. Scores of other sequences are -inf, so they add exact zeros.

On a TPU or GPU, bfloat16 is multiplied as the kernels of the decoder multiply it
(`rljax/kernels/tree_attention`): queries as they are, their scores scaled; terms rounded, their sum not. All
products then take one pass of bfloat16 with sums in float32, where exact float32 takes six on a TPU.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax import target
from rljax.numerics.attention import scale_queries, weigh_chunk
from rljax.numerics.loops import mapped
from rljax.numerics.products import exact_products
from rljax.numerics.rows import KEY_CHUNK, Numerics, row_max

_QUERY_BLOCK = 128
"""Number of queries that are paired with the same keys of their chunk, those up to the end of the block."""


def packed_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    numerics: Numerics,
    span: int | None = None,
    computed: Array | None = None,
    branches: Array | None = None,
) -> Array:
    """See `packed_attention.packed_attention`."""
    rows, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    block = min(_QUERY_BLOCK, length)
    chunk = min(KEY_CHUNK, -(-length // block) * block)
    num_chunks = -(-length // chunk)
    padding = num_chunks * chunk - length
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    batch, active = rows, None
    earlier = None if target.platform() == "cpu" else min(span or num_chunks, num_chunks) - 1
    if earlier is None and (computed is not None or (num_chunks > 1 and _is_one_cpu())):
        # The rows are joined to one, under ids that differ between rows: blocks are left out one by one,
        # and the chunks of a row are paired with those that this row needs.
        ids_before = np.arange(rows, dtype=np.int32)[:, None] * (length + 1)
        segment_ids = jnp.where(segment_ids > 0, segment_ids + ids_before, 0)
        if computed is not None:
            active = jnp.pad(computed, ((0, 0), (0, padding)))
            active = active.reshape(-1, chunk // block, block).any(axis=2)
        batch, num_chunks = 1, rows * num_chunks
    segment_ids = segment_ids.reshape(batch, num_chunks, chunk).swapaxes(0, 1)
    rounds = q.dtype == jnp.bfloat16 and target.platform() != "cpu"
    scale = head_dim**-0.5 if rounds else 1.0
    queries = q if rounds else scale_queries(q)
    queries = jnp.pad(queries, ((0, 0), (0, padding), (0, 0), (0, 0)))
    queries = queries.reshape(batch, num_chunks, chunk // block, block, num_kv_heads, -1, head_dim)
    queries = queries.transpose(1, 0, 4, 2, 5, 3, 6)  # [chunks, N, Hk, blocks, H / Hk, block, D]

    def chunked(x: Array) -> Array:
        x = jnp.pad(x.astype(queries.dtype), ((0, 0), (0, padding), (0, 0), (0, 0)))
        return x.reshape(batch, num_chunks, chunk, num_kv_heads, head_dim).transpose(1, 0, 3, 2, 4)

    # Built here, not in the loops: there it would be fused into everything that reads the scores, which
    # would then compile to scalar code (three times slower on a CPU).
    own_mask = segment_ids[:, :, :, None] == segment_ids[:, :, None, :]
    own_mask &= np.tri(chunk, dtype=bool)[None, None]
    if branches is not None:
        branches = jnp.pad(branches, ((0, 0), (0, padding)))
        branches = branches.reshape(batch, num_chunks, 1, chunk).swapaxes(0, 1)
        own_mask &= (branches == 0) | (branches == branches.swapaxes(2, 3))
    out = _attend(queries, chunked(k), chunked(v), segment_ids, own_mask, active, numerics, scale, earlier)
    return out.transpose(1, 0, 3, 5, 2, 4, 6).reshape(rows, -1, num_heads, head_dim)[:, :length]


def _is_one_cpu() -> bool:
    """Returns whether a row after another is faster than all together. An accelerator computes all rows in
    the time of one, and on a mesh rows lie on several devices.
    """
    return target.platform() == "cpu" and target.device_count() == 1


def _first_chunks(segment_ids: Array) -> Array:
    """Returns the first chunk of keys to pair with each chunk of queries, int32 [chunks]: the one in which
    the earliest sequence of the queries starts, over all rows. Segment ids are [chunks, N, chunk].
    """
    entering = segment_ids[:, None, :, 0]  # first segments of the queries, [chunks, 1, N]
    leaving = segment_ids[None, :, :, -1]  # last segments of the keys, [1, chunks, N]
    earlier = np.tri(len(segment_ids), k=-1, dtype=bool)
    shared = jnp.any((entering == leaving) & (entering > 0), axis=-1) & earlier
    numbers = jnp.arange(len(segment_ids), dtype=jnp.int32)
    return jnp.where(jnp.any(shared, axis=1), jnp.argmax(shared, axis=1).astype(jnp.int32), numbers)


def _at(x: Array, index: Array) -> Array:
    """Returns x[index], for an index that is within bounds."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def _own_blocks(chunk: int, block: int) -> Iterator[tuple[int, slice, slice]]:
    """Yields the blocks of a chunk: number, positions of the queries, positions of their visible keys."""
    for number in range(chunk // block):
        yield number, slice(number * block, (number + 1) * block), slice(0, (number + 1) * block)


def _scores(queries: Array, keys: Array, scale: float = 1.0) -> Array:
    """Multiplies queries [N, Hk, ..., block, D] by keys [N, Hk, C, D], and scales the result: float32
    [N, Hk, ..., block, C].
    """
    batch, heads, *rest, head_dim = queries.shape
    rows = queries.reshape(batch, heads, -1, head_dim)
    exact = exact_products() if rows.dtype == jnp.float32 else None  # a product of bfloat16 is exact
    scores = jnp.einsum("nhrd,nhsd->nhrs", rows, keys, precision=exact, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, *rest, -1)
    return scores if scale == 1.0 else scores * scale


def _own_scores(queries: Array, keys: Array, mask: Array, scale: float) -> Array:
    """Returns scores of a block of queries [N, Hk, g, block, D] and keys [N, Hk, C, D] of the same chunk,
    masked by [N, block, C].
    """
    return jnp.where(mask[:, None, None], _scores(queries, keys, scale), -jnp.inf)


def _earlier_scores(
    queries: Array, rows: slice, keys: Array, query_segments: Array, key_segments: Array, scale: float
) -> Array:
    """Returns scores of queries [N, Hk, blocks, g, block, D] against an earlier chunk of keys. They are the
    queries at positions `rows` of their chunk.

    Only the sequence of the chunk's first position can begin in an earlier chunk. Segments are [N, C].
    """
    shared = query_segments[:, :1]
    blocks, block = queries.shape[2], queries.shape[4]
    hide_queries = jnp.where(query_segments[:, rows] == shared, 0.0, -jnp.inf)
    hide_queries = hide_queries.reshape(-1, 1, blocks, 1, block, 1)
    hide_keys = jnp.where((key_segments == shared) & (shared > 0), 0.0, -jnp.inf)
    return _scores(queries, keys, scale) + hide_keys[:, None, None, None, None, :] + hide_queries


def _weigh(terms: Array, values: Array, numerics: Numerics) -> tuple[Array, Array]:
    """As `weigh_chunk`: terms [N, Hk, ..., C], values [N, Hk, C, D] -> [N, Hk, ..., 1], [N, Hk, ..., D]."""
    batch, heads, *rest, chunk = terms.shape
    terms = terms.reshape(batch, heads, -1, chunk)
    if values.dtype == jnp.float32:
        sums = weigh_chunk(terms, values, numerics)
    else:
        sums = jnp.sum(terms, axis=-1, keepdims=True), _rounded_product("nhrs,nhsd->nhrd", terms, values)
    return jax.tree.map(lambda x: x.reshape(batch, heads, *rest, -1), sums)


def _rounded_product(equation: str, a: Array, b: Array) -> Array:
    """Returns an einsum of a, rounded to the type of b, and b, with sums in float32."""
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attend(
    queries: Array,
    keys: Array,
    values: Array,
    segment_ids: Array,
    own_mask: Array,
    active: Array | None,
    numerics: Numerics,
    scale: float,
    earlier: int | None,
) -> Array:
    """Computes attention of every chunk of queries.

    Args:
      queries: [chunks, N, Hk, blocks, g, block, D] (g query heads per key head), scaled float32, or bfloat16.
      keys, values: [chunks, N, Hk, C, D], in the type of the queries.
      segment_ids: int32 [chunks, N, C].
      own_mask: bool [chunks, N, C, C], keys visible to each query in its chunk; at least itself.
      active: bool [chunks, blocks], blocks of queries to compute; the others give 0. None: all of them.
      scale: factor of the scores.
      earlier: number of chunks before their own that queries are paired with; None: those of their sequences.

    Returns:
      float32, in the shape of the queries.
    """
    return _forward(queries, keys, values, segment_ids, own_mask, active, numerics, scale, earlier)[0]


def _windows(chunks: int, earlier: int | None) -> list[tuple[int, int, int | None]]:
    """Divides chunks of queries, for up to `earlier` chunks of keys before their own: the first, the one
    after the last, and how many earlier chunks each is paired with; None for those of its sequence.

    Quarters of a row, as far as they differ: of a row that is one sequence 5/8 of all pairs are computed, and
    half are needed.
    """
    if earlier is None:
        return [(0, chunks, None)]
    bounds = sorted({-(-chunks * quarter // 4) for quarter in range(5)})
    parts: list[tuple[int, int, int | None]] = []
    for start, stop in itertools.pairwise(bounds):
        width = min(earlier, stop - 1)
        if parts and parts[-1][2] == width:
            start = parts.pop()[0]
        parts.append((start, stop, width))
    return parts


def _behind_zeros(x: Array, earlier: int) -> Array:
    """Adds `earlier` chunks of zeros before the first, so that each chunk has a window before it."""
    return jnp.pad(x, ((earlier, 0), *[(0, 0)] * (x.ndim - 1)))


def _window(x: Array, number: Array, width: int, earlier: int) -> Array:
    """Returns the `width` chunks before a chunk, of what `_behind_zeros` returned."""
    return lax.dynamic_slice_in_dim(x, number + (earlier - width), width, allow_negative_indices=False)


def _block_groups(blocks: int, active: Array | None) -> list[slice]:
    """Returns the blocks of a chunk that are computed together: all, or one by one if some are left out."""
    return [slice(0, blocks)] if active is None else [slice(block, block + 1) for block in range(blocks)]


def _if_active(active: Array | None, compute: Callable[[slice, Array], Any]) -> Callable[[slice, Array], Any]:
    """Wraps a function of a group of blocks and a chunk's number to give zeros where it is not active."""
    if active is None:
        return compute

    def compute_active(group: slice, number: Array) -> Any:
        shapes = jax.eval_shape(functools.partial(compute, group), number)
        zeros = lambda _: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # noqa: E731
        return lax.cond(active[number, group.start], functools.partial(compute, group), zeros, number)

    return compute_active


def _forward(
    queries: Array,
    keys: Array,
    values: Array,
    segment_ids: Array,
    own_mask: Array,
    active: Array | None,
    numerics: Numerics,
    scale: float,
    earlier: int | None,
) -> tuple[Array, tuple[Array | None, ...]]:
    first = _first_chunks(segment_ids)
    windowed = [_behind_zeros(x, earlier) for x in (keys, values, segment_ids)] if earlier else []
    own_blocks = list(_own_blocks(keys.shape[3], queries.shape[5]))
    groups = _block_groups(len(own_blocks), active)

    def attend_group(width: int | None, group: slice, number: Array) -> tuple[Array, Array]:
        own_queries, own_segments = _at(queries, number)[:, :, group], _at(segment_ids, number)
        group_blocks = own_blocks[group]
        group_rows = slice(group_blocks[0][1].start, group_blocks[-1][1].stop)

        def scores(keys: Array, segment_ids: Array) -> Array:
            return _earlier_scores(own_queries, group_rows, keys, own_segments, segment_ids, scale)

        def find_top(chunk: Array, top: Array) -> Array:
            return jnp.maximum(top, row_max(scores(_at(keys, chunk), _at(segment_ids, chunk))))

        def weighed(scores: Array, values: Array) -> tuple[Array, Array]:
            return _weigh(jnp.exp(scores - top), values, numerics)

        def add(chunk: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            more = weighed(scores(_at(keys, chunk), _at(segment_ids, chunk)), _at(values, chunk))
            return jax.tree.map(jnp.add, sums, more)

        own_scores = [
            _own_scores(
                _at(queries, number)[:, :, block],
                _at(keys, number)[:, :, visible],
                _at(own_mask, number)[:, rows, visible],
                scale,
            )
            for block, rows, visible in group_blocks
        ]
        top = jnp.stack([row_max(block_scores) for block_scores in own_scores], axis=2)
        # Chunks are added in the order of the decoder, the chunk of the queries last.
        sums = (jnp.zeros_like(top), jnp.zeros(own_queries.shape, jnp.float32))
        if width is None and len(queries) > 1:
            top = lax.fori_loop(first[number], number, find_top, top)
            sums = lax.fori_loop(first[number], number, add, sums)
        elif width:
            its_keys, its_values, its_segments = (_window(x, number, width, earlier) for x in windowed)
            its_scores = jax.vmap(scores)(its_keys, its_segments)
            top = jnp.maximum(top, jnp.max(row_max(its_scores), axis=0))
            sums = _in_order(sums, jax.vmap(weighed)(its_scores, its_values))
        last = [
            _weigh(jnp.exp(block_scores - top[:, :, index]), _at(values, number)[:, :, visible], numerics)
            for index, (block_scores, (_, _, visible)) in enumerate(
                zip(own_scores, group_blocks, strict=True)
            )
        ]
        last = jax.tree.map(lambda *parts: jnp.stack(parts, axis=2), *last)
        total, weighted = jax.tree.map(jnp.add, sums, last)
        return weighted / total, top + jnp.log(total)

    def attend(width: int | None, number: Array) -> tuple[Array, Array]:
        attend_active = _if_active(active, functools.partial(attend_group, width))
        parts = [attend_active(group, number) for group in groups]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *parts)

    parts = [
        mapped(functools.partial(attend, width), jnp.arange(start, stop, dtype=jnp.int32), queries)
        for start, stop, width in _windows(len(queries), earlier)
    ]
    out, normalizer = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return out, (queries, keys, values, segment_ids, own_mask, active, first, out, normalizer)


def _in_order(sums: Any, parts: Any) -> Any:
    """Adds the entries of arrays [n, ...] to sums [...], one after another."""
    for number in range(len(jax.tree.leaves(parts)[0])):
        sums = jax.tree.map(lambda total, part, number=number: total + part[number], sums, parts)
    return sums


def _pair_gradients(
    queries: Array,
    keys: Array,
    values: Array,
    scores: Array,
    normalizer: Array,
    gradient: Array,
    offset: Array,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Returns the contributions of a pair to the gradients of queries, keys and values.

    Args:
      queries, gradient: [N, Hk, ..., D], queries and the gradient of their attention output.
      keys, values: [N, Hk, C, D].
      scores: [N, Hk, ..., C].
      normalizer, offset: [N, Hk, ..., 1], log-sum-exp of the scores; sum of gradient times output.
      scale: factor of the scores.
    """
    batch, heads, chunk = scores.shape[0], scores.shape[1], scores.shape[-1]
    flat = (batch, heads, -1, queries.shape[-1])
    # The output is rounded to the type of the queries, so in bfloat16 its gradient has no more digits.
    gradient = gradient.astype(queries.dtype)
    shares = jnp.exp(scores - normalizer)
    to_scores = (shares * (_scores(gradient, values) - offset)).reshape(batch, heads, -1, chunk)
    to_scores = to_scores if scale == 1.0 else to_scores * scale
    return (
        _rounded_product("nhrs,nhsd->nhrd", to_scores, keys).reshape(queries.shape),
        _rounded_product("nhrs,nhrd->nhsd", to_scores, queries.reshape(flat)),
        _rounded_product("nhrs,nhrd->nhsd", shares.reshape(to_scores.shape), gradient.reshape(flat)),
    )


def _backward(
    numerics: Numerics,
    scale: float,
    earlier: int | None,
    kept: tuple[Array | None, ...],
    gradient: Array,
) -> tuple[Array | None, ...]:
    del numerics
    queries, keys, values, segment_ids, own_mask, active, first, out, normalizer = kept
    own_blocks = list(_own_blocks(keys.shape[3], queries.shape[5]))
    offset = jnp.sum(gradient * out, axis=-1, keepdims=True)
    Gradients = tuple[Array, Array, Array]  # gradients of queries, keys and values

    groups = _block_groups(len(own_blocks), active)

    def own_group(group: slice, number: Array) -> Gradients:
        """Returns gradients of attention within one chunk, for some of its queries."""
        to_blocks, to_keys, to_values = [], 0.0, 0.0
        for block, rows, visible in own_blocks[group]:
            block_queries, visible_keys = _at(queries, number)[:, :, block], _at(keys, number)[:, :, visible]
            to_block, more_keys, more_values = _pair_gradients(
                block_queries,
                visible_keys,
                _at(values, number)[:, :, visible],
                _own_scores(block_queries, visible_keys, _at(own_mask, number)[:, rows, visible], scale),
                _at(normalizer, number)[:, :, block],
                _at(gradient, number)[:, :, block],
                _at(offset, number)[:, :, block],
                scale,
            )
            pad_after = [(0, 0), (0, 0), (0, keys.shape[3] - visible.stop), (0, 0)]
            to_blocks.append(to_block)
            to_keys += jnp.pad(more_keys, pad_after)
            to_values += jnp.pad(more_values, pad_after)
        return jnp.stack(to_blocks, axis=2), to_keys, to_values

    own_active = _if_active(active, own_group)

    def own_chunk(number: Array) -> Gradients:
        parts = [own_active(group, number) for group in groups]
        to_blocks, to_keys, to_values = zip(*parts, strict=True)
        return jnp.concatenate(to_blocks, axis=2), sum(to_keys), sum(to_values)

    def pair(group: slice, number: Array, keys: Array, values: Array, key_segments: Array) -> Gradients:
        """Returns gradients of a pair of some of a chunk's queries and an earlier chunk of keys."""
        group_queries = _at(queries, number)[:, :, group]
        group_rows = slice(own_blocks[group][0][1].start, own_blocks[group][-1][1].stop)
        query_segments = _at(segment_ids, number)
        return _pair_gradients(
            group_queries,
            keys,
            values,
            _earlier_scores(group_queries, group_rows, keys, query_segments, key_segments, scale),
            _at(normalizer, number)[:, :, group],
            _at(gradient, number)[:, :, group],
            _at(offset, number)[:, :, group],
            scale,
        )

    def earlier_chunks(number: Array, sums: Gradients) -> Gradients:
        for group in groups:
            sums = earlier_chunks_of(group, number, sums)
        return sums

    def earlier_chunks_of(group: slice, number: Array, sums: Gradients) -> Gradients:
        def add_pair(chunk: Array, sums: Gradients) -> Gradients:
            of_chunk = (_at(x, chunk) for x in (keys, values, segment_ids))
            to_queries, to_keys, to_values = pair(group, number, *of_chunk)
            return (
                sums[0].at[number, :, :, group].add(to_queries),
                sums[1].at[chunk].add(to_keys),
                sums[2].at[chunk].add(to_values),
            )

        start = first[number]
        if active is not None:  # nothing to add for the others
            start = jnp.where(active[number, group.start], start, number)
        return lax.fori_loop(start, number, add_pair, sums)

    # Two passes: sums carried through the first would be copied at every chunk.
    sums = mapped(own_chunk, jnp.arange(len(queries), dtype=jnp.int32), gradient)
    if earlier is None and len(queries) > 1:
        sums = lax.fori_loop(jnp.int32(1), jnp.int32(len(queries)), earlier_chunks, sums)
    elif earlier:
        sums = _add_windows(sums, functools.partial(pair, groups[0]), (keys, values, segment_ids), earlier)
    return *(total.astype(queries.dtype) for total in sums), None, None, None


def _add_windows(sums: Any, pair: Callable[..., Any], keys: tuple[Array, ...], earlier: int) -> Any:
    """Adds the gradients of all pairs with earlier chunks: of queries, keys and values."""
    windowed = [_behind_zeros(x, earlier) for x in keys]
    to_queries, *to_keys = (sums[0], *(_behind_zeros(x, earlier) for x in sums[1:]))

    def add(width: int, number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        to_queries, *to_keys = sums
        more_queries, *more_keys = jax.vmap(functools.partial(pair, number))(
            *(_window(x, number, width, earlier) for x in windowed)
        )
        added = [
            lax.dynamic_update_slice_in_dim(
                x, _window(x, number, width, earlier) + more, number + (earlier - width), 0
            )
            for x, more in zip(to_keys, more_keys, strict=True)
        ]
        return to_queries.at[number].set(_in_order(to_queries[number], more_queries)), *added

    for start, stop, width in _windows(len(to_queries), earlier):
        if width:
            body = functools.partial(add, width)
            to_queries, *to_keys = lax.fori_loop(
                np.int32(start), np.int32(stop), body, (to_queries, *to_keys)
            )
    return to_queries, *(x[earlier:] for x in to_keys)


_attend.defvjp(_forward, _backward)
