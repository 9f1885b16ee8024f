"""The arithmetic of softmax attention, shared by everything that attends.

Attention takes the same three steps in packed training rows (`rljax/models/packed_attention.py`) and in a KV
cache (`rljax/engine/kv_cache.py`): float32 scores; their exact maximum; sums of exponentials and of weighted
values, one chunk of keys after another.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from rljax import target
from rljax.numerics.products import exact_products
from rljax.numerics.rows import KEY_CHUNK, Numerics, exp, row_max, row_sum

MASKED = -1e30
"""The score of a masked key: finite, so that a row with no visible key yields zeros instead of NaN.
"""
KEY_BLOCK = 64
"""Positions in a block of cached keys; see `block_scores`."""
_ADDED_AT_ONCE = 8
"""Values that `add_weighted` adds in one expression; it adds more of them in a loop."""
_MIN_VALUE_LANES = 64  # narrower products take a kernel that is not row-invariant


def softmax_terms(scores: Array, top: Array) -> Array:
    """Returns exp(score - top), exactly 0 for masked scores (below MASKED / 2).

    Args:
      scores: float32 [..., S].
      top: float32 [..., 1], the largest score of each row.
    """
    return jnp.where(scores > 0.5 * MASKED, exp(scores - top), 0.0)


def weigh_chunk(terms: Array, values: Array, numerics: Numerics) -> tuple[Array, Array]:
    """Returns the sum of softmax terms, and of values weighted by them, over one chunk of keys.

    Args:
      terms: float32 [..., R, C].
      values: float32 [..., C, D].

    Returns:
      float32 [..., R, 1] and [..., R, D].
    """
    head_dim = values.shape[-1]
    if numerics.row_invariant and head_dim < _MIN_VALUE_LANES:
        lanes = [(0, 0)] * (values.ndim - 1) + [(0, _MIN_VALUE_LANES - head_dim)]
        values = jnp.pad(values, lanes)
    weighted = jnp.einsum("...rs,...sd->...rd", terms, values, precision=exact_products())
    return row_sum(terms, numerics, ordered=True), weighted[..., :head_dim]


def weigh_cached_chunk(terms: Array, values: Array, numerics: Numerics) -> tuple[Array, Array]:
    """As `weigh_chunk`, but a value that is not finite does not affect rows in which its term is 0.

    Terms are 0 for masked positions of a cache and for nodes of other branches, and 0 times NaN is NaN.
    Replacing such values by 0 before the product would copy the cache at every step. So, on a CPU, a result
    that contains NaN is computed again from finite values; it is then NaN only where a term other than 0
    multiplies a value that is not finite.
    """
    sums, weighted = weigh_chunk(terms, values, numerics)
    if target.platform() != "cpu":  # A GPU's host would wait for the condition.
        return sums, weighted

    def recomputed() -> Array:
        finite = jnp.isfinite(values)
        clean = weigh_chunk(terms, jnp.where(finite, values, 0.0), numerics)[1]
        affected = (terms != 0).astype(jnp.float32), (~finite).astype(jnp.float32)
        return jnp.where(weigh_chunk(*affected, numerics)[1] > 0, jnp.nan, clean)

    return sums, lax.cond(jnp.isnan(weighted).any(), recomputed, lambda: weighted)


def weigh_cache(terms: Array, values: Array, numerics: Numerics) -> tuple[Array, Array]:
    """Sums softmax terms, and values weighted by them, within every chunk of a cache.

    The values are read where they lie: slices of a cache would be copies of it.

    Args:
      terms: float32 [B, Hk, S / C, R, C] (R rows: queries times query heads per key head).
      values: [B, Hk, S, D].

    Returns:
      float32 [B, Hk, S / C, R, 1] and [B, Hk, S / C, R, D].
    """
    batch, heads, chunks, _, chunk = terms.shape
    values = values.astype(jnp.float32).reshape(batch, heads, chunks, chunk, values.shape[-1])
    return weigh_cached_chunk(terms, values, numerics)


def add_chunks(parts: Array, count: Array) -> Array:
    """Adds the first `count` chunks, int32 [B], of [B, Hk, n, R, D] in order: [B, Hk, R, D]."""
    count = count[:, None, None, None]
    chunks = [jnp.where(c < count, parts[:, :, c], 0.0) for c in range(parts.shape[2])]
    return functools.reduce(jnp.add, chunks)


def add_weighted(total: Array, terms: Array, values: Array) -> Array:
    """Adds a few weighted values to sums, one after another, as a longer product would.

    A product adds by one fused multiply-add after another, and so does this, once compiled for a CPU. Values
    whose term is 0 are skipped, whatever they are.

    Args:
      total: float32 [N, B, Hk, R, D], N sums of the same values.
      terms: float32 [N, B, Hk, R, M].
      values: float32 [B, Hk, M, D].

    Returns:
      float32 [N, B, Hk, R, D].
    """
    count = terms.shape[-1]
    if count <= _ADDED_AT_ONCE:
        for m in range(count):
            term = terms[..., m : m + 1]
            total = jnp.where(term != 0, total + term * values[None, :, :, None, m], total)
        return total
    # In a loop, which compiles in a fraction of the time of one long expression. A CPU's compiler copies the
    # sums in every iteration that adds several values, and does not where it adds one.
    piece = 1 if target.platform() == "cpu" else _ADDED_AT_ONCE
    padding = -count % piece
    terms = jnp.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, padding)])
    values = jnp.pad(values, [(0, 0), (0, 0), (0, padding), (0, 0)])

    def add_piece(number: Array, total: Array) -> Array:
        piece_terms = lax.dynamic_slice_in_dim(terms, number * piece, piece, axis=-1)
        return add_weighted(
            total, piece_terms, lax.dynamic_slice_in_dim(values, number * piece, piece, axis=2)
        )

    pieces = (count + padding) // piece
    return lax.fori_loop(jnp.int32(0), jnp.int32(pieces), add_piece, total)


def normalize(weighted: Array, sums: Array) -> Array:
    """Divides weighted values [..., D] by the sums of their terms [..., 1]; 0 where there are no terms."""
    return weighted / jnp.where(sums == 0, 1.0, sums)


def attended_chunk(capacity: int, numerics: Numerics) -> int:
    """Returns the number of a cache's positions whose values are weighed in one product."""
    # If the order of summation may vary, one chunk is the fastest.
    return min(KEY_CHUNK, capacity) if numerics.row_invariant else capacity


def scale_queries(q: Array) -> Array:
    """Returns queries [..., D] times D^-0.5, in float32.

    Queries in bfloat16 were rounded to it. With enough slots, the compiler for CPUs passes that rounding to a
    library together with the sum of the scores, and the library omits it. So the rounding is repeated as an
    operation that is never passed to a library.
    """
    exact = q.astype(jnp.float32)
    if q.dtype != jnp.float32:
        kind = jnp.finfo(q.dtype)
        exact = lax.reduce_precision(exact, kind.nexp, kind.nmant)
    return exact * (q.shape[-1] ** -0.5)


def block_scores(queries: Array, keys: Array, chunk: int, numerics: Numerics) -> Array:
    """Returns the scores of scaled queries against blocked keys, chunk by chunk.

    The scores are written as a multiplication and a sum over the head dimension. The compiler turns these
    into multiply-adds with the positions in the vector lanes, which run at memory bandwidth and add in the
    order of a matrix product. So the bits are those of `PackedAttention` (for at least two rows: a single row
    is doubled). They come in the layout in which values are weighed next; transposing them would take as long
    as the scores.

    Args:
      queries: float32 [B, Hk, R, D].
      keys: [B, Hk, S / KEY_BLOCK, D, KEY_BLOCK].
      chunk: positions in a chunk, C: a multiple of KEY_BLOCK that divides S.

    Returns:
      float32 [B, Hk, S / C, R, C].
    """
    batch, heads, rows, dim = queries.shape
    if numerics.row_invariant and rows == 1:
        queries = jnp.concatenate([queries, queries], axis=2)
    blocks = chunk // KEY_BLOCK
    keys = keys.astype(jnp.float32).reshape(batch, heads, -1, 1, blocks, dim, KEY_BLOCK)
    products = queries[:, :, None, :, None, :, None] * keys
    scores = jnp.sum(products, axis=-2)[:, :, :, :rows]  # [B, Hk, S / C, R, C / KEY_BLOCK, KEY_BLOCK]
    return scores.reshape(batch, heads, -1, rows, chunk)


def chunks_max(scores: Array) -> Array:
    """Returns the largest score of each row over all chunks, [B, Hk, n, R, C] -> [B, Hk, R, 1]."""
    return row_max(row_max(scores)[..., 0].swapaxes(2, 3))
