"""Drafting with a head: a chain or a dynamic tree for every slot, on the device, with its own KV cache.

EAGLE-2 (Li et al., 2024, arXiv 2406.16858): every level expands its `top_k` most promising nodes, and of all
candidates the `nodes` most promising are verified (section 4.2's reranking). TLT calls the three numbers
topK, Draft_Depth and Tokens_to_Verify.

**Ranking under the noise.** The policy will sample argmax(log p + G), and G is known: a head with q close to
p should propose the tokens that win under *this* noise (`docs/speculation.md`). The probability of a token
behind its parent is taken as softmax(log q + G): among siblings it has the order of log q + G, and as it is
normalised, it can be multiplied along a path and compared between branches. Without noise keys it is q.

**The cache.** Entry i of a slot is pair i (see `model.py`), from features of verified tokens. Drafting reads
the cache and does not write it: the entries of draft nodes live in separate arrays, so that no provisional
entry has to be hidden or corrected. `compute_pairs` and `append_pairs` add verified pairs. Whatever reads the
cache reads only its first `DrafterState.attended` entries, a static number that follows the longest slot;
entries behind it would be masked. A head may begin in the middle of a response (behind appended tokens, which
come without features): it then knows no earlier pairs, and its positions count from its first pair, since
RoPE depends on differences of positions only.

    state = empty_state(config, batch, length, dtype)
    pairs = compute_pairs(head, state, states, tokens, counts)
    state = append_pairs(state, pairs, numerics)
    tree = draft(head, state, positions, noise_keys, strategy, sampling)
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
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
from drafters.eagle.model import (
    Head,
    HeadConfig,
    apply_head,
    corrected,
    head_logits,
    hidden_inputs,
    lm_logits,
)
from rljax.engine.draft_tree import DraftStrategy, DraftTree, ScoredTree
from rljax.engine.kv_cache import KVCache, commit, empty_cache
from rljax.numerics.attention import KEY_BLOCK, MASKED, block_scores, scale_queries, softmax_terms
from rljax.numerics.rows import Numerics, log_normalizer, row_max
from rljax.sampling import split
from rljax.sampling.distribution import SamplingParams, transform_logits
from rljax.sampling.noise import gumbel
from rljax.sharding import vocab_parts


@struct.dataclass
class DrafterState:
    """The state of a head for B slots.

    Attributes:
      cache: keys and values of the absorbed pairs, in every layer of the head.
      lengths: int32 [B], absorbed pairs.
      outputs: [B, d], the head's output at the last of them, or what a block behind it begins with; zeros
        before the first.
      attended: static; the number of the cache's first pairs that are read, a multiple of KEY_BLOCK and at
        least the largest of `lengths`; None for all.
    """

    cache: KVCache
    lengths: Array
    outputs: Array
    attended: int | None = struct.field(pytree_node=False, default=None)


def empty_state(config: HeadConfig, batch: int, length: int, dtype: jnp.dtype) -> DrafterState:
    """Returns the state of empty slots, with room for `length` pairs (a multiple of KEY_BLOCK)."""
    return DrafterState(
        cache=empty_cache(config.layer, batch, length, dtype),
        lengths=jnp.zeros((batch,), jnp.int32),
        outputs=jnp.zeros((batch, config.policy.hidden_size), dtype),
    )


def forget(state: DrafterState, slots: Array) -> DrafterState:
    """Empties the slots marked in bool [B]: they hold another request, or missed some pairs."""
    return dataclasses.replace(
        state,
        lengths=jnp.where(slots, 0, state.lengths),
        outputs=jnp.where(slots[:, None], 0, state.outputs),
    )


@dataclasses.dataclass(frozen=True)
class HeadAttention:
    """Attention of T new entries per slot against the cache and P + T entries outside of it.

    Attributes:
      state: the absorbed pairs.
      keys, values: [B, P, Hk, D], earlier entries outside the cache.
      visible: bool [B, T, P + T], which of the earlier and the new entries each new one sees.
      numerics: see `Numerics`.
      layer: whose entries of the cache.
    """

    state: DrafterState
    keys: Array
    values: Array
    visible: Array
    numerics: Numerics
    layer: int = 0

    def __call__(self, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        """q [B, T, H, D], k and v [B, T, Hk, D] -> ([B, T, H, D], (k, v) in the cache's type)."""
        cache, capacity = self.state.cache, self.state.attended
        capacity = cache.length if capacity is None else capacity
        cached_keys = cache.keys[self.layer][:, :, : capacity // KEY_BLOCK]
        cached_values = cache.values[self.layer][:, :, :capacity]
        batch, new, heads, dim = q.shape
        kv_heads = cached_values.shape[1]
        k, v = k.astype(cached_keys.dtype), v.astype(cached_values.dtype)
        keys = jnp.concatenate([self.keys, k], axis=1).astype(jnp.float32)
        values = jnp.concatenate([self.values, v], axis=1).astype(jnp.float32)
        group = heads // kv_heads
        queries = scale_queries(q).reshape(batch, new, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
        queries_by_head = queries.reshape(batch, kv_heads, group * new, dim)
        scores = block_scores(queries_by_head, cached_keys, capacity, self.numerics)
        scores = scores.reshape(batch, kv_heads, group, new, capacity)
        absorbed = jnp.arange(capacity, dtype=jnp.int32)[None] < self.state.lengths[:, None]
        scores = jnp.where(absorbed[:, None, None, None], scores, MASKED)
        own_scores = jnp.einsum("bhgtd,bshd->bhgts", queries, keys)
        own_scores = jnp.where(self.visible[:, None, None], own_scores, MASKED)
        top = jnp.maximum(row_max(scores), row_max(own_scores))
        terms, own_terms = softmax_terms(scores, top), softmax_terms(own_scores, top)
        total = jnp.sum(terms, axis=-1, keepdims=True) + jnp.sum(own_terms, axis=-1, keepdims=True)
        out = jnp.einsum("bhgts,bhsd->bhgtd", terms, cached_values.astype(jnp.float32))
        out = (out + jnp.einsum("bhgts,bshd->bhgtd", own_terms, values)) / total
        return out.transpose(0, 3, 1, 2, 4).reshape(batch, new, heads, dim).astype(q.dtype), (k, v)


def no_entries(state: DrafterState, config: HeadConfig) -> Array:
    """Returns keys, or values, of no entry [B, 0, Hk, D]."""
    batch, shape = len(state.lengths), (0, config.layer.num_kv_heads, config.layer.head_dim)
    return jnp.zeros((batch, *shape), state.cache.values[0].dtype)


@struct.dataclass
class Pairs:
    """Verified pairs that are not in the cache yet.

    Attributes:
      entries: keys and values of every layer, each [B, W, Hk, D].
      newest: [B, d], `DrafterState.outputs` of the last valid pair; of any value where there is none.
      counts: int32 [B], how many of the W pairs of each slot are valid.
    """

    entries: list[tuple[Array, Array]]
    newest: Array
    counts: Array


def compute_pairs(head: Head, state: DrafterState, states: Array, tokens: Array, counts: Array) -> Pairs:
    """Computes verified pairs, after prefill, a plain step, or a verifying pass.

    Args:
      head: with a RoPE table at least as long as the cache.
      state: the state before. Pairs must come without gaps (else `forget` first).
      states: [B, W, S, d], the policy's features at W positions; after a verifying pass, along the accepted
        path, beginning with the slot's last token (node 0).
      tokens: int32 [B, W], the token behind each position: the next of the prompt, or the sampled one.
      counts: int32 [B], how many of the W positions are valid.
    """
    batch, width = tokens.shape
    counts = jnp.minimum(counts, state.cache.length - state.lengths)
    order = jnp.arange(width, dtype=jnp.int32)
    angles = head.rope[state.lengths[:, None] + order[None]]
    if head.config.block is not None:
        pairs = pair_vectors(head, states, tokens)
        outputs = block_starts(head, pairs, tokens)
        kept = state.cache.values[0].dtype
        entries = [(k.astype(kept), v.astype(kept)) for k, v in context_entries(head, pairs, angles)]
    else:
        none = no_entries(state, head.config)
        causal = jnp.broadcast_to((order[:, None] >= order[None])[None], (batch, width, width))
        attention = HeadAttention(state, none, none, causal, head.numerics)
        outputs, own = apply_head(head, hidden_inputs(head, states), tokens, angles, attention)
        entries = [own]
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(outputs, last, axis=1)[:, 0].astype(state.outputs.dtype)
    return Pairs(entries, newest, counts)


def append_pairs(state: DrafterState, pairs: Pairs, numerics: Numerics) -> DrafterState:
    """Appends verified pairs to the slots; those that do not fit into the cache are left out.

    It is a program of its own: with one program that reads the cache and writes it, in no order that the
    compiler must keep, the whole cache is copied.
    """
    batch, width = pairs.entries[0][0].shape[:2]
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    return DrafterState(
        cache=commit(state.cache, pairs.entries, path, pairs.counts, state.lengths, numerics),
        lengths=state.lengths + pairs.counts,
        outputs=jnp.where(pairs.counts[:, None] > 0, pairs.newest, state.outputs),
    )


def likeliest_children(
    head: Head,
    logits: Array,
    positions: Array,
    noise_keys: Array | None,
    sampling: SamplingParams,
    top_k: int,
) -> tuple[Array, Array]:
    """The most promising tokens behind every node, best first.

    Args:
      logits: float32 [B, n, V], or [B, n, V'] with a draft vocabulary.
      positions: int32 [B], where those tokens would stand.
      noise_keys, sampling: as of `draft`.

    Returns:
      tokens int32 [B, n, k], log-probabilities float32 [B, n, k].
    """
    vocabulary, numerics = head.config.vocabulary, head.numerics
    # Devices that split the logits; an LM head of its own is whole everywhere.
    parts = vocab_parts(head.mesh) if vocabulary is None else 1
    ids = np.arange(logits.shape[-1]) if vocabulary is None else vocabulary.tokens
    if not sampling.greedy:
        if parts == 1:
            logits = transform_logits(logits, sampling, numerics)
        else:
            rows = logits.reshape(-1, logits.shape[-1])
            logits = split.transform_logits(rows, sampling, numerics).reshape(logits.shape)
        if noise_keys is not None:
            entries = jnp.asarray(ids, jnp.uint32)[None]
            logits = logits + gumbel(noise_keys, positions, entries)[:, None]
    best, tokens = _largest(logits, top_k, parts)
    if vocabulary is not None:
        tokens = jnp.asarray(vocabulary.tokens)[tokens]
    # At most 0, in spite of rounding: no child may seem likelier than its parent.
    return tokens.astype(jnp.int32), jnp.minimum(best - log_normalizer(logits, numerics), 0.0)


def _largest(logits: Array, top_k: int, parts: int) -> tuple[Array, Array]:
    """`lax.top_k` of logits [..., V] that so many devices split: each finds the largest of its own part, and
    only those travel.
    """
    size = logits.shape[-1] // parts
    if parts == 1 or size < top_k:
        return lax.top_k(logits, top_k)
    best, tokens = lax.top_k(logits.reshape(*logits.shape[:-1], parts, size), top_k)
    first = jnp.arange(parts, dtype=jnp.int32) * size
    tokens += jnp.expand_dims(first, (*range(logits.ndim - 1), logits.ndim))
    best, tokens = (x.reshape(*logits.shape[:-1], parts * top_k) for x in (best, tokens))
    best, chosen = lax.top_k(best, top_k)  # of equals the smallest token: parts are in their order
    return best, jnp.take_along_axis(tokens, chosen, axis=-1)


@dataclasses.dataclass
class _Levels:
    """What a head computes for a tree, level by level; arguments as of `draft`."""

    head: Head
    state: DrafterState
    strategy: DraftStrategy

    def __post_init__(self) -> None:
        self.level = 0

    def logits(self) -> Array:
        """Returns logits [B, n, V'] behind the nodes of a level, at first behind the slots' last tokens."""
        raise NotImplementedError

    def below(self, tokens: Array, parent: Array) -> Array:
        """Returns logits [B, k, V'] behind k nodes: their tokens int32 [B, k], and which node of the level
        before, int32 [B, k], is above them.
        """
        raise NotImplementedError


class _Steps(_Levels):
    """An EAGLE head: each node is computed from the output above it and its own token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        batch, top_k = len(self.state.lengths), self.strategy.top_k
        self._outputs = self.state.outputs.astype(self.head.numerics.dtype)[:, None]
        self._keys = self._values = no_entries(self.state, self.head.config)
        self._visible = jnp.zeros((batch, 1, 0), bool)  # which expanded nodes lie above each of the level
        self._itself = jnp.broadcast_to(jnp.eye(top_k, dtype=bool)[None], (batch, top_k, top_k))

    def logits(self) -> Array:
        return head_logits(self.head, self._outputs)

    def below(self, tokens: Array, parent: Array) -> Array:
        head, state = self.head, self.state
        hidden, ancestors = (_take(x, parent[:, :, None]) for x in (self._outputs, self._visible))
        self._visible = jnp.concatenate([ancestors, self._itself], axis=2)
        attention = HeadAttention(state, self._keys, self._values, self._visible, head.numerics)
        # The pair of a node at this level: the output above it, and its own token.
        angles = head.rope[state.lengths + self.level][:, None]
        angles = jnp.broadcast_to(angles, (*tokens.shape, *angles.shape[2:]))
        self._outputs, (k, v) = apply_head(head, hidden, tokens, angles, attention)
        self._keys = jnp.concatenate([self._keys, k], axis=1)
        self._values = jnp.concatenate([self._values, v], axis=1)
        self.level += 1
        return self.logits()


class _Block(_Levels):
    """A block head: one pass computes all levels, and only its correction goes level by level."""

    def __post_init__(self) -> None:
        super().__post_init__()
        head, state = self.head, self.state
        batch, depth = len(state.lengths), self.strategy.depth
        none, seen = no_entries(state, head.config), seen_in_block(head.config, depth)
        visible = jnp.broadcast_to(seen[None], (batch, *seen.shape))
        attentions = [
            HeadAttention(state, none, none, visible, head.numerics, layer)
            for layer in range(head.config.layer.num_layers)
        ]
        starts = state.outputs.astype(head.numerics.dtype)[:, None]
        angles = head.rope[state.lengths[:, None] + jnp.arange(len(seen), dtype=jnp.int32)[None]]
        self._x = block_pass(head, starts, depth, angles, attentions)[:, 0]
        self._logits = lm_logits(head, self._x)
        self._own = jnp.zeros((batch, 1, head.config.block.width), jnp.float32)

    def logits(self) -> Array:
        if not self.head.config.corrected:
            logits = self._logits[:, self.level, None]
            return jnp.broadcast_to(logits, (*self._own.shape[:2], logits.shape[-1]))
        x = self._x[:, self.level, None]
        x = jnp.broadcast_to(x, (*self._own.shape[:2], x.shape[-1]))
        correction = corrections(self.head, x, self._own)
        return corrected(self.head, self._logits[:, self.level, None], correction)

    def below(self, tokens: Array, parent: Array) -> Array:
        if self.head.config.corrected:
            self._own = next_state(self.head, _take(self._own, parent[:, :, None]), tokens)
        else:
            self._own = jnp.zeros((*tokens.shape, 0), jnp.float32)
        self.level += 1
        return self.logits()


def _take(x: Array, indices: Array) -> Array:
    return jnp.take_along_axis(x, indices, axis=1)


def draft(
    head: Head,
    state: DrafterState,
    positions: Array,
    noise_keys: Array | None,
    strategy: DraftStrategy,
    sampling: SamplingParams,
) -> ScoredTree:
    """A draft tree below every slot's last token.

    Args:
      head: as for `compute_pairs`.
      state: all pairs up to the slot's last token absorbed. Slots without any get no nodes.
      positions: int32 [B], of the slots' last tokens (`DecodeState.lengths`).
      noise_keys: request keys, uint32 [B, 2] (`DecodeState.noise_keys`); None ranks without noise, as every
        verification rule but `coupled` needs.
      strategy: static.
      sampling: static; the policy's sampling distribution. Greedy sampling ranks by the logits as they are.
    """
    batch = positions.shape[0]
    top_k = strategy.top_k
    known = state.lengths > 0
    levels = (_Steps if head.config.block is None else _Block)(head, state, strategy)

    def children(logits: Array, level: int) -> tuple[Array, Array]:
        return likeliest_children(head, logits, positions + level, noise_keys, sampling, top_k)

    tokens, scores = children(levels.logits(), 1)
    scores = jnp.where(known[:, None, None], scores, -jnp.inf)
    # Candidates of all levels so far: [B, C]. The frontier are the k of the newest level to be continued.
    all_tokens, all_scores = tokens[:, 0], scores[:, 0]
    all_parents = jnp.full((batch, top_k), -1, jnp.int32)
    frontier = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32)[None], (batch, top_k))
    parent = jnp.zeros((batch, top_k), jnp.int32)
    for level in range(1, strategy.depth):
        logits = levels.below(_take(all_tokens, frontier), parent)
        tokens, scores = children(logits, level + 1)
        scores = (_take(all_scores, frontier)[:, :, None] + scores).reshape(batch, top_k * top_k)
        first = all_tokens.shape[1]
        all_tokens = jnp.concatenate([all_tokens, tokens.reshape(batch, -1)], axis=1)
        all_scores = jnp.concatenate([all_scores, scores], axis=1)
        all_parents = jnp.concatenate([all_parents, jnp.repeat(frontier, top_k, axis=1)], axis=1)
        _, best = lax.top_k(scores, top_k)
        parent = best // top_k
        frontier = first + best.astype(jnp.int32)
    # Best first; of equals the earlier candidate, which is the parent.
    best, chosen = lax.top_k(all_scores, strategy.nodes)
    place = jnp.full((batch, all_scores.shape[1]), -1, jnp.int32)
    place = place.at[jnp.arange(batch)[:, None], chosen].set(jnp.arange(strategy.nodes, dtype=jnp.int32))
    parents = _take(all_parents, chosen)
    parents = jnp.where(parents < 0, -1, _take(place, jnp.maximum(parents, 0)))
    tree = DraftTree(tokens=_take(all_tokens, chosen), parents=parents, valid=jnp.isfinite(best))
    return ScoredTree(tree=tree, log_probability=best)
