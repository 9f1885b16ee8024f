"""Programs of the engine: pure functions over `DecodeState`, compiled by its pool.

They depend on the policy and on how it is sampled. Programs that only move arrays are in `slot_moves.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from rljax.engine import kv_cache
from rljax.engine.appending import AppendedChunk
from rljax.engine.draft_tree import DraftTree, NodeRows, RootedTree, with_root
from rljax.engine.host_sync import pack
from rljax.engine.kv_cache import CachedAttention, KVCache
from rljax.engine.placement import cache_shardings, decode_state_shardings, feature_sharding, slot_sharding
from rljax.engine.sampling import decode_logits, sample, whole_logits
from rljax.engine.self_drafting import SelfDrafting, SelfDrafts
from rljax.engine.state import DecodeState, Prefix, counted
from rljax.engine.tree_attention import TreeAttention
from rljax.engine.verification import Rule, accepted_path, sample_nodes
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.sharding import GatheredWeights, ShardedAttention, Weights
from rljax.models.transformer import Attention, Params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams, penalized_logits
from rljax.sharding import constrain, replicated_sharding


@dataclasses.dataclass(frozen=True)
class Programs:
    """One policy architecture under one sampling distribution, on one mesh.

    Attributes:
      eos_token_ids: tokens that end a response; the response keeps them.
      decode_steps: largest number of decode steps of one `generate`.
      verification: rule by which drafts are verified.
      hidden_layers: see `DecodeEngine`.
      mesh: devices; None for one.
      per_slot_sampling: temperature and filters are those of each slot (`DecodeState.sampling`), not those of
        `sampling`, whose penalties hold.
      weights: "replicated", or "fsdp" for weights of which devices along fsdp have parts.
    """

    config: ModelConfig
    numerics: Numerics
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    decode_steps: int
    verification: Rule
    hidden_layers: tuple[int, ...] | None
    mesh: Mesh | None
    per_slot_sampling: bool = False
    weights: Weights = "replicated"

    def without_sampling(self) -> "Programs":
        """Returns the programs that sample nothing and hand out no features: the same for engines that differ
        in these only, and compiled once for all of them.
        """
        return dataclasses.replace(
            self,
            sampling=SamplingParams(),
            eos_token_ids=(),
            decode_steps=0,
            verification="coupled",
            hidden_layers=None,
        )

    @property
    def gathered(self) -> GatheredWeights | None:
        """What gathers the weights of a layer; None where every device has them."""
        if self.weights == "replicated" or self.mesh is None:
            return None
        return GatheredWeights(self.config, self.mesh)

    def _constrain(self, state: DecodeState) -> DecodeState:
        if self.mesh is None:
            return state
        return constrain(state, decode_state_shardings(state, self.config, self.mesh))

    def placed(self, function: Callable[..., DecodeState]) -> Callable[..., DecodeState]:
        """Returns `function` with its decode state placed as by `init_state`, so that every program takes the
        results of any other.
        """

        @functools.wraps(function)  # the name that profiles and caches show
        def placed(*args: Any) -> DecodeState:
            return self._constrain(function(*args))

        return placed

    def prefill(self, params: Params, tokens: Array, lengths: Array, rope: Array) -> Prefix:
        """Computes keys and values of prompts: tokens int32 [N, T], lengths int32 [N]."""
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        # Attention over fewer keys than a block would use another kernel, with other bits.
        whole = jnp.arange(max(length, kv_cache.KEY_BLOCK), dtype=jnp.int32)[None]
        attention = PackedAttention((whole < lengths[:, None]).astype(jnp.int32), self.numerics, keep_kv=True)
        if self.mesh is not None:
            attention = ShardedAttention(attention, self.config, self.mesh)
        _, kept, states = self._forward(params, tokens, positions, attention, rope)
        last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        cache = kv_cache.from_prefill(kept, kv_cache.cache_dtype(self.numerics))
        if self.mesh is not None:
            cache = constrain(cache, cache_shardings(cache, self.config, self.mesh))
            last, lengths = constrain((last, lengths), (replicated_sharding(self.mesh),) * 2)
        return Prefix(cache=cache, last_tokens=last, lengths=lengths, states=self._placed_features(states))

    def _placed_features(self, states: Array | None) -> Array | None:
        if states is None or self.mesh is None:
            return states
        return constrain(states, feature_sharding(self.mesh))

    def _forward(
        self,
        params: Params,
        tokens: Array,
        positions: Array,
        attention: Attention,
        rope: Array,
        cache: KVCache | None = None,
    ) -> tuple[Array, list[Any], Array | None]:
        """Returns hidden states [N, T, d], new keys and values per layer, and features for drafters [N, T, S,
        d] (None without `hidden_layers`).
        """
        hidden, kept, residuals = transformer.forward_with_residuals(
            params,
            self.config,
            tokens,
            positions,
            attention,
            rope,
            self.numerics,
            self.hidden_layers or (),
            caches=None if cache is None else cache.layers(),
            gathered=self.gathered,
        )
        if self.hidden_layers is None:
            return hidden, kept, None
        return hidden, kept, jnp.stack([*residuals, hidden], axis=2)

    def _logits(self, params: Params, hidden: Array) -> Array:
        return decode_logits(params, self.config, hidden, self.numerics, self.mesh, self.gathered)

    def _decode_step(
        self, params: Params, state: DecodeState, rope: Array, going: Array
    ) -> tuple[DecodeState, Array, Array, Array | None]:
        """Samples one token for every slot that is `going`, bool [B], of those that are active; others are
        computed and stay as they are. Returns the new state, tokens int32 [B] (-1 where nothing was sampled),
        logprobs float32 [B], and the features [B, S, d] that the tokens were sampled from.
        """
        # Forward pass over the last token of every slot.
        attention = CachedAttention(state.lengths, self.numerics)
        hidden, kept, states = self._forward(
            params, state.tokens[:, None], state.lengths[:, None], attention, rope, state.cache
        )

        # Sample with the noise of each request and position.
        logits = self._logits(params, hidden[:, 0])
        logits = penalized_logits(logits, state.counts, self.sampling)
        settings = None if state.sampling is None else state.sampling.among(going)
        tokens, logprobs = sample(
            logits, state.noise_keys, state.lengths + 1, self.sampling, self.numerics, self.mesh, settings
        )

        # End responses at their limit or at an end-of-sequence token.
        remaining = jnp.where(going, state.remaining - 1, state.remaining)
        ended = remaining <= 0
        for eos in self.eos_token_ids:
            ended |= tokens == eos
        new_state = DecodeState(
            cache=KVCache.of_layers(kept),
            tokens=jnp.where(going, tokens, state.tokens),
            lengths=jnp.where(going, state.lengths + 1, state.lengths),
            remaining=remaining,
            active=state.active & ~(going & ended),
            noise_keys=state.noise_keys,
            counts=counted(state.counts, tokens[:, None], going[:, None]),
            sampling=state.sampling,
        )
        new_state = self._constrain(new_state)
        states = None if states is None else states[:, 0]
        return new_state, jnp.where(going, tokens, -1), jnp.where(going, logprobs, 0.0), states

    def generate(
        self,
        params: Params,
        state: DecodeState,
        rope: Array,
        max_steps: Array,
        until_active: Array,
        fixed: bool = False,
    ) -> tuple[DecodeState, Array, Array | None]:
        """Decodes plainly until `max_steps` steps are done, no more than `until_active` slots are active, or
        a slot has filled its cache. Returns the new state, the array of `pack`, and the features of every
        token.

        Whether to go on is computed on the device. Where the loop ends as soon as it may, a GPU's host reads
        that before every step, and cannot give it the next one meanwhile. A `fixed` loop always computes
        `decode_steps` steps: those after the end change no slot. A full slot's write is left out.
        """
        columns = self.decode_steps
        capacity = state.cache.length

        def more(carry):
            step, state, *_ = carry  # steps that are done
            room = jnp.max(jnp.where(state.active, state.lengths, 0)) < capacity
            return (step < max_steps) & (jnp.sum(state.active) > until_active) & room

        def body(carry):
            step, state, tokens, logprobs, states = carry
            goes_on = more(carry) if fixed else True
            state, sampled, chosen, read = self._decode_step(params, state, rope, state.active & goes_on)
            tokens = lax.dynamic_update_slice(tokens, sampled[None], (step, 0))
            logprobs = lax.dynamic_update_slice(logprobs, chosen[None], (step, 0))
            if states is not None:
                states = lax.dynamic_update_slice(states, read[:, None], (0, step, 0, 0))
            return step + jnp.int32(goes_on), state, tokens, logprobs, states

        # Outputs, one column a step.
        states = None
        if self.hidden_layers is not None:
            shape = (state.batch, columns, len(self.hidden_layers) + 1, self.config.hidden_size)
            states = jnp.zeros(shape, self.numerics.dtype)

        start = (
            jnp.int32(0),
            state,
            jnp.full((columns, state.batch), -1, jnp.int32),
            jnp.zeros((columns, state.batch), jnp.float32),
            states,
        )
        if fixed:
            carry = lax.fori_loop(0, columns, lambda _, carry: body(carry), start)
        else:
            carry = lax.while_loop(more, body, start)
        steps, state, tokens, logprobs, states = carry
        state = self._constrain(state)
        packed = pack(tokens, logprobs, state, steps)
        if self.mesh is not None:
            packed = constrain(packed, replicated_sharding(self.mesh))
        return state, packed, self._placed_features(states)

    def verify(
        self,
        params: Params,
        state: DecodeState,
        rope: Array,
        tree: DraftTree,
        rows: NodeRows,
        proposal: Array | None,
    ) -> tuple[DecodeState, Array, Array | None]:
        """Runs one forward pass over last tokens and draft trees, and commits the accepted paths.

        Arguments as in `DecodeEngine.verify`. Returns the new state; the path and the array of `pack`, one
        below the other; and the features of every sampled token.
        """
        # Forward pass over the computed nodes. Node 0 is the last token of its slot.
        rooted = with_root(tree, state.tokens)
        positions = state.lengths[:, None] + rooted.depth  # [B, M]
        hidden, nodes, states = self._forward(
            params,
            rows.take(rooted.tokens)[:, None],
            rows.take(positions)[:, None],
            TreeAttention(state.lengths, rooted, rows, self.numerics),
            rope,
            state.cache,
        )

        # Sample a token after every node, and find the deepest node whose path was sampled.
        logits = self._logits(params, hidden[:, 0])
        logits = penalized_logits(logits, node_counts(state.counts, rooted, rows), self.sampling)
        if self.verification != "coupled":  # the other rules read and change probabilities of whole rows
            logits = whole_logits(logits, self.config, self.mesh)
        settings = None
        if state.sampling is not None:
            settings = state.sampling.among(state.active).take(rows.slots)
        sampled, logprobs = sample_nodes(
            self.verification,
            logits,
            rooted,
            rows,
            state.noise_keys,
            positions + 1,
            self.sampling,
            self.numerics,
            proposal,
            self.mesh,
            settings,
        )
        path, count = accepted_path(rooted, sampled)
        tokens = jnp.take_along_axis(sampled, path, axis=1)

        # Count the tokens to keep: up to the end of the response or of the cache, 0 for slots without nodes.
        order = jnp.arange(tokens.shape[1])[None]
        ends = order + 1 >= state.remaining[:, None]
        for eos in self.eos_token_ids:
            ends |= tokens == eos
        count = jnp.minimum(count, state.cache.length - state.lengths)
        first_end = jnp.argmax(ends, axis=1).astype(jnp.int32)
        ended = ends.any(axis=1) & (first_end < count)
        count = jnp.where(ended, first_end + 1, count)
        takes_part = state.active & (rows.row_of[:, 0] < rows.rows)
        count = jnp.where(takes_part, count, 0)

        # Commit keys and values of the path. Its last sampled token stays uncommitted.
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        new_state = DecodeState(
            cache=kv_cache.commit(state.cache, nodes, path, count, state.lengths, self.numerics),
            tokens=jnp.where(takes_part, last, state.tokens),
            lengths=state.lengths + count,
            remaining=state.remaining - count,
            active=state.active & ~(takes_part & ended),
            noise_keys=state.noise_keys,
            counts=counted(state.counts, tokens, order < count[:, None]),
            sampling=state.sampling,
        )
        new_state = self._constrain(new_state)

        # Pack the results for the host, and gather the features along the path.
        kept = order < count[:, None]
        tokens = jnp.where(kept, tokens, -1)
        logprobs = jnp.where(kept, jnp.take_along_axis(logprobs, path, axis=1), 0.0)
        packed = jnp.concatenate([path.T, pack(tokens.T, logprobs.T, new_state, jnp.int32(1))])
        if self.mesh is not None:
            packed = constrain(packed, replicated_sharding(self.mesh))
        if states is not None:
            states = jnp.take_along_axis(rows.scatter(states[:, 0]), path[:, :, None, None], axis=1)
        return new_state, packed, self._placed_features(states)

    def extend(
        self,
        params: Params,
        cache: KVCache,
        tokens: Array,
        lengths: Array,
        counts: Array,
        rows: NodeRows,
        rope: Array,
    ) -> KVCache:
        """Writes keys and values of known tokens: the forward pass of a verification over chains, all
        accepted.

        Args:
          tokens: int32 [B, W], the tokens after the committed ones.
          lengths: int32 [B], committed tokens.
          counts: int32 [B], number of `tokens` to write.
          rows: rows of the pass; they include every token to write.
        """
        batch, width = tokens.shape
        order = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
        chain = DraftTree(tokens=tokens[:, 1:], parents=order[:, 1:] - 2, valid=order[:, 1:] > 0)
        _, entries = transformer.forward(
            params,
            self.config,
            rows.take(tokens)[:, None],
            rows.take(lengths[:, None] + order)[:, None],
            TreeAttention(lengths, with_root(chain, tokens[:, 0]), rows, self.numerics),
            rope,
            self.numerics,
            caches=cache.layers(),
            gathered=self.gathered,
        )
        cache = kv_cache.commit(cache, entries, order, counts, lengths, self.numerics)
        if self.mesh is not None:
            cache = constrain(cache, cache_shardings(cache, self.config, self.mesh))
        return cache

    def append(
        self, params: Params, state: DecodeState, rope: Array, chunk: AppendedChunk, rows: NodeRows
    ) -> DecodeState:
        """Appends tokens that were not sampled (a tool's answer); see `DecodeEngine.append`."""
        takes_part = chunk.counts > 0
        lengths = jnp.where(takes_part, chunk.lengths, state.lengths)
        return self._constrain(
            DecodeState(
                cache=self.extend(params, state.cache, chunk.tokens, lengths, chunk.counts, rows, rope),
                tokens=jnp.where(takes_part, chunk.following, state.tokens),
                lengths=lengths + chunk.counts,
                remaining=jnp.where(takes_part, chunk.remaining, state.remaining),
                active=jnp.where(takes_part, chunk.complete, state.active),
                noise_keys=state.noise_keys,
                counts=state.counts,
                sampling=state.sampling,
            )
        )

    def draft(
        self, columns: int, with_proposal: bool
    ) -> Callable[[Params, DecodeState, Array, Array], tuple[DecodeState, SelfDrafts]]:
        drafting = SelfDrafting(
            self.config,
            self.numerics,
            self.sampling,
            self.eos_token_ids,
            self.verification,
            columns,
            with_proposal,
            self.mesh,
            self.gathered,
        )

        def draft(
            params: Params, state: DecodeState, rope: Array, steps: Array
        ) -> tuple[DecodeState, SelfDrafts]:
            state, drafts = drafting(params, state, rope, steps)
            if self.mesh is not None:  # the host reads them; a proposal stays where it is
                whole = constrain(drafts.replace(proposal=None), replicated_sharding(self.mesh))
                drafts = whole.replace(proposal=drafts.proposal)
            return self._constrain(state), drafts

        return draft

    def free(self, active: Array, stop: Array) -> Array:
        active &= ~stop
        return active if self.mesh is None else constrain(active, slot_sharding(self.mesh))


def node_counts(counts: Array | None, tree: RootedTree, rows: NodeRows) -> Array | None:
    """Returns the counts of response tokens up to each computed node, int32 [R, V]: those of the slot, and
    the nodes of its path. Node 0 was counted when it was sampled.
    """
    if counts is None:
        return None
    above = rows.take(tree.ancestors) & (jnp.arange(tree.tokens.shape[1]) > 0)[None]  # [R, M]
    return counted(counts[rows.slots], tree.tokens[rows.slots], above)
