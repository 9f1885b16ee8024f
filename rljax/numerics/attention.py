"""The arithmetic of softmax attention, shared by everything that attends.

Scores, softmax and weighted values are computed by the same three steps wherever a query stands (a packed
training row in `packed_attention.py`, a KV cache in `rljax/engine/kv_cache.py`): float32 scores; the exact
maximum; exponentials summed, and values weighted, chunk of keys after chunk of keys.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from rljax.numerics.rows import KEY_CHUNK, Numerics, exact_products, row_sum

MASKED = -1e30
"""The score of a key that must not be seen: finite, so that a row with nothing to attend to yields zeros
instead of NaN.
"""
KEY_BLOCK = 64
"""Positions of a block of cached keys, see `block_scores`."""
_MIN_VALUE_LANES = 64  # narrower products take a kernel that is not row-invariant


def softmax_terms(scores: Array, top: Array) -> Array:
    """exp(score - top), exactly 0 for masked scores (below MASKED / 2). Scores float32 [..., S], their row's
    largest [..., 1].
    """
    return jnp.where(scores > 0.5 * MASKED, jnp.exp(scores - top), 0.0)


def weigh_chunk(terms: Array, values: Array, numerics: Numerics) -> tuple[Array, Array]:
    """Sum of softmax terms, and of values weighted by them, over one chunk of keys.

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
    """Like `weigh_chunk`, but a value that is not finite does not reach rows in which its term is 0.

    Terms of 0 belong to masked positions of a cache and to nodes of other branches, and 0 times NaN is NaN.
    Zeroing such values before the product would copy the cache at every step. So, on a CPU, only a result
    that holds NaN is computed again, from finite values; it is NaN where a term other than 0 met one that is
    not finite.
    """
    sums, weighted = weigh_chunk(terms, values, numerics)
    if jax.default_backend() != "cpu":  # A GPU's host would wait for the condition.
        return sums, weighted

    def again() -> Array:
        finite = jnp.isfinite(values)
        clean = weigh_chunk(terms, jnp.where(finite, values, 0.0), numerics)[1]
        met = (terms != 0).astype(jnp.float32), (~finite).astype(jnp.float32)
        return jnp.where(weigh_chunk(*met, numerics)[1] > 0, jnp.nan, clean)

    return sums, lax.cond(jnp.isnan(weighted).any(), again, lambda: weighted)


def weighted_values(terms: Array, values: Array, numerics: Numerics) -> Array:
    """Softmax-weighted mean of values, chunk after chunk of keys.

    Args:
      terms: unnormalised weights, float32 [B, Hk, R, S] (R rows: queries times query heads per key head).
      values: [B, Hk, S, D].

    Returns:
      float32 [B, Hk, R, D]; zeros where all terms are 0.
    """
    batch, heads, rows, length = terms.shape
    values = values.astype(jnp.float32)
    # Without the need for a fixed order one chunk is the fastest.
    chunk = min(KEY_CHUNK, length) if numerics.row_invariant else length
    num_chunks = -(-length // chunk)
    if num_chunks * chunk != length:
        pad = num_chunks * chunk - length
        terms = jnp.pad(terms, ((0, 0), (0, 0), (0, 0), (0, pad)))
        values = jnp.pad(values, ((0, 0), (0, 0), (0, pad), (0, 0)))
    chunked_terms = terms.reshape(batch, heads, rows, num_chunks, chunk).swapaxes(2, 3)
    chunked_values = values.reshape(batch, heads, num_chunks, chunk, values.shape[-1])
    sums, weighted = weigh_cached_chunk(chunked_terms, chunked_values, numerics)
    # One chunk after the other: chunks without a key of ours add exact zeros, so it does not matter how many
    # there are.
    sums = functools.reduce(jnp.add, [sums[:, :, c] for c in range(num_chunks)])
    weighted = functools.reduce(jnp.add, [weighted[:, :, c] for c in range(num_chunks)])
    return weighted / jnp.where(sums == 0, 1.0, sums)


def scale_queries(q: Array) -> Array:
    """Queries [..., D] times D^-0.5, in float32.

    Queries in bfloat16 were rounded to it. Where enough slots decode, a CPU's compiler hands that rounding to
    a library together with the sum of the scores, and the library leaves it out: so it is written once more
    as an operation that no library takes.
    """
    exact = q.astype(jnp.float32)
    if q.dtype != jnp.float32:
        kind = jnp.finfo(q.dtype)
        exact = lax.reduce_precision(exact, kind.nexp, kind.nmant)
    return exact * (q.shape[-1] ** -0.5)


def block_scores(queries: Array, keys: Array, numerics: Numerics) -> Array:
    """Scores of scaled queries against blocked keys.

    Written as multiply and sum over the head dimension, which the compiler turns into multiply-adds along it
    with the positions in the vector lanes: at memory bandwidth, and in the order in which a matrix product
    adds, so the bits are those of `PackedAttention` (from two rows up: a lone row is doubled).

    Args:
      queries: float32 [B, Hk, R, D].
      keys: [B, Hk, S / KEY_BLOCK, D, KEY_BLOCK].
      numerics: see `Numerics`.

    Returns:
      float32 [B, Hk, R, S].
    """
    batch, heads, rows, _ = queries.shape
    if numerics.row_invariant and rows == 1:
        queries = jnp.concatenate([queries, queries], axis=2)
    products = queries[:, :, None, :, :, None] * keys[:, :, :, None].astype(jnp.float32)
    scores = jnp.sum(products, axis=-2)[:, :, :, :rows]  # [B, Hk, blocks, R, KEY_BLOCK]
    return scores.transpose(0, 1, 3, 2, 4).reshape(batch, heads, rows, -1)
