"""The decode engine: prefill, insert, generate, free, on JetStream's contract.

    prefix = engine.prefill(params, prompts)                       # once a prompt
    state = engine.bulk_insert(prefix, state, assignments)         # into the G slots of its group
    state, result = engine.generate(params, state, ...)            # many decode steps per host sync
    state = engine.free_resource(state, slots)

On the device everything is a pure function over `DecodeState` (`programs.py`). This class rounds shapes up to
buckets, picks the compiled program, and keeps the arrays in place. `rljax/rollout/decode_loop.py` decides
which request decodes when.

Prefill leaves the last token of a prompt uncommitted: it is the input of the first decode step of every slot.
The first token is thus sampled like every other, and may differ between the samples of a group.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from rljax import target
from rljax.engine import appending, kv_cache
from rljax.engine.appending import AppendedChunk, Continuation
from rljax.engine.background import Compiling
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftTree, NodeRows, all_rows, empty_tree, pack_rows
from rljax.engine.executables import ExecutablePool, temporary_bytes
from rljax.engine.host_sync import Assignment, DecodeResult, Pending
from rljax.engine.placement import cache_shardings, decode_state_shardings, feature_sharding
from rljax.engine.programs import Programs
from rljax.engine.self_drafting import SelfDrafts
from rljax.engine.slot_moves import SlotMoves, set_counts
from rljax.engine.state import DecodeState, Prefix
from rljax.engine.verification import Rule
from rljax.engine.weight_blocks import with_blocks
from rljax.errors import ConfigError, PolicyError
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.sharding import Weights, padded_vocab_size, shard_params
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics, cast_matrices, finite_leaves
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.slots import SlotSampling, check_settings
from rljax.sharding import replicated_sharding


class CompiledCall(NamedTuple):
    """A compiled program and its arguments: arrays are put, as `jnp.asarray` compiles a program a shape."""

    program: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> Any:
        """Runs the program."""
        return self.program(*self.args)


class DecodeEngine:
    """Compiled decoding of one policy architecture under one sampling distribution.

    Args:
      numerics: numerics of the trainer.
      buckets: shapes to compile for.
      eos_token_ids: tokens that end a response; the response keeps them.
      decode_steps_per_sync: largest number of decode steps between two host syncs.
      pool: pool of compiled programs; engines of the same policy may share one.
      mesh: devices to decode on; None for one. Batch buckets are multiples of `sharding.row_multiple`.
      verification: rule by which drafts are verified, see `rljax/engine/verification.py`.
      hidden_layers: layers whose features drafters read; None for none. Prefill, decoding and verification
        then hand out the residual stream after each of these layers (0: the embeddings), and last the hidden
        state after the final norm: S features of size d, one more than there are layers.
      per_slot_sampling: every request may have its own temperature and filters (`Assignment.sampling`). The
        tokens are those of an engine with these settings in its programs. Drafters go by `sampling`.
      weights: "replicated" over `data` and `fsdp`, or "fsdp": devices along fsdp keep a part of every matrix,
        and each pass gathers a layer at a time. The tokens are the same.

    Attributes:
      program_key: what sampling programs depend on, besides their shapes.
      fixed_gain: how many times as fast a call is that computes all of `decode_steps_per_sync` steps
        (`Programs.generate`); 0 for never. A call does so where the last one would have been faster thus.
      background: compiles programs of plain decoding in a thread (`PlainPrograms`). Prefill and `grow` then
        wait for what is not compiled. None where programs are compiled before, or when they are first used.

    Raises:
      ConfigError: `per_slot_sampling` with a rule of verification that does not know it.
    """

    fixed_gain = 0.0
    background: Compiling | None = None

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        sampling: SamplingParams,
        buckets: Buckets,
        eos_token_ids: Sequence[int],
        decode_steps_per_sync: int = 64,
        pool: ExecutablePool | None = None,
        mesh: Mesh | None = None,
        verification: Rule = "coupled",
        hidden_layers: tuple[int, ...] | None = None,
        per_slot_sampling: bool = False,
        weights: Weights = "replicated",
    ) -> None:
        if per_slot_sampling and verification != "coupled":
            raise ConfigError(
                f"engine.verification: {verification} samples every request with the same temperature and"
                " filters; set coupled for requests with their own"
            )
        self.config, self.numerics, self.sampling, self.buckets = config, numerics, sampling, buckets
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.decode_steps_per_sync = decode_steps_per_sync
        self._steps_done = decode_steps_per_sync  # by the last call that could do all
        self.verification, self.hidden_layers = verification, hidden_layers
        self.per_slot_sampling, self.weights = per_slot_sampling, weights
        self.pool = ExecutablePool(numerics.row_invariant) if pool is None else pool
        self.prefill_rows, self.prefill_lengths = buckets.prefill()
        self.mesh = mesh
        self._rope = jax.device_put(rope_table(config, buckets.cache[-1]))
        if mesh is not None:
            self._rope = target.put(self._rope, replicated_sharding(mesh))
        self._programs = Programs(
            config,
            numerics,
            sampling,
            self.eos_token_ids,
            decode_steps_per_sync,
            verification,
            hidden_layers,
            mesh,
            per_slot_sampling,
            weights,
        )
        self._moves = SlotMoves(config, mesh)
        positions = len(self._rope)
        self.program_key = (self._programs, positions)
        # What samples nothing is compiled once for engines that sample differently.
        self._unsampled = self._programs.without_sampling()
        self._unsampled_key = (self._unsampled, sampling.penalizes, positions)
        self._prefills = dataclasses.replace(
            self._unsampled, hidden_layers=hidden_layers, per_slot_sampling=False
        )

    # -- weights ---------------------------------------------------------------------------------------------

    def load_params(self, params: Params, copy: bool = False) -> Params:
        """Returns the policy's weights as decoding reads them: products' in the compute dtype, split over the
        mesh, and on a CPU also in blocks. Arrays that are so already are shared with `params`.

        Args:
          copy: share no array with `params`, whose buffers may then be donated, as an update does, while
            decoding goes on.

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
        cast = cast_matrices(params, self.numerics.dtype)
        loaded = shard_params(cast, self.config, self.mesh, decoding=True, split=self.weights == "fsdp")
        loaded = jax.tree.map(jnp.copy, loaded) if copy else loaded
        if self.mesh is not None:
            return loaded
        return with_blocks(loaded, self.config, self.numerics.product_form)

    # -- the contract ----------------------------------------------------------------------------------------

    def init_state(self, slots: int, length: int) -> DecodeState:
        """Returns an idle state for `slots` requests of up to `length` positions, rounded up to buckets."""
        batch, size = self.buckets.batch_for(slots), self.buckets.cache_for(length)
        if self.mesh is None:
            return self._empty_state(batch, size)
        shapes = jax.eval_shape(lambda: self._empty_state(batch, size))
        shardings = decode_state_shardings(shapes, self.config, self.mesh)
        state: DecodeState = target.zeros(shapes, shardings)
        if state.sampling is None:
            return state
        return state.replace(sampling=target.put(self._settings([], batch), shardings.sampling))

    def start_state(self, slots: int, length: int) -> DecodeState:
        """`init_state` in a shape whose programs are compiled; the cache may be longer."""
        if self.background is not None:
            length = self.background.start_length(
                self.buckets.batch_for(slots), self.buckets.cache_for(length)
            )
        return self.init_state(slots, length)

    def close(self) -> None:
        """Ends the compilation in the background."""
        if self.background is not None:
            self.background.close()

    def _empty_state(self, batch: int, size: int) -> DecodeState:
        vocab_size, settings = padded_vocab_size(self.config, self.mesh), self._settings([], batch)
        return DecodeState(
            cache=kv_cache.empty_cache(self.config, batch, size, kv_cache.cache_dtype(self.numerics)),
            tokens=jnp.zeros(batch, jnp.int32),
            lengths=jnp.zeros(batch, jnp.int32),
            remaining=jnp.zeros(batch, jnp.int32),
            active=jnp.zeros(batch, bool),
            noise_keys=jnp.zeros((batch, 2), jnp.uint32),
            counts=jnp.zeros((batch, vocab_size), jnp.int32) if self.sampling.penalizes else None,
            sampling=None if settings is None else jax.tree.map(jnp.asarray, settings),
        )

    def _settings(self, requested: Sequence[SamplingParams | None], slots: int) -> SlotSampling | None:
        """Returns settings of so many slots, those after the requested ones as of the engine; None where the
        programs have them inside.
        """
        if not self.per_slot_sampling:
            return None
        settings = [self.sampling if each is None else each for each in requested]
        settings += [self.sampling] * (slots - len(settings))
        return SlotSampling.of(settings, self.config.vocab_size)

    def check_sampling(self, sampling: SamplingParams | None) -> None:
        """Raises a ValueError for sampling settings that a request cannot have here."""
        if sampling is None:
            return
        if not self.per_slot_sampling:
            raise ValueError("this engine samples all requests alike: it has no per_slot_sampling")
        if sampling.penalties != self.sampling.penalties:
            raise ValueError(
                f"penalties: all requests have {self.sampling.penalties}, got {sampling.penalties}"
            )
        check_settings(sampling)

    def state_shapes(self, batch: int, size: int) -> DecodeState:
        """Returns `init_state` with a `jax.ShapeDtypeStruct` in the place of every array, for buckets."""
        shapes = jax.eval_shape(lambda: self._empty_state(batch, size))
        if self.mesh is None:
            return shapes
        return jax.tree.map(_placed_shape, shapes, decode_state_shardings(shapes, self.config, self.mesh))

    def param_shapes(self, params: Params) -> Params:
        """Returns the shapes of `params`, which `compile_verify` takes in their place."""
        return jax.tree.map(lambda x: _placed_shape(x, None if self.mesh is None else x.sharding), params)

    def prefix_shapes(self, rows: int, length: int) -> Prefix:
        """Returns `prefill` of so many prompts, padded to `length`, with a `jax.ShapeDtypeStruct` in the
        place of every array.
        """
        size = max(length, kv_cache.KEY_BLOCK)

        def empty() -> Prefix:
            cache = kv_cache.empty_cache(self.config, rows, size, kv_cache.cache_dtype(self.numerics))
            return Prefix(cache, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32), None)

        shapes = jax.eval_shape(empty)
        if self.mesh is not None:
            whole = replicated_sharding(self.mesh)
            cache = cache_shardings(shapes.cache, self.config, self.mesh)
            shapes = jax.tree.map(_placed_shape, shapes, Prefix(cache, whole, whole, None))
        if self.hidden_layers is None:
            return shapes
        size = (rows, length, len(self.hidden_layers) + 1, self.config.hidden_size)
        features = jax.ShapeDtypeStruct(size, self.numerics.dtype)
        if self.mesh is not None:
            features = _placed_shape(features, feature_sharding(self.mesh))
        return shapes.replace(states=features)

    def prefill(self, params: Params, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Computes keys and values of `prompts` (token ids, none empty) in one pass."""
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("prefill needs at least one prompt, and no empty ones")
        rows = next(rows for rows in self.prefill_rows if rows >= len(prompts))
        length = self.prefill_length(max(map(len, prompts)))
        if self.background is not None:
            rows, length = self.background.prefill_shape(rows, length)
        tokens = np.zeros((rows, length), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return self._prefilling(params, tokens, lengths).run()

    def _prefilling(self, params: Params, tokens: np.ndarray, lengths: np.ndarray) -> CompiledCall:
        args = (params, *jax.device_put((tokens, lengths)), self._rope)
        key = ("prefill", *tokens.shape, self._prefills, len(self._rope))
        return CompiledCall(self.pool.get(key, self._prefills.prefill, args), args)

    def prefill_length(self, positions: int) -> int:
        """Returns the padded length of a prompt; prompts of one padded length are best prefilled together."""
        self.buckets.cache_for(positions)  # raises where it does not fit
        return next(length for length in self.prefill_lengths if length >= positions)

    def bulk_insert(
        self, prefix: Prefix, state: DecodeState, assignments: Sequence[Assignment]
    ) -> DecodeState:
        """Inserts requests into slots; the row of a prompt may go into many. Consumes `state`."""
        count = state.batch
        rows = np.zeros(count, np.int32)
        slots = np.full(count, state.batch, np.int32)  # out of range: skipped
        remaining = np.zeros(count, np.int32)
        keys = np.zeros((count, 2), np.uint32)
        for i, assignment in enumerate(assignments):
            rows[i], slots[i] = assignment.row, assignment.slot
            remaining[i], keys[i] = assignment.max_response, assignment.noise_key
            self.check_sampling(assignment.sampling)
        settings = self._settings([assignment.sampling for assignment in assignments], count)
        return self._inserting(prefix, state, rows, slots, remaining, keys, settings).run()

    def _inserting(
        self, prefix: Prefix, state: DecodeState, *placed: np.ndarray | SlotSampling | None
    ) -> CompiledCall:
        args = (prefix.replace(states=None), state, *jax.device_put(placed))
        shape = (prefix.cache.batch, prefix.cache.length, state.batch, state.cache.length)
        key = ("insert", *shape, *self._unsampled_key)
        insert = self._unsampled.placed(self._moves.insert)
        return CompiledCall(self.pool.get(key, insert, args, donate_argnums=(1,)), args)

    def generate(
        self, params: Params, state: DecodeState, max_steps: int | None = None, until_active: int = 0
    ) -> tuple[DecodeState, DecodeResult]:
        """Decodes plainly up to the next host sync. Consumes `state`.

        Stops also before a slot would outgrow its cache; `grow` the state then.

        Args:
          params: weights from `load_params`.
          max_steps: largest number of steps, up to `decode_steps_per_sync`, which is the default.
          until_active: stop as soon as no more than this many slots are active.
        """
        state, pending = self.begin(params, state, max_steps, until_active)
        return state, self.finish(pending)

    def begin(
        self, params: Params, state: DecodeState, max_steps: int | None = None, until_active: int = 0
    ) -> tuple[DecodeState, Pending]:
        """Starts `generate`, and does not wait for the device."""
        most = self.decode_steps_per_sync
        steps = most if max_steps is None else min(max_steps, most)
        fixed = steps == most and most < self.fixed_gain * self._steps_done
        state, packed, states = self._generating(params, state, steps, until_active, fixed).run()
        return state, Pending(packed, most, None, states, fixed, is_whole=steps == most)

    def finish(self, pending: Pending) -> DecodeResult:
        """Waits for what `begin` started."""
        result = pending.result()
        if pending.is_whole:
            self._steps_done = max(result.steps, 1)
        return result

    def _generating(
        self, params: Params, state: DecodeState, steps: int, until_active: int, fixed: bool
    ) -> CompiledCall:
        args = (params, state, self._rope, np.int32(steps), np.int32(until_active))
        key = ("generate fixed" if fixed else "generate", state.batch, state.cache.length, *self.program_key)
        generate = functools.partial(self._programs.generate, fixed=fixed)
        return CompiledCall(self.pool.get(key, generate, args, donate_argnums=(1,)), args)

    def verify(
        self,
        params: Params,
        state: DecodeState,
        tree: DraftTree,
        rows: NodeRows | None = None,
        proposal: Array | None = None,
    ) -> tuple[DecodeState, Pending]:
        """Starts one forward pass over the last tokens of slots and their draft nodes. Consumes `state`.

        Every active slot that takes part samples at least one token, and one more for every accepted node.
        None of them may be full: `grow` the state first. Unlike `generate`, it does not wait for the device:
        the host may draft for other slots meanwhile.

        Args:
          params: weights from `load_params`.
          rows: nodes to compute, from `pack_rows`; None for all nodes of all slots. Slots without any do not
            change.
          proposal: see `verification.sample_nodes`.
        """
        if rows is None:
            rows = all_rows(state.batch, tree.nodes + 1)
        state, packed, states = self._verifying(params, state, tree, rows, proposal).run()
        return state, Pending(packed, tree.nodes + 1, rows.rows, states)

    def verify_bytes(self, params: Params, state: DecodeState, tree: DraftTree, rows: NodeRows) -> int:
        """Returns the bytes that `verify` needs on a device besides its arguments. Only compiles."""
        return temporary_bytes(self._verifying(params, state, tree, rows, None).program)

    def compile_verify(self, params: Params, batch: int, length: int, rows: int, nodes: int) -> int:
        """Compiles a verifying pass without a decode state; another thread may decode meanwhile.

        Args:
          params: weights from `load_params`, or their `param_shapes`.
          rows, nodes: rows of the pass and draft nodes of a slot, as from `Buckets.passes`.

        Returns:
          The bytes that the pass needs on a device besides its arguments.
        """
        tree = empty_tree(batch, nodes)
        packed = pack_rows(tree, np.arange(batch), rows)
        return self.verify_bytes(params, self.state_shapes(batch, length), tree, packed)

    def compile_prefill(self, params: Params, rows: int, length: int) -> None:
        """Compiles `prefill` of so many prompts, padded to `length`. Arguments as of `compile_verify`."""
        self._prefilling(params, np.zeros((rows, length), np.int32), np.zeros(rows, np.int32))

    def compile_insert(self, prefix: tuple[int, int], batch: int, length: int) -> None:
        """Compiles `bulk_insert` of a prefix of so many prompts and so long, into a state of this shape."""
        slots, keys = np.zeros(batch, np.int32), np.zeros((batch, 2), np.uint32)
        prefix, state = self.prefix_shapes(*prefix), self.state_shapes(batch, length)
        self._inserting(prefix, state, slots, slots, slots, keys, self._settings([], batch))

    def compile_plain(self, params: Params, batch: int, length: int, appends: bool = False) -> None:
        """Compiles `generate`, `free_resource` and with `appends` also `append` for a state of this shape.
        Arguments as of `compile_verify`.
        """
        state = self.state_shapes(batch, length)
        for fixed in {False, self.fixed_gain > 0}:
            self._generating(params, state, 0, 0, fixed)
        self._freeing(state, np.zeros(batch, bool))
        if appends:
            nothing = appending.empty_chunk(batch)
            for rows in appending.ROWS:
                self._appending(params, state, nothing, appending.node_rows(nothing, rows))
            self.compile_counts(batch, length)

    def compile_counts(self, batch: int, length: int) -> None:
        """Compiles `set_counts` for a state of this shape, unless nothing is penalized."""
        state = self.state_shapes(batch, length)
        if state.counts is not None:
            self._counting(state, np.zeros(batch, np.int32), np.zeros((batch, length), np.int32))

    def compile_grow(self, batch: int, length: int) -> None:
        """Compiles `grow` of a state of this shape."""
        self._growing(self.state_shapes(batch, length))

    def compile_widen(self, batch: int, length: int) -> None:
        """Compiles `widen` of a state of this shape to the next batch bucket."""
        self._widening(self.state_shapes(batch, length))

    def compile_compact(self, batch: int, into: int, length: int) -> None:
        """Compiles `compact` from a batch bucket into the next smaller one."""
        self._compacting(self.state_shapes(batch, length), np.zeros(into, np.int32), np.zeros(into, bool))

    def _verifying(
        self, params: Params, state: DecodeState, tree: DraftTree, rows: NodeRows, proposal: Array | None
    ) -> CompiledCall:
        args = (params, state, self._rope, *jax.device_put((tree, rows)), proposal)
        shape = (state.batch, state.cache.length, tree.nodes, rows.rows)
        key = ("verify", *shape, proposal is None, *self.program_key)
        return CompiledCall(self.pool.get(key, self._programs.verify, args, donate_argnums=(1,)), args)

    def draft(
        self, draft_params: Params, state: DecodeState, steps: int, with_proposal: bool = False
    ) -> tuple[DecodeState, SelfDrafts]:
        """Drafts chains of up to `steps` tokens for every active slot, on the cache of the slot. Consumes
        `state`.

        The drafts stay on the device, where `verify` reads them. One program drafts any number of steps, in
        chains that are `buckets.max_drafts` wide.

        Args:
          draft_params: other weights of the same architecture, see `drafters/quantized.py`.
          steps: number of tokens, up to `buckets.max_drafts`.
          with_proposal: whether to return the distributions of the drafts, which `rejection` needs.
        """
        columns = self.buckets.max_drafts
        if not 0 < steps <= columns:
            raise ValueError(f"cannot draft {steps} steps: buckets.max_drafts is {columns}")
        return self._drafting(draft_params, state, steps, with_proposal).run()

    def _drafting(
        self, draft_params: Params, state: DecodeState, steps: int, with_proposal: bool
    ) -> CompiledCall:
        columns, weights = self.buckets.max_drafts, str(jax.tree.structure(draft_params))  # how quantized
        key = ("draft", state.batch, state.cache.length, columns, with_proposal, weights, *self.program_key)
        args = (draft_params, state, self._rope, np.int32(steps))
        draft = self._programs.draft(columns, with_proposal)
        return CompiledCall(self.pool.get(key, draft, args, donate_argnums=(1,)), args)

    def compile_draft(self, draft_params: Params, batch: int, length: int) -> None:
        """Compiles `draft` for a state of this shape.

        Args:
          draft_params: the weights, or their shapes.
        """
        self._drafting(draft_params, self.state_shapes(batch, length), 1, False)

    def append(
        self, params: Params, state: DecodeState, continuations: Sequence[Continuation]
    ) -> DecodeState:
        """Appends tokens that were not sampled to slots, which then decode on. Consumes `state`.

        The state must have room for all of them and for one more: `grow` it first. `free_resource` stops a
        slot that waits for its tokens; its cache is kept, and moves with `compact` and `grow`.
        """
        for each in continuations:
            end = each.length + len(each.tokens)
            if len(each.tokens) < 2 or end > state.cache.length:
                raise ValueError(f"cannot append up to position {end} of {state.cache.length}: {each}")
        for chunk, rows in appending.chunks(state.batch, continuations):
            state = self._appending(params, state, chunk, rows).run()
        return state

    def _appending(
        self, params: Params, state: DecodeState, chunk: AppendedChunk, rows: NodeRows
    ) -> CompiledCall:
        args = (params, state, self._rope, *jax.device_put((chunk, rows)))
        key = ("append", state.batch, state.cache.length, rows.rows, *self._unsampled_key)
        return CompiledCall(self.pool.get(key, self._unsampled.append, args, donate_argnums=(1,)), args)

    def set_counts(self, state: DecodeState, tokens: Mapping[int, Sequence[int]]) -> DecodeState:
        """Sets which response tokens penalties count in some slots. Consumes `state`.

        `bulk_insert` begins without any, and `append` leaves the counts as they are. Returns `state` itself
        where nothing is penalized.

        Args:
          state: the state; its cache has room for the tokens.
          tokens: by slot, the tokens that were sampled in its response so far.
        """
        if state.counts is None:
            return state
        slots = np.full(state.batch, state.batch, np.int32)
        counted = np.full((state.batch, state.cache.length), self.config.vocab_size, np.int32)
        for row, (slot, ids) in enumerate(tokens.items()):
            slots[row], counted[row, : len(ids)] = slot, ids
        return self._counting(state, slots, counted).run()

    def _counting(self, state: DecodeState, slots: np.ndarray, counted: np.ndarray) -> CompiledCall:
        args = (state, *jax.device_put((slots, counted)))
        key = ("set_counts", state.batch, state.cache.length, *self._unsampled_key)
        count = self._unsampled.placed(set_counts)
        return CompiledCall(self.pool.get(key, count, args, donate_argnums=(0,)), args)

    def free_resource(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Stops decoding in `slots`. Consumes `state`."""
        stop = np.zeros(state.batch, bool)
        stop[list(slots)] = True
        return state.replace(active=self._freeing(state, stop).run())

    def _freeing(self, state: DecodeState, stop: np.ndarray) -> CompiledCall:
        args = (state.active, jax.device_put(stop))
        return CompiledCall(self.pool.get(("free", state.batch, self.mesh), self._programs.free, args), args)

    def grow(self, state: DecodeState) -> DecodeState:
        """Moves the slots to the next larger cache bucket."""
        if self.background is not None:
            self.background.wait_for((state.batch, self.buckets.next_cache(state.cache.length)))
        return self._growing(state).run()

    def _growing(self, state: DecodeState) -> CompiledCall:
        length = self.buckets.next_cache(state.cache.length)

        def grow(state: DecodeState) -> DecodeState:
            return state.replace(cache=kv_cache.lengthen(state.cache, length))

        key = ("grow", state.batch, state.cache.length, length, *self._unsampled_key)
        return CompiledCall(self.pool.get(key, self._unsampled.placed(grow), (state,)), (state,))

    def compact(self, state: DecodeState, slots: Sequence[int], batch: int = 0) -> DecodeState:
        """Returns a state of only `slots`, in that order, in the smallest batch bucket that holds them, and
        at least `batch`.
        """
        slots = list(slots)
        target = self.buckets.batch_for(max(len(slots), batch))
        while state.batch > target:  # one bucket at a time, so that few programs serve every change of size
            batch = max(bucket for bucket in self.buckets.batch if bucket < state.batch)
            taken = np.zeros(batch, np.int32)
            taken[: len(slots)] = slots
            state = self._compacting(state, taken, np.arange(batch) < len(slots)).run()
            slots = list(range(len(slots)))
        return state

    def _compacting(self, state: DecodeState, taken: np.ndarray, present: np.ndarray) -> CompiledCall:
        args = (state, *jax.device_put((taken, present)))
        key = ("compact", state.batch, len(taken), state.cache.length, *self._unsampled_key)
        return CompiledCall(self.pool.get(key, self._unsampled.placed(self._moves.compact), args), args)

    def smallest_batch(self, state: DecodeState, batch: int) -> int:
        """Returns the smallest batch bucket, `batch` or larger, that a state can be compacted into without
        compiling.
        """
        if self.background is None:
            return batch
        return self.background.smallest_batch((state.batch, state.cache.length), batch)

    def widen(self, state: DecodeState, slots: int) -> DecodeState:
        """Moves the slots to the smallest batch bucket that holds `slots`, with free ones after them."""
        while state.batch < self.buckets.batch_for(slots):
            state = self._widening(state).run()
        return state

    def _widening(self, state: DecodeState) -> CompiledCall:
        batch = min(bucket for bucket in self.buckets.batch if bucket > state.batch)

        def widen(state: DecodeState) -> DecodeState:
            return self._moves.widen(state, batch)

        key = ("widen", state.batch, batch, state.cache.length, *self._unsampled_key)
        return CompiledCall(self.pool.get(key, self._unsampled.placed(widen), (state,)), (state,))


def _placed_shape(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
