"""The decode engine: prefill, insert, generate, free, on JetStream's contract.

    prefix = engine.prefill(params, prompts)                       # once a prompt
    state = engine.bulk_insert(prefix, state, assignments)         # into the G slots of its group
    state, result = engine.generate(params, state, ...)            # many decode steps a host visit
    state = engine.free_resource(state, slots)

On the device everything is a pure function over `DecodeState`; this class only rounds shapes up to buckets,
picks the compiled program, and keeps the arrays in place. Who decodes what, and when, is `rljax/rollout`'s
business.

Prefill leaves the prompt's last token uncommitted: the first decode step of every slot takes it as input, so
the first sampled token comes about like every other, and the samples of a group may differ from it on.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from rljax.engine import kv_cache
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftTree, NodeRows, all_rows, with_root
from rljax.engine.executables import ExecutablePool, temporary_bytes
from rljax.engine.kv_cache import CachedAttention, KVCache
from rljax.engine.placement import cache_shardings, decode_state_shardings, slot_sharding
from rljax.engine.sampling import SamplingParams, sample
from rljax.engine.self_drafting import SelfDrafting, SelfDrafts
from rljax.engine.state import DecodeState, Prefix
from rljax.engine.tree_attention import TreeAttention
from rljax.engine.verification import Rule, accepted_path, sample_nodes
from rljax.errors import PolicyError
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.numerics import Numerics, cast_matrices, finite_leaves
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.models.transformer import Attention, Params
from rljax.sharding import (
    ShardedAttention,
    constrain,
    replicated_sharding,
    shard_params,
)

_SHORT_PROMPTS = (16, 32)  # prefilled at these lengths; a block of the cache is longer


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One request's way into a slot.

    Attributes:
      row: its prompt's row in the `Prefix`.
      slot: where it goes.
      noise_key: uint32 [2], from `noise.request_key`.
      max_response: response tokens it may sample.
    """

    row: int
    slot: int
    noise_key: np.ndarray
    max_response: int


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """What a host visit brings back, copied off the device in one array.

    Attributes:
      tokens: int32 [B, T], -1 where a slot sampled nothing.
      logprobs: float32 [B, T], under the distribution really sampled.
      active: bool [B], still decoding.
      lengths: int32 [B], committed tokens.
      steps: forward passes that ran; in plain decoding T.
      rows: tokens computed by them, padding included.
      path: int32 [B, T], after a verification the draft tree's node (0 is the last token) that each of
        `tokens` was sampled behind; None in plain decoding.
      states: [B, T or more, S, d], the policy's states that each of `tokens` was sampled from, still on the
        device; None unless the engine hands them out.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    active: np.ndarray
    lengths: np.ndarray
    steps: int
    rows: int
    path: np.ndarray | None = None
    states: Array | None = None


@dataclasses.dataclass(frozen=True)
class Pending:
    """What a host visit will bring back: programs run while the host goes on.

    Attributes:
      packed: from `_pack`, behind the path of a verifying pass.
      columns: of its tokens; in plain decoding, where a step is a column, only the first `steps` are used.
      verified_rows: tokens that a verifying pass computes; None in plain decoding.
      states: see `DecodeResult`.
    """

    packed: Array
    columns: int
    verified_rows: int | None = None
    states: Array | None = None

    def is_ready(self) -> bool:
        """Whether the device is done."""
        return self.packed.is_ready()

    def result(self) -> DecodeResult:
        """Waits for the device."""
        packed, path = np.asarray(self.packed), None
        if self.verified_rows is not None:
            packed, path = packed[self.columns :], packed[: self.columns].T
        steps = int(packed[-1, 0])
        used = steps if path is None else self.columns
        return DecodeResult(
            tokens=packed[:used].T,
            logprobs=packed[self.columns : self.columns + used].view(np.float32).T,
            active=packed[2 * self.columns].astype(bool),
            lengths=packed[2 * self.columns + 1],
            steps=steps,
            rows=steps * packed.shape[1] if path is None else self.verified_rows,
            path=path,
            states=self.states,
        )


class DecodeEngine:
    """Compiled decoding of one policy architecture under one sampling distribution.

    Args:
      config: the policy's architecture.
      numerics: shared with the trainer.
      sampling: the sampling distribution.
      buckets: shapes to compile for.
      eos_token_ids: tokens that end a response (it keeps them).
      decode_steps_per_visit: most decode steps between two looks from the host.
      pool: compiled programs; engines of the same policy may share one.
      mesh: devices to decode on; None for one. Batch buckets are multiples of `sharding.row_multiple`.
      verification: how drafts are verified, see `rljax/engine/verification.py`.
      hidden_layers: None, or what drafters read of the policy: prefill, decoding and verification then hand
        out the residual stream behind so many layers each (0: the embeddings), and last the hidden state
        after the final norm. S is one more than there are layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        sampling: SamplingParams,
        buckets: Buckets,
        eos_token_ids: Sequence[int],
        decode_steps_per_visit: int = 64,
        pool: ExecutablePool | None = None,
        mesh: Mesh | None = None,
        verification: Rule = "coupled",
        hidden_layers: tuple[int, ...] | None = None,
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.sampling = sampling
        self.buckets = buckets
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.decode_steps_per_visit = decode_steps_per_visit
        self.verification = verification
        self.hidden_layers = hidden_layers
        self.pool = ExecutablePool(numerics.row_invariant) if pool is None else pool
        self._prefill_rows = tuple(sorted({*buckets.batch[::2], buckets.batch[-1]}))
        # Prompts are often much shorter than the shortest cache.
        self._prefill_lengths = tuple(sorted({*_SHORT_PROMPTS, kv_cache.KEY_BLOCK, *buckets.cache}))
        self.mesh = mesh
        self._rope = jnp.asarray(rope_table(config, buckets.cache[-1]))
        if mesh is not None:
            self._rope = jax.device_put(self._rope, replicated_sharding(mesh))
        self._key = (
            config,
            numerics,
            sampling,
            self.eos_token_ids,
            decode_steps_per_visit,
            verification,
            hidden_layers,
            buckets.cache[-1],
            mesh,
        )

    def handing_out(self, hidden_layers: tuple[int, ...] | None) -> "DecodeEngine":
        """The same engine with other `hidden_layers`."""
        if hidden_layers == self.hidden_layers:
            return self
        return DecodeEngine(
            self.config,
            self.numerics,
            self.sampling,
            self.buckets,
            self.eos_token_ids,
            self.decode_steps_per_visit,
            self.pool,
            self.mesh,
            self.verification,
            hidden_layers,
        )

    # -- weights ---------------------------------------------------------------------------------------------

    def load_params(self, params: Params) -> Params:
        """The policy's weights as decoding wants them: products' in the compute dtype, split over the mesh.

        Raises:
          PolicyError: some are not finite. Attention takes a score that is not a number for a key that is not
            there, so such a policy would go on sampling, and nothing would tell.
        """
        for path, finite in jax.tree_util.tree_leaves_with_path(jax.device_get(finite_leaves(params))):
            if not finite:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise PolicyError(
                    f"policy: {name} holds NaN or infinity; go on from a checkpoint before that, with a"
                    " smaller optimizer.learning_rate if training brought it about"
                )
        return shard_params(cast_matrices(params, self.numerics.dtype), self.config, self.mesh, decoding=True)

    # -- the contract ----------------------------------------------------------------------------------------

    def init_state(self, slots: int, length: int) -> DecodeState:
        """An idle state with room for `slots` requests of up to `length` positions, rounded up to buckets."""
        batch, size = self.buckets.batch_for(slots), self.buckets.cache_for(length)
        state = DecodeState(
            cache=kv_cache.empty_cache(self.config, batch, size, kv_cache.cache_dtype(self.numerics)),
            tokens=jnp.zeros(batch, jnp.int32),
            lengths=jnp.zeros(batch, jnp.int32),
            remaining=jnp.zeros(batch, jnp.int32),
            active=jnp.zeros(batch, bool),
            noise_keys=jnp.zeros((batch, 2), jnp.uint32),
        )
        if self.mesh is None:
            return state
        return jax.device_put(state, decode_state_shardings(state, self.config, self.mesh))

    def prefill(self, params: Params, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Keys and values of `prompts` (token ids, none empty), in one pass."""
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("prefill needs at least one prompt, and no empty ones")
        rows = next(rows for rows in self._prefill_rows if rows >= len(prompts))
        length = self.prefill_length(max(map(len, prompts)))
        tokens = np.zeros((rows, length), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        args = (params, jnp.asarray(tokens), jnp.asarray(lengths), self._rope)
        program = self.pool.get(("prefill", rows, length, *self._key), self._prefill, args)
        return program(*args)

    def prefill_length(self, positions: int) -> int:
        """Positions that are computed for a prompt: prompts of the same are best prefilled together."""
        self.buckets.cache_for(positions)  # raises where it does not fit
        return next(length for length in self._prefill_lengths if length >= positions)

    def insert(self, prefix: Prefix, state: DecodeState, assignment: Assignment) -> DecodeState:
        """`bulk_insert` of one request."""
        return self.bulk_insert(prefix, state, [assignment])

    def bulk_insert(
        self, prefix: Prefix, state: DecodeState, assignments: Sequence[Assignment]
    ) -> DecodeState:
        """Puts requests into slots; a prompt's row may go into many. Consumes `state`."""
        count = state.batch
        rows = np.zeros(count, np.int32)
        slots = np.full(count, state.batch, np.int32)  # out of range: skipped
        remaining = np.zeros(count, np.int32)
        keys = np.zeros((count, 2), np.uint32)
        for i, assignment in enumerate(assignments):
            rows[i], slots[i] = assignment.row, assignment.slot
            remaining[i], keys[i] = assignment.max_response, assignment.noise_key
        prefix = prefix.replace(states=None)
        args = (prefix, state, *map(jnp.asarray, (rows, slots, remaining, keys)))
        shapes = (prefix.cache.batch, prefix.cache.length, state.batch, state.cache.length)
        program = self.pool.get(
            ("insert", *shapes, *self._key), self._placed(_insert), args, donate_argnums=(1,)
        )
        return program(*args)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        max_steps: int | None = None,
        until_active: int = 0,
    ) -> tuple[DecodeState, DecodeResult]:
        """Decodes until a reason to look appears. Consumes `state`.

        Args:
          max_steps: at most this many steps (and never more than `decode_steps_per_visit`).
          until_active: stop as soon as no more than this many slots are active.

        Stops also before a slot would outgrow its cache; `grow` the state then.
        """
        steps = self.decode_steps_per_visit
        steps = steps if max_steps is None else min(max_steps, steps)
        args = (params, state, self._rope, np.int32(steps), np.int32(until_active))
        program = self.pool.get(
            ("generate", state.batch, state.cache.length, *self._key),
            self._generate,
            args,
            donate_argnums=(1,),
        )
        state, packed, states = program(*args)
        return state, Pending(packed, self.decode_steps_per_visit, states=states).result()

    def verify(
        self,
        params: Params,
        state: DecodeState,
        tree: DraftTree,
        rows: NodeRows | None = None,
        proposal: Array | None = None,
    ) -> tuple[DecodeState, Pending]:
        """One forward pass over slots' last tokens and their draft nodes. Consumes `state`.

        Every active slot that takes part samples at least one token, and one more for every node of the
        accepted path. None of them may be full: `grow` the state first.

        Args:
          tree: drafts of all slots of the state.
          rows: the nodes to compute, from `pack_rows`; None for all of all slots. Slots without any stand
            still.
          proposal: see `verification.sample_nodes`.

        Unlike `generate` it does not wait for the device: the host may see to other slots meanwhile.
        """
        if rows is None:
            rows = all_rows(state.batch, tree.nodes + 1)
        program, args = self._verifying(params, state, tree, rows, proposal)
        state, packed, states = program(*args)
        return state, Pending(packed, tree.nodes + 1, rows.rows, states)

    def verify_bytes(self, params: Params, state: DecodeState, tree: DraftTree, rows: NodeRows) -> int:
        """What `verify` needs on a device beside its arguments. Compiles it, runs nothing."""
        return temporary_bytes(self._verifying(params, state, tree, rows, None)[0])

    def _verifying(
        self,
        params: Params,
        state: DecodeState,
        tree: DraftTree,
        rows: NodeRows,
        proposal: Array | None,
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The program of a verifying pass, and what to call it with."""
        args = (params, state, self._rope, *jax.tree.map(jnp.asarray, (tree, rows)), proposal)
        shape = (state.batch, state.cache.length, tree.nodes, rows.rows)
        key = ("verify", *shape, proposal is None, *self._key)
        return self.pool.get(key, self._verify, args, donate_argnums=(1,)), args

    def draft(
        self, draft_params: Params, state: DecodeState, steps: int, with_proposal: bool = False
    ) -> tuple[DecodeState, SelfDrafts]:
        """Chains of up to `steps` tokens for every active slot, drafted on its own cache. Consumes `state`.

        What it returns stays on the device: `verify` takes its tree from there. Chains are
        `buckets.max_drafts` wide however many steps are asked for, by one program.

        Args:
          draft_params: other weights of the same architecture, see `drafters/quantized.py`.
          steps: at most `buckets.max_drafts`.
          with_proposal: also what the tokens were drafted from, which `rejection` needs.
        """
        columns = self.buckets.max_drafts
        if not 0 < steps <= columns:
            raise ValueError(f"cannot draft {steps} steps: buckets.max_drafts is {columns}")
        args = (draft_params, state, self._rope, np.int32(steps))
        weights = str(jax.tree.structure(draft_params))  # names how they are quantized
        program = self.pool.get(
            ("draft", state.batch, state.cache.length, columns, with_proposal, weights, *self._key),
            self._draft(columns, with_proposal),
            args,
            donate_argnums=(1,),
        )
        return program(*args)

    def free_resource(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Stops decoding in `slots`. Consumes `state`."""
        stop = np.zeros(state.batch, bool)
        stop[list(slots)] = True
        args = (state.active, jnp.asarray(stop))
        program = self.pool.get(("free", state.batch, *self._key), self._free, args)
        return state.replace(active=program(*args))

    def grow(self, state: DecodeState) -> DecodeState:
        """The same slots in the next larger cache bucket."""
        length = self.buckets.next_cache(state.cache.length)

        def grow(state: DecodeState) -> DecodeState:
            return state.replace(cache=kv_cache.lengthen(state.cache, length))

        key = ("grow", state.batch, state.cache.length, length, *self._key)
        return self.pool.get(key, self._placed(grow), (state,))(state)

    def compact(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """A state of just `slots`, in that order, in the smallest batch bucket that holds them."""
        slots = list(slots)
        wanted = self.buckets.batch_for(len(slots))
        while state.batch > wanted:  # one bucket at a time, so that few programs serve every change of size
            batch = max(bucket for bucket in self.buckets.batch if bucket < state.batch)
            taken = np.zeros(batch, np.int32)
            taken[: len(slots)] = slots
            args = (state, jnp.asarray(taken), jnp.asarray(np.arange(batch) < len(slots)))
            key = ("compact", state.batch, batch, state.cache.length, *self._key)
            state = self.pool.get(key, self._placed(_compact), args)(*args)
            slots = list(range(len(slots)))
        return state

    def warm_up(self, params: Params, slots: int, prompt_length: int, late_inserts: bool = False) -> None:
        """Compiles every program that decoding requests in `slots` slots can need.

        Args:
          params: weights from `load_params`.
          slots: requests decoded at a time; waiting ones are inserted only into a state of that many.
          prompt_length: the longest prompt, in tokens.
          late_inserts: also into states of fewer slots, a few prompts at a time.
        """
        largest = self.buckets.batch_for(slots)
        batches = [batch for batch in self.buckets.batch if batch <= largest]
        prefixes = self.warm_up_prefill(params, largest, prompt_length)
        for length in self.buckets.cache:
            for batch in batches:
                state = self.init_state(batch, length)
                for prefix in prefixes:
                    late = late_inserts and prefix.cache.batch == self._prefill_rows[0]
                    if (batch == largest or late) and prefix.cache.length <= length:
                        state = self.bulk_insert(prefix, state, [])
                state, _ = self.generate(params, state, max_steps=0)
                state = self.free_resource(state, [])
                if batch > batches[0]:
                    self.compact(state, [0])
                if length < self.buckets.cache[-1]:
                    self.grow(state)

    def warm_up_prefill(self, params: Params, prompts: int, prompt_length: int) -> list[Prefix]:
        """Compiles prefill of up to `prompts` prompts of up to `prompt_length` tokens; a prefix of each shape
        there is, those with the fewest rows first.
        """
        needed = self.prefill_length(prompt_length)
        prefixes = {}  # short prompts have a block of the cache, too
        for rows in self._prefill_rows:
            for length in self._prefill_lengths:
                if rows <= prompts and length <= needed:
                    prefix = self.prefill(params, [[0] * length] * rows)
                    handed_out = length if self.hidden_layers is not None else prefix.cache.length
                    prefixes[rows, handed_out] = prefix
        return list(prefixes.values())

    # -- where things lie on the mesh ------------------------------------------------------------------------

    def _constrain_state(self, state: DecodeState) -> DecodeState:
        if self.mesh is None:
            return state
        return constrain(state, decode_state_shardings(state, self.config, self.mesh))

    def _placed(self, function: Callable[..., DecodeState]) -> Callable[..., DecodeState]:
        """`function` with its state where `init_state` put it: every program takes what any other returns."""

        @functools.wraps(function)  # the name that profiles and caches show
        def placed(*args: Any) -> DecodeState:
            return self._constrain_state(function(*args))

        return placed

    # -- pure functions, compiled by the pool ----------------------------------------------------------------

    def _prefill(self, params: Params, tokens: Array, lengths: Array, rope: Array) -> Prefix:
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        # Attention over fewer keys than a block would take another kernel.
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
        return Prefix(cache=cache, last_tokens=last, lengths=lengths, states=states)

    def _forward(
        self, params: Params, tokens: Array, positions: Array, attention: Attention, rope: Array
    ) -> tuple[Array, list[Any], Array | None]:
        """Hidden states [N, T, d], what the attention kept, and what is handed out, [N, T, S, d]."""
        hidden, kept, residuals = transformer.forward_with_residuals(
            params,
            self.config,
            tokens,
            positions,
            attention,
            rope,
            self.numerics,
            self.hidden_layers or (),
        )
        if self.hidden_layers is None:
            return hidden, kept, None
        return hidden, kept, jnp.stack([*residuals, hidden], axis=2)

    def _decode_step(
        self, params: Params, state: DecodeState, rope: Array
    ) -> tuple[DecodeState, Array, Array, Array | None]:
        """One token for every active slot: (state, tokens int32 [B] with -1 where inactive, logprobs [B],
        the states [B, S, d] that they were sampled from).
        """
        attention = CachedAttention(state.cache, state.lengths, self.numerics)
        hidden, kept, states = self._forward(
            params, state.tokens[:, None], state.lengths[:, None], attention, rope
        )
        logits = transformer.logits(params, self.config, hidden[:, 0])
        tokens, logprobs = sample(logits, state.noise_keys, state.lengths + 1, self.sampling, self.numerics)
        active = state.active
        remaining = jnp.where(active, state.remaining - 1, state.remaining)
        ended = remaining <= 0
        for eos in self.eos_token_ids:
            ended |= tokens == eos
        new_state = DecodeState(
            cache=KVCache(keys=[k for k, _ in kept], values=[v for _, v in kept]),
            tokens=jnp.where(active, tokens, state.tokens),
            lengths=jnp.where(active, state.lengths + 1, state.lengths),
            remaining=remaining,
            active=active & ~ended,
            noise_keys=state.noise_keys,
        )
        new_state = self._constrain_state(new_state)
        states = None if states is None else states[:, 0]
        return new_state, jnp.where(active, tokens, -1), jnp.where(active, logprobs, 0.0), states

    def _generate(
        self, params: Params, state: DecodeState, rope: Array, max_steps: Array, until_active: Array
    ) -> tuple[DecodeState, Array, Array | None]:
        columns = self.decode_steps_per_visit
        capacity = state.cache.length

        def more(carry):
            step, state, *_ = carry
            room = jnp.max(jnp.where(state.active, state.lengths, 0)) < capacity
            return (step < max_steps) & (jnp.sum(state.active) > until_active) & room

        def body(carry):
            step, state, tokens, logprobs, states = carry
            state, sampled, chosen, read = self._decode_step(params, state, rope)
            tokens = lax.dynamic_update_slice(tokens, sampled[None], (step, 0))
            logprobs = lax.dynamic_update_slice(logprobs, chosen[None], (step, 0))
            if states is not None:
                states = lax.dynamic_update_slice(states, read[:, None], (0, step, 0, 0))
            return step + 1, state, tokens, logprobs, states

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
        steps, state, tokens, logprobs, states = lax.while_loop(more, body, start)
        state = self._constrain_state(state)
        packed = _pack(tokens, logprobs, state, steps)
        if self.mesh is not None:
            packed = constrain(packed, replicated_sharding(self.mesh))
        return state, packed, states

    def _verify(
        self,
        params: Params,
        state: DecodeState,
        rope: Array,
        tree: DraftTree,
        rows: NodeRows,
        proposal: Array | None,
    ) -> tuple[DecodeState, Array, Array | None]:
        rooted = with_root(tree, state.tokens)
        positions = state.lengths[:, None] + rooted.depth  # [B, M]
        hidden, nodes, states = self._forward(
            params,
            rows.gather(rooted.tokens)[:, None],
            rows.gather(positions)[:, None],
            TreeAttention(state.cache, state.lengths, rooted, rows, self.numerics),
            rope,
        )
        logits = transformer.logits(params, self.config, hidden[:, 0])
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
        )
        path, count = accepted_path(rooted, sampled)
        tokens = jnp.take_along_axis(sampled, path, axis=1)
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
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        new_state = DecodeState(
            cache=kv_cache.commit(state.cache, nodes, path, count, state.lengths, self.numerics),
            tokens=jnp.where(takes_part, last, state.tokens),
            lengths=state.lengths + count,
            remaining=state.remaining - count,
            active=state.active & ~(takes_part & ended),
            noise_keys=state.noise_keys,
        )
        new_state = self._constrain_state(new_state)
        kept = order < count[:, None]
        tokens = jnp.where(kept, tokens, -1)
        logprobs = jnp.where(kept, jnp.take_along_axis(logprobs, path, axis=1), 0.0)
        packed = jnp.concatenate([path.T, _pack(tokens.T, logprobs.T, new_state, jnp.int32(1))])
        if self.mesh is not None:
            packed = constrain(packed, replicated_sharding(self.mesh))
        if states is not None:
            states = jnp.take_along_axis(rows.scatter(states[:, 0]), path[:, :, None, None], axis=1)
        return new_state, packed, states

    def _draft(
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
        )

        def draft(
            params: Params, state: DecodeState, rope: Array, steps: Array
        ) -> tuple[DecodeState, SelfDrafts]:
            state, drafts = drafting(params, state, rope, steps)
            return self._constrain_state(state), drafts

        return draft

    def _free(self, active: Array, stop: Array) -> Array:
        active &= ~stop
        return active if self.mesh is None else constrain(active, slot_sharding(self.mesh))


def _pack(tokens: Array, logprobs: Array, state: DecodeState, steps: Array) -> Array:
    """Everything a host visit wants to know, as one array: tokens and logprobs are [columns, B]."""
    return jnp.concatenate(
        [
            tokens,
            lax.bitcast_convert_type(logprobs, jnp.int32),
            state.active.astype(jnp.int32)[None],
            state.lengths[None],
            jnp.broadcast_to(steps, (1, state.batch)),
        ]
    )


def _insert(
    prefix: Prefix, state: DecodeState, rows: Array, slots: Array, remaining: Array, keys: Array
) -> DecodeState:
    return DecodeState(
        cache=kv_cache.copy_rows(state.cache, prefix.cache, rows, slots),
        tokens=state.tokens.at[slots].set(prefix.last_tokens[rows], mode="drop"),
        lengths=state.lengths.at[slots].set(prefix.lengths[rows] - 1, mode="drop"),
        remaining=state.remaining.at[slots].set(remaining, mode="drop"),
        active=state.active.at[slots].set(True, mode="drop"),
        noise_keys=state.noise_keys.at[slots].set(keys, mode="drop"),
    )


def _compact(state: DecodeState, slots: Array, present: Array) -> DecodeState:
    return DecodeState(
        cache=kv_cache.take_slots(state.cache, slots),
        tokens=state.tokens[slots],
        lengths=state.lengths[slots],
        remaining=state.remaining[slots],
        active=state.active[slots] & present,
        noise_keys=state.noise_keys[slots],
    )
