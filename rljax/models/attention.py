"""Softmax attention over packed rows, and the arithmetic that decoding shares with it.

Scores, softmax and weighted values are computed by the same three steps wherever a query stands (a packed
training row here, a KV cache in `rljax/engine/kv_cache.py`): float32 scores; the exact maximum; exponentials
summed, and values weighted, chunk of keys after chunk of keys.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array

from rljax.models.numerics import KEY_CHUNK, Numerics, row_max, row_sum

MASKED = -1e30
"""The score of a key that must not be seen: finite, so that a row with nothing to attend to yields zeros
instead of NaN.
"""
_MIN_VALUE_LANES = 64  # narrower products take a kernel that is not row-invariant


def softmax_terms(scores: Array) -> Array:
    """exp(score - largest score), exactly 0 for masked scores (below MASKED / 2). Scores float32 [..., S]."""
    return jnp.where(scores > 0.5 * MASKED, jnp.exp(scores - row_max(scores)), 0.0)


def weighted_values(terms: Array, values: Array, numerics: Numerics) -> Array:
    """Softmax-weighted mean of values, chunk after chunk of keys.

    Args:
      terms: unnormalised weights, float32 [B, Hk, R, S] (R rows: queries times query heads per key head).
      values: [B, Hk, S, D].

    Returns:
      float32 [B, Hk, R, D]; zeros where all terms are 0.
    """
    batch, heads, rows, length = terms.shape
    head_dim = values.shape[-1]
    values = values.astype(jnp.float32)
    if not numerics.row_invariant:
        total = jnp.sum(terms, axis=-1, keepdims=True)
        return jnp.einsum("bhrs,bhsd->bhrd", terms, values) / jnp.where(total == 0, 1.0, total)
    if head_dim < _MIN_VALUE_LANES:
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, _MIN_VALUE_LANES - head_dim)))
    chunk = min(KEY_CHUNK, length)
    num_chunks = -(-length // chunk)
    if num_chunks * chunk != length:
        pad = num_chunks * chunk - length
        terms = jnp.pad(terms, ((0, 0), (0, 0), (0, 0), (0, pad)))
        values = jnp.pad(values, ((0, 0), (0, 0), (0, pad), (0, 0)))
    chunked_terms = terms.reshape(batch, heads, rows, num_chunks, chunk).swapaxes(2, 3)
    chunked_values = values.reshape(batch, heads, num_chunks, chunk, values.shape[-1])
    sums = row_sum(chunked_terms, numerics)  # [B, Hk, chunks, R, 1]
    weighted = jnp.einsum("bhcrs,bhcsd->bhcrd", chunked_terms, chunked_values)
    # One chunk after the other: chunks without a key of ours add exact zeros, so it does not matter how many
    # there are.
    sums = functools.reduce(jnp.add, [sums[:, :, c] for c in range(num_chunks)])
    weighted = functools.reduce(jnp.add, [weighted[:, :, c] for c in range(num_chunks)])
    return weighted[..., :head_dim] / jnp.where(sums == 0, 1.0, sums)


def scale_queries(q: Array) -> Array:
    """Queries [..., D] times D^-0.5, in float32."""
    return q.astype(jnp.float32) * (q.shape[-1] ** -0.5)


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """Causal attention inside the segments of packed rows: training, scoring and prefill.

    Attributes:
      segment_ids: int32 [N, T]; tokens attend only within their segment. 0 is padding (its outputs mean
        nothing).
      numerics: see `Numerics`.
      keep_kv: also return every layer's keys and values (prefill does).
    """

    segment_ids: Array
    numerics: Numerics
    keep_kv: bool = False

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array] | None]:
        """q [N, T, H, D], k and v [N, T, Hk, D] -> ([N, T, H, D], (k, v) or None)."""
        batch, length, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[2]
        group = num_heads // num_kv_heads
        queries = scale_queries(q).reshape(batch, length, num_kv_heads, group, head_dim)
        queries = queries.transpose(0, 2, 3, 1, 4)  # [N, Hk, g, T, D]
        keys = k.astype(jnp.float32).transpose(0, 2, 1, 3)  # [N, Hk, T, D]
        values = v.transpose(0, 2, 1, 3)
        blocks = []
        for start in range(0, length, KEY_CHUNK):  # a block of queries sees no key after its own end
            stop = min(start + KEY_CHUNK, length)
            block = queries[:, :, :, start:stop]
            rows = block.reshape(batch, num_kv_heads, group * (stop - start), head_dim)
            scores = jnp.einsum("bhrd,bhsd->bhrs", rows, keys[:, :, :stop])
            same = self.segment_ids[:, start:stop, None] == self.segment_ids[:, None, :stop]
            causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
            mask = (same & causal[None])[:, None, None]  # [N, 1, 1, queries, S]
            mask = jnp.broadcast_to(mask, (batch, 1, group, stop - start, stop))
            mask = mask.reshape(batch, 1, group * (stop - start), stop)
            terms = softmax_terms(jnp.where(mask, scores, MASKED))
            out = weighted_values(terms, values[:, :, :stop], self.numerics)
            blocks.append(out.reshape(batch, num_kv_heads, group, stop - start, head_dim))
        out = jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4)
        out = out.reshape(batch, length, num_heads, head_dim).astype(q.dtype)
        return out, ((k, v) if self.keep_kv else None)
