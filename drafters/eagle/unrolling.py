"""Training-time test (EAGLE-3, section 3.1): a head is fed its own outputs, as in drafting.

At start s, the head drafts behind the verified pairs 0 .. s. Step j computes pair s + j (see
`model.py`): the token is the real one, the hidden state the head's own output of step j - 1 at the same s,
and the pair sees what it would see while drafting:

    keys of step 0 at pairs 0 .. s        (verified states; causal inside the segment)
    keys of steps 1 .. j at s itself      (its own outputs: a diagonal band, one key a step)

A block head (`block.py`) computes all steps of a start in one pass, which sees the same.

Everything is indexed by the start s, so step 0 is ordinary causal attention over packed rows, and a step
costs one more key, not one more row. Step j's output is compared with the policy at position s + j + 1: its
distribution, and for EAGLE and HASS its hidden state.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from drafters.eagle.block import (
    block_pass,
    block_starts,
    context_entries,
    corrections,
    next_state,
    pair_vectors,
    seen_in_block,
)
from drafters.eagle.model import Head, apply_head, hidden_inputs
from rljax.models.packed_attention import PackedAttention
from rljax.numerics.attention import MASKED, scale_queries
from rljax.numerics.rows import row_max

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


def delayed(x: Array, distance: int) -> Array:
    """Returns x [R, T, ...] shifted right by `distance` positions, with zeros in front."""
    rest = [(0, 0)] * (x.ndim - 2)
    distance = min(distance, x.shape[1])
    return jnp.pad(x[:, : x.shape[1] - distance], [(0, 0), (distance, 0), *rest])


@dataclasses.dataclass(frozen=True)
class _BandAttention:
    """Attention of an unrolled step: step 0's pairs up to the start, and the start's own outputs since then.

    Attributes:
      segment_ids: int32 [R, T].
      steps: keys and values [R, T, Hk, D] of every step before; the first is causal, the others are visible
        to their own start only.
    """

    segment_ids: Array
    steps: tuple[tuple[Array, Array], ...]

    def __call__(self, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        """q [R, T, H, D], k and v [R, T, Hk, D] -> ([R, T, H, D], (k, v))."""
        del cache
        first, *own = self.steps
        keys, values = (jnp.stack(each, axis=2) for each in zip(*own, (k, v), strict=True))
        visible = np.ones((1, keys.shape[2]), bool)
        out = _attend(q[:, :, None], first, (keys, values), visible, self.segment_ids)
        return out[:, :, 0], (k, v)


@dataclasses.dataclass(frozen=True)
class _BlockAttention:
    """Attention of the blocks behind every pair: the pairs up to it, and the block itself.

    Attributes:
      segment_ids: int32 [R, T].
      context: keys and values [R, T, Hk, D] of the pairs.
      seen: bool [k, k], which of the k positions of a block see which.
    """

    segment_ids: Array
    context: tuple[Array, Array]
    seen: np.ndarray

    def __call__(self, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        """q [R, T * k, H, D], k and v [R, T * k, Hk, D] -> [R, T * k, H, D]."""
        del cache
        blocks = [x.reshape(len(x), -1, len(self.seen), *x.shape[2:]) for x in (q, k, v)]
        out = _attend(blocks[0], self.context, (blocks[1], blocks[2]), self.seen, self.segment_ids)
        return out.reshape(q.shape), None


def _attend(
    q: Array,
    pairs: tuple[Array, Array],
    own: tuple[Array, Array],
    visible: np.ndarray,
    segment_ids: Array,
) -> Array:
    """Attention of Q queries at every start.

    Args:
      q: [R, T, Q, H, D].
      pairs: keys and values [R, T, Hk, D], of which a start sees those of its segment up to itself.
      own: keys and values [R, T, J, Hk, D] of the start.
      visible: bool [Q, J], which of these each query sees.
      segment_ids: int32 [R, T].

    Returns:
      [R, T, Q, H, D].
    """
    rows, length, _, heads, dim = q.shape
    kv_heads = own[0].shape[3]
    queries = scale_queries(q).reshape(*q.shape[:3], kv_heads, heads // kv_heads, dim)
    (first_keys, first_values), (own_keys, own_values) = (
        tuple(x.astype(jnp.float32) for x in each) for each in (pairs, own)
    )
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
        scores = jnp.einsum("nqihgd,nshd->nhgqis", queries, first_keys)
        before = (segments[:, :, None] == segment_ids[:, None]) & (order <= starts[:, :, None])
        scores = jnp.where(before[:, None, None, :, None], scores, MASKED)
        own_scores = jnp.einsum("nqihgd,nqjhd->nhgqij", queries, own_keys)
        own_scores = jnp.where(visible[None, None, None, None], own_scores, MASKED)
        both = jnp.concatenate([scores, own_scores], axis=-1)
        terms = jnp.exp(both - row_max(both))
        shares = terms / jnp.sum(terms, axis=-1, keepdims=True)
        out = jnp.einsum("nhgqis,nshd->nqihgd", shares[..., :length], first_values)
        return out + jnp.einsum("nhgqij,nqjhd->nqihgd", shares[..., length:], own_values)

    parts = tuple(split(x) for x in (queries, own_keys, own_values, starts, segment_ids))
    out = lax.map(attend, parts)  # [blocks, R, block, Q, Hk, g, D]
    out = out.swapaxes(0, 1).reshape(rows, blocks * block, *q.shape[2:])[:, :length]
    return out.astype(q.dtype)


def unroll(head: Head, batch: HeadBatch, steps: int) -> list[Array]:
    """Returns the head's outputs at every start and step.

    Args:
      head: with a RoPE table of at least T + steps - 1 rows.
      batch: R rows of T tokens.
      steps: k.

    Returns:
      [R, T, d] for each step, for `head_logits`; of a corrected block head [R, T, d + w]. Entry [r, s] of
      step j belongs to pair s + j; it is undefined where token s + j + 1 is not in the segment of s.
    """
    if head.config.block is not None:
        return _unroll_block(head, batch, steps)
    kept: list[tuple[Array, Array]] = []
    outputs: list[Array] = []
    hidden = hidden_inputs(head, batch.states)
    for step in range(steps):
        tokens = _token_behind(batch, step)
        if step == 0:
            attention = PackedAttention(batch.segment_ids, head.numerics, keep_kv=True)
        else:
            attention = _BandAttention(batch.segment_ids, tuple(kept))
        hidden, keys_values = apply_head(head, hidden, tokens, head.rope[batch.positions + step], attention)
        kept.append(keys_values)
        outputs.append(hidden)
    return outputs


def _token_behind(batch: HeadBatch, step: int) -> Array:
    """Returns the token of pair s + step at every start s, int32 [R, T]; 0 where the segment has none."""
    inside = shifted(batch.segment_ids, step + 1) == batch.segment_ids
    return jnp.where(inside, shifted(batch.tokens, step + 1), 0)


def _unroll_block(head: Head, batch: HeadBatch, steps: int) -> list[Array]:
    """As `unroll`: the blocks behind all starts in one pass, corrected by the real tokens."""
    config, behind = head.config, _token_behind(batch, 0)
    pairs = pair_vectors(head, batch.states, behind)
    context = context_entries(head, pairs, head.rope[batch.positions])
    seen = seen_in_block(config, steps)
    attentions = [_BlockAttention(batch.segment_ids, entries, seen) for entries in context]
    order = jnp.arange(len(seen), dtype=jnp.int32)[None, None]
    angles = head.rope[(batch.positions[:, :, None] + 1 + order).reshape(len(batch.positions), -1)]
    x = block_pass(head, block_starts(head, pairs, behind), steps, angles, attentions)
    if not config.corrected:
        return [x[:, :, step] for step in range(steps)]
    state = jnp.zeros((*batch.tokens.shape, config.block.width), jnp.float32)
    outputs = []
    for step in range(steps):
        if step:
            state = next_state(head, state, _token_behind(batch, step))
        correction = corrections(head, x[:, :, step], state)
        outputs.append(jnp.concatenate([x[:, :, step], correction], axis=-1))
    return outputs
