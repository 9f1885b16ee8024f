"""A small model that drafts for the target: other weights of another shape, with a KV cache of its own.

SpecActor drafts for a 32B policy with its 0.5B and 1.5B relatives (sections 4.2 and 5). The small model is
never trained and never decides anything: the target verifies its chains like anybody's.

    companion.begin(batch, length)                  # a rollout begins, with a state of that shape
    companion.enter(slots, sequences)               # requests enter the target's slots
    drafts = companion.draft_chains(state, steps)   # chains below the target's last tokens
    companion.follow(slots, tokens, counts)         # what the target sampled since, drafted or not
    companion.compact(slots); companion.widen(slots); companion.forget(slots)

What it drafts from is all the target's: last tokens, noise keys, what is left of response and cache. Only its
keys and values are its own, and they have to follow what was sampled. That is cheap: the entry of a token is
the same whether the token was drafted or sampled, so all that drafting wrote for drafts that came true is
right already. What is missing (the last draft of a chain that came true altogether, tokens sampled plainly)
is computed before the next chain, in one pass over as many tokens as are missing.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from rljax.engine.draft_tree import DraftStrategy, ScoredTree, all_rows
from rljax.engine.engine import CompiledCall, DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.kv_cache import KVCache
from rljax.engine.self_drafting import SelfDrafts, margin_log_probability
from rljax.engine.shapes import Program, ProgramList, Shapes, compile_until
from rljax.engine.state import DecodeState, Prefix
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics

CATCH_UP_WIDTHS = (1, 16)
"""Tokens of a slot in a pass that catches up: after a chain that came true, and after plain decoding."""

_NO_KEY = np.zeros(2, np.uint32)


class CompanionEngine(DecodeEngine):
    """A decode engine that is given its tokens, and drafts with what another engine knows of its slots."""

    def extend(
        self, params: Params, cache: KVCache, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray
    ) -> KVCache:
        """Writes the keys and values of known tokens. Consumes `cache`.

        Args:
          tokens: int32 [B, W], tokens that stand after the first `lengths`.
          lengths: int32 [B], entries that `cache` has.
          counts: int32 [B], how many of `tokens` to write.
        """
        return self._extending(params, cache, tokens, lengths, counts).run()

    def _extending(
        self, params: Params, cache: KVCache, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray
    ) -> CompiledCall:
        # Copies: a device may read an array in place, and later, and the caller goes on counting in it.
        args = (params, cache, *(jnp.asarray(x.copy()) for x in (tokens, lengths, counts)), self._rope)
        key = ("extend", cache.batch, cache.length, tokens.shape[1], *self._unsampled_key)
        return CompiledCall(self.pool.get(key, self._extend, args, donate_argnums=(1,)), args)

    def compile_extend(self, params: Params, batch: int, length: int, width: int) -> None:
        """Compiles `extend` by up to `width` tokens, for a cache of this shape; `params` may be shapes."""
        cache, none = self.state_shapes(batch, length).cache, np.zeros(batch, np.int32)
        self._extending(params, cache, np.zeros((batch, width), np.int32), none, none)

    def draft_for(
        self,
        params: Params,
        cache: KVCache,
        target: DecodeState,
        sizes: np.ndarray,
        steps: int,
        vocab_size: int,
        with_proposal: bool = False,
    ) -> tuple[KVCache, SelfDrafts]:
        """`DecodeEngine.draft` for the slots of another engine's state. Consumes `cache`, but not `target`.

        Args:
          target: decode state of the policy: last tokens, lengths, limits and noise keys are read, not its
            cache.
          sizes: int32 [B], tokens known of each slot. Where the target has gone on since, nothing is drafted.
          vocab_size: vocabulary size of the target, and width of the proposal.
        """
        columns = self.buckets.max_drafts
        if not 0 < steps <= columns:
            raise ValueError(f"cannot draft {steps} steps: buckets.max_drafts is {columns}")
        return self._drafting_for(params, cache, target, sizes, steps, vocab_size, with_proposal).run()

    def _drafting_for(
        self,
        params: Params,
        cache: KVCache,
        target: DecodeState,
        sizes: np.ndarray,
        steps: int,
        vocab_size: int,
        with_proposal: bool,
    ) -> CompiledCall:
        columns = self.buckets.max_drafts
        drafting = self._programs.draft(columns, with_proposal)

        def draft(
            params: Params, cache: KVCache, target: DecodeState, sizes: Array, rope: Array, steps: Array
        ) -> tuple[KVCache, SelfDrafts]:
            active = target.active & (target.lengths + 1 == sizes)
            state, drafts = drafting(params, target.replace(cache=cache, active=active), rope, steps)
            if with_proposal:  # nothing is drafted of what only the target's vocabulary has
                more = [(0, 0), (0, 0), (0, vocab_size - self.config.vocab_size)]
                drafts = drafts.replace(proposal=jnp.pad(drafts.proposal, more, constant_values=-jnp.inf))
            return state.cache, drafts

        told = jnp.asarray(sizes.copy())  # as in `extend`
        target = target.replace(cache=None, sampling=None)
        args = (params, cache, target, told, self._rope, np.int32(steps))
        key = ("draft_for", cache.batch, cache.length, columns, with_proposal, vocab_size, *self.program_key)
        return CompiledCall(self.pool.get(key, draft, args, donate_argnums=(1,)), args)

    def compile_draft_for(
        self, params: Params, batch: int, length: int, target: DecodeState, vocab_size: int
    ) -> None:
        """Compiles `draft_for` a cache of this shape; `params` and `target` may be shapes."""
        cache, none = self.state_shapes(batch, length).cache, np.zeros(batch, np.int32)
        self._drafting_for(params, cache, target, none, 1, vocab_size, False)

    def programs(self, policy: DecodeEngine, params: Params, shapes: Shapes, batch: int) -> list[Program]:
        """Returns every program that drafting for a target of `batch` slots can need, moves from larger
        batches included.

        Args:
          policy: the target.
          params: the small model's weights, or their shapes.
          shapes: the target's.
          batch: slots of the target.
        """
        shapes = dataclasses.replace(shapes, first_prompts=())  # its caches begin with the shortest
        own = ProgramList(self, params, shapes)
        target, vocab_size = policy.state_shapes(batch, shapes.lengths[0]), policy.config.vocab_size
        programs = [own.prefill(prefix) for prefix in shapes.entering((batch, shapes.lengths[-1]))]
        for length in shapes.lengths:
            programs += own.inserts((batch, length))
            for width in CATCH_UP_WIDTHS:
                programs.append(functools.partial(self.compile_extend, params, batch, length, width))
            programs.append(
                functools.partial(self.compile_draft_for, params, batch, length, target, vocab_size)
            )
            programs += own.moves((batch, length))
            for narrow, wide in itertools.pairwise(shapes.larger(batch)):
                programs.append(functools.partial(self.compile_compact, wide, narrow, length))
        return programs

    def _extend(
        self, params: Params, cache: KVCache, tokens: Array, lengths: Array, counts: Array, rope: Array
    ) -> KVCache:
        rows = all_rows(*tokens.shape)
        return self._unsampled.extend(params, cache, tokens, lengths, counts, rows, rope)


class Companion:
    """A small model with a cache of its own for every slot of the target's state: a `SlotDrafter`.

    Args:
      target: the policy's engine: its shapes, sampling distribution, rule and pool are used here, too.
      config: the small model's architecture. Its vocabulary may be shorter than the target's.
      params: its weights.
      numerics: numerics of the companion; by default those of the target.
      mesh: its devices, from `mesh_of_a_drafter`; by default the target's mesh.
      strategies: the chains that it drafts.

    Attributes:
      extended: tokens that had to be caught up with since `begin`.
    """

    ahead: Any = None

    def __init__(
        self,
        target: DecodeEngine,
        config: ModelConfig,
        params: Params,
        numerics: Numerics | None = None,
        mesh: Mesh | None = None,
        strategies: tuple[DraftStrategy, ...] = (),
    ) -> None:
        self.strategies = strategies
        self.vocab_size = target.config.vocab_size
        if config.vocab_size > self.vocab_size:
            raise ValueError(f"vocab_size: {config.vocab_size} is more than the target's {self.vocab_size}")
        self.engine = CompanionEngine(
            config,
            target.numerics if numerics is None else numerics,
            target.sampling,
            target.buckets,
            target.eos_token_ids,
            pool=target.pool,
            mesh=target.mesh if mesh is None else mesh,
            verification=target.verification,
        )
        self.params = self.engine.load_params(params)
        self._target = target
        self.extended = 0
        self._prefixes: dict[tuple[int, ...], tuple[Prefix, int]] = {}  # the newest, and their rows in it

    @property
    def batch(self) -> int:
        """Slots, B."""
        return self._state.batch

    def use(self, params: Params) -> None:
        """Drafts with other weights, any float dtype, which are copied. Call it between rollouts: entries of
        the cache stay as they are.
        """
        self.params = self.engine.load_params(params, copy=True)
        self._prefixes.clear()

    # -- what happens to the target's slots; see `SlotDrafter` -----------------------------------------------

    def start(self, batch: int, lengths: np.ndarray | None = None) -> None:
        self.begin(batch, self.engine.buckets.cache[0])
        if lengths is not None:
            self.set_known_lengths(lengths)

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Returns the prompts: those that are inserted are prefilled then."""
        return prompts

    def insert(
        self, prefilled: Sequence[Sequence[int]], assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        slots = [assignment.slot for assignment in assignments]
        self.enter(slots, [prefilled[assignment.row] for assignment in assignments])

    def advance(self, result: DecodeResult) -> None:
        counts = (result.tokens >= 0).sum(axis=1)
        slots = np.flatnonzero(counts)
        self.follow(slots, result.tokens[slots], counts[slots])

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        self.rewind(slots, sizes)
        self.follow(slots, tokens, counts)

    def draft(self, state: DecodeState, strategy: DraftStrategy) -> ScoredTree:
        drafts = self.draft_chains(state, strategy.depth)
        tree = drafts.tree(strategy.depth)
        sure = margin_log_probability(drafts.margins[:, : strategy.depth])
        return ScoredTree(tree, jnp.where(tree.valid, jnp.cumsum(sure, axis=1), -jnp.inf))

    def compile(
        self, shapes: Shapes, batch: int, lengths: Sequence[int], should_stop: Callable[[], bool]
    ) -> None:
        """Compiles for all lengths, without a decode state: another thread may draft meanwhile."""
        params = self.engine.param_shapes(self.params)
        compile_until(should_stop, self.engine.programs(self._target, params, shapes, batch))

    # -- the cache -------------------------------------------------------------------------------------------

    def begin(self, batch: int, length: int) -> None:
        """A rollout begins: idle slots, as many and as long as those of the target's state."""
        self._state: DecodeState | None = None  # gone before there is another
        self._state = self.engine.init_state(batch, length)  # of which only the cache is used
        slots = self._state.batch
        self._tokens = np.zeros((slots, self.engine.buckets.cache[-1] + 1), np.int32)  # tokens, by position
        self._sizes = np.zeros(slots, np.int32)  # how many are known; 0 for a slot without a request
        self._lengths = np.zeros(slots, np.int32)  # entries of the cache, from the first on, that are right
        self._chains = np.full((slots, self.engine.buckets.max_drafts), -1, np.int32)  # drafted after them
        self._drafted: Array | None = None  # the newest chains, still on the device
        self.extended = 0

    def enter(self, slots: Sequence[int], sequences: Sequence[Sequence[int]]) -> None:
        """Requests enter `slots`.

        Args:
          sequences: all that is known of each, token ids: the prompt, and of one that has been decoding the
            tokens that it sampled.
        """
        self.forget(slots)
        found = self._prefill(sequences)
        for prefix in {id(prefix): prefix for prefix, _ in found}.values():
            own = [
                Assignment(row, slot, _NO_KEY, 0)
                for slot, (its_prefix, row) in zip(slots, found, strict=True)
                if its_prefix is prefix
            ]
            self.grow(prefix.cache.length)
            self._state = self.engine.bulk_insert(prefix, self._state, own)
        for slot, sequence in zip(slots, sequences, strict=True):
            self._tokens[slot, : len(sequence)] = sequence
            self._sizes[slot] = len(sequence)
            self._lengths[slot] = len(sequence) - 1

    def set_known_lengths(self, lengths: np.ndarray) -> None:
        """To time drafting: as if every slot had a request of so many tokens and one more, int32 [B]."""
        self._lengths, self._sizes = lengths.astype(np.int32), lengths.astype(np.int32) + 1

    def _prefill(self, sequences: Sequence[Sequence[int]]) -> list[tuple[Prefix, int]]:
        """Returns the prefilled row of each prompt; equal prompts, as in a group, share one."""
        wanted = [tuple(sequence) for sequence in sequences]
        by_length: dict[int, list[tuple[int, ...]]] = {}
        # Into states of fewer slots, prompts are inserted from the smallest prefill only (`Shapes.entering`).
        batches, prefills = self.engine.buckets.batch, self.engine.prefill_rows
        rows = prefills[-1] if self.batch == batches[-1] else prefills[0]
        for sequence in dict.fromkeys(wanted):
            if sequence not in self._prefixes or self._prefixes[sequence][0].cache.batch > rows:
                by_length.setdefault(self.engine.prefill_length(len(sequence)), []).append(sequence)
        for alike in by_length.values():
            for start in range(0, len(alike), rows):
                together = alike[start : start + rows]
                prefix = self.engine.prefill(self.params, together)
                self._prefixes |= {sequence: (prefix, row) for row, sequence in enumerate(together)}
        found = [self._prefixes[sequence] for sequence in wanted]
        while len(self._prefixes) > self.engine.buckets.batch[-1]:
            del self._prefixes[next(iter(self._prefixes))]
        return found

    def follow(self, slots: Sequence[int], tokens: Array | np.ndarray, counts: Array | np.ndarray) -> None:
        """The target sampled `tokens` in `slots`, drafted or not.

        Args:
          tokens: int32 [n, T].
          counts: int32 [n], how many of them.
        """
        self._apply_finished()
        slots, tokens, counts = (np.asarray(x) for x in (slots, tokens, counts))
        counts = np.where(self._sizes[slots] > 0, counts, 0)
        rows, order = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self._tokens[slots[rows], self._sizes[slots[rows]] + order] = tokens[rows, order]
        # Drafting wrote the entry of the last token, and of every draft but the last.
        came_true, written = self._answer(slots, tokens, counts)
        self._lengths[slots] += np.minimum(np.minimum(1 + came_true, written), counts)
        self._sizes[slots] += counts

    def _answer(
        self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many drafts of each slot came true, and how many there were; they are over now."""
        chains, width = self._chains[slots], min(self._chains.shape[1], tokens.shape[1])
        came_true = np.cumprod(chains[:, :width] == tokens[:, :width], axis=1).sum(axis=1)
        self._drop(slots[counts > 0])
        return came_true, (chains >= 0).sum(axis=1)

    def _drop(self, slots: np.ndarray) -> None:
        """The drafts of `slots` are over."""
        self._chains[slots] = -1

    def draft_chains(self, target: DecodeState, steps: int, with_proposal: bool = False) -> SelfDrafts:
        """Chains of up to `steps` tokens for every active slot of the target; see `DecodeEngine.draft`.

        Slots that were never inserted get none, and neither do those that the target decodes just now: what
        they sampled must be given before.
        """
        theirs, own = (target.batch, target.cache.length), (self.batch, self._state.cache.length)
        if own[0] != theirs[0] or own[1] > theirs[1]:
            raise ValueError(f"the target's state is {theirs} (slots, positions), the companion's {own}")
        self._apply_finished()
        self.grow(target.cache.length)
        self._catch_up()
        cache, drafts = self.engine.draft_for(
            self.params, self._state.cache, target, self._sizes, steps, self.vocab_size, with_proposal
        )
        self._state = self._state.replace(cache=cache)
        self._drafted = drafts.tokens
        return drafts

    def compact(self, slots: Sequence[int], batch: int = 0) -> None:
        """Follows `DecodeEngine.compact` of the target; arguments as there."""
        self._apply_finished()
        slots = list(slots)
        self._state = self.engine.compact(self._state, slots, batch)
        self._keep(slots)

    def widen(self, slots: int) -> None:
        """Follows `DecodeEngine.widen` of the target."""
        self._apply_finished()
        self._state = self.engine.widen(self._state, slots)
        self._keep(range(len(self._sizes)))

    def _keep(self, slots: Sequence[int]) -> None:
        """Keeps the entries of `slots`; the other slots of the state are empty."""
        for name in ("_tokens", "_sizes", "_lengths", "_chains"):
            taken = getattr(self, name)[list(slots)]
            missing = [(0, self.batch - len(slots)), *((0, 0),) * (taken.ndim - 1)]
            setattr(self, name, np.pad(taken, missing, constant_values=-1 if name == "_chains" else 0))

    def grow(self, length: int) -> None:
        """Room for `length` positions a slot; `draft` does it when the target has grown."""
        while self._state.cache.length < length:
            self._state = self.engine.grow(self._state)

    def rewind(self, slots: Sequence[int], sizes: Sequence[int]) -> None:
        """Truncates each of `slots` to a number of tokens."""
        self._apply_finished()
        slots = np.asarray(slots, np.int32)
        self._sizes[slots] = np.where(self._sizes[slots] > 0, sizes, 0)
        self._lengths[slots] = np.minimum(self._lengths[slots], np.maximum(self._sizes[slots] - 1, 0))
        self._drop(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is known of `slots` any more: their requests are over."""
        self._apply_finished()
        slots = np.asarray(slots, np.int32)
        self._sizes[slots] = self._lengths[slots] = 0
        self._drop(slots)

    def _apply_finished(self) -> None:
        """Takes over what the newest drafting wrote. A chain that was drafted before stays where there is
        none of the newest: its slot's tokens may be in progress.
        """
        if self._drafted is not None:
            drafted, self._drafted = np.asarray(self._drafted), None
            new = drafted[:, 0] >= 0
            self._chains[new] = drafted[new]

    def _catch_up(self) -> None:
        """Writes the entries of all known tokens but the last of each slot, which drafting begins with."""
        while (missing := int((self._sizes - 1 - self._lengths).max())) > 0:
            self._extend(next((w for w in CATCH_UP_WIDTHS if w >= missing), CATCH_UP_WIDTHS[-1]))

    def _extend(self, width: int) -> None:
        counts = np.clip(self._sizes - 1 - self._lengths, 0, width)
        places = np.minimum(self._lengths[:, None] + np.arange(width), self._tokens.shape[1] - 1)
        tokens = np.take_along_axis(self._tokens, places, axis=1)
        cache = self.engine.extend(self.params, self._state.cache, tokens, self._lengths, counts)
        self._state = self._state.replace(cache=cache)
        self._lengths += counts
        self.extended += int(counts.sum())
