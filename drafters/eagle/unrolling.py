"""Training-time test (EAGLE-3, section 3.1): a head is fed its own outputs, as in drafting.

At start s, the head drafts behind the verified pairs 0 .. s. Step j computes pair s + j (see
`model.py`): the token is the real one, the hidden state the head's own output of step j - 1 at the same s,
and the pair sees what it would see while drafting:

    keys of step 0 at pairs 0 .. s        (verified states; causal inside the segment)
    keys of steps 1 .. j at s itself      (its own outputs: a diagonal band, one key a step)

Everything is indexed by the start s, so step 0 is ordinary causal attention over packed rows, and a step
costs one more key, not one more row. Step j's output is compared with the policy at position s + j + 1: its
distribution, and for EAGLE and HASS its hidden state.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from drafters.eagle.model import HeadConfig, apply_head, hidden_inputs
from rljax.models.packed_attention import PackedAttention
from rljax.models.transformer import Params
from rljax.numerics.attention import MASKED, scale_queries
from rljax.numerics.rows import Numerics, row_max

_QUERY_BLOCK = 256
"""Number of starts whose attention scores are in memory at once in an unrolled step."""


@flax.struct.dataclass
class HeadBatch:
    """R packed rows of T tokens with the policy's features.

    Attributes:
      tokens: int32 [R, T].
      positions: int32 [R, T], from 0 in every segment.
      segment_ids: int32 [R, T], from 1 in every row; 0 is padding.
      response_mask: bool [R, T], the *next* token is a response token (as in `PackedBatch`).
      states: [R, T, S, d], the features, see `model.py`.
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    response_mask: Array
    states: Array


def shifted(x: Array, distance: int) -> Array:
    """Returns x [R, T, ...] shifted left by `distance` positions, with zeros behind the end of the row."""
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, distance:], [(0, 0), (0, min(distance, x.shape[1])), *rest])


@dataclasses.dataclass(frozen=True)
class _BandAttention:
    """Attention of an unrolled step: step 0's pairs up to the start, and the start's own outputs since then.

    Attributes:
      segment_ids: int32 [R, T].
      steps: keys and values [R, T, Hk, D] of every step before; the first is causal, the others are visible
        to their own start only.
      numerics: see `Numerics`.
    """

    segment_ids: Array
    steps: tuple[tuple[Array, Array], ...]
    numerics: Numerics

    def __call__(self, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        """q [R, T, H, D], k and v [R, T, Hk, D] -> ([R, T, H, D], (k, v))."""
        del cache
        rows, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        queries = scale_queries(q).reshape(rows, length, kv_heads, heads // kv_heads, dim)
        float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
        (first_keys, first_values), *own = jax.tree.map(float32, self.steps)
        own_keys = jnp.stack([*(keys for keys, _ in own), float32(k)], axis=2)  # [R, T, j, Hk, D]
        own_values = jnp.stack([*(values for _, values in own), float32(v)], axis=2)
        block = min(_QUERY_BLOCK, length)
        blocks = -(-length // block)
        padding = blocks * block - length

        def split(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])])
            return x.reshape(rows, blocks, block, *x.shape[2:]).swapaxes(0, 1)

        starts = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        order = jnp.arange(length, dtype=jnp.int32)[None, None]

        @jax.checkpoint
        def attend(part: tuple[Array, ...]) -> Array:
            queries, own_keys, own_values, starts, segments = part
            scores = jnp.einsum("nqhgd,nshd->nhgqs", queries, first_keys)
            visible = (segments[:, :, None] == self.segment_ids[:, None]) & (order <= starts[:, :, None])
            scores = jnp.where(visible[:, None, None], scores, MASKED)
            own_scores = jnp.einsum("nqhgd,nqjhd->nhgqj", queries, own_keys)
            both = jnp.concatenate([scores, own_scores], axis=-1)
            terms = jnp.exp(both - row_max(both))
            shares = terms / jnp.sum(terms, axis=-1, keepdims=True)
            out = jnp.einsum("nhgqs,nshd->nqhgd", shares[..., :length], first_values)
            return out + jnp.einsum("nhgqj,nqjhd->nqhgd", shares[..., length:], own_values)

        parts = tuple(split(x) for x in (queries, own_keys, own_values, starts, self.segment_ids))
        out = lax.map(attend, parts)  # [blocks, R, block, Hk, g, D]
        out = out.swapaxes(0, 1).reshape(rows, blocks * block, heads, dim)[:, :length]
        return out.astype(q.dtype), (k, v)


def unroll(
    params: Params,
    config: HeadConfig,
    shared: Params,
    batch: HeadBatch,
    rope: Array,
    numerics: Numerics,
    steps: int,
) -> list[Array]:
    """Returns the head's outputs at every start and step.

    Args:
      params: the head's.
      config: its shape.
      shared: the policy's embeddings and LM head.
      batch: R rows of T tokens.
      rope: `rope_table(config.policy, length)`, float32 [at least T + steps - 1, 2, D/2].
      numerics: see `Numerics`.
      steps: k.

    Returns:
      [R, T, d] for each step. Entry [r, s] of step j belongs to pair s + j; it is undefined where token
      s + j + 1 is not in the segment of s.
    """
    kept: list[tuple[Array, Array]] = []
    outputs: list[Array] = []
    hidden = hidden_inputs(params, config, batch.states.astype(numerics.dtype), numerics)
    for step in range(steps):
        inside = shifted(batch.segment_ids, step + 1) == batch.segment_ids
        tokens = jnp.where(inside, shifted(batch.tokens, step + 1), 0)
        if step == 0:
            attention = PackedAttention(batch.segment_ids, numerics, keep_kv=True)
        else:
            attention = _BandAttention(batch.segment_ids, tuple(kept), numerics)
        angles = rope[batch.positions + step]
        hidden, keys_values = apply_head(params, config, shared, hidden, tokens, angles, attention, numerics)
        kept.append(keys_values)
        outputs.append(hidden)
    return outputs
