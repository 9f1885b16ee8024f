"""The state of a head for the engine's slots, on the device: it absorbs verified tokens, and drafts.

    slots.use(head_params, shared)                 # the weights of the rollout that begins
    slots.start(batch)
    slots.insert(slots.prefill(prefix, prompts), assignments, requests)
    slots.advance(result)                          # after every pass
    slots.widen(batch); slots.compact(kept, batch)
    tree = slots.draft(state, strategy)

Every forward pass of the engine hands out the policy's features (`DecodeEngine.hidden_layers`). They are
absorbed when drafts are next asked for, so that the head costs nothing for requests that end before. Until
then they stay unread in bounded memory; beyond it the oldest are absorbed early, and nothing is lost.

The slots have room for the longest sequence, but drafting reads only the decode state's cache bucket, and
absorbing only the longest slot, both rounded up to one of a few lengths (`attended_lengths`). So the time of
a draft level follows the present length.

Programs are in the engine's pool: shapes are rounded up, and all programs are compiled before the first
rollout, counted, and kept for the next process.
"""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from drafters.device import SlotDrafter
from drafters.eagle.collecting import FeatureCollector
from drafters.eagle.drafting import (
    DrafterState,
    Pairs,
    append_pairs,
    compute_pairs,
    draft,
    empty_state,
    forget,
)
from drafters.eagle.model import Head, HeadConfig
from drafters.eagle.placement import head_shardings, result_shardings, shape_of, shared_shardings
from rljax import target
from rljax.engine.draft_tree import DraftStrategy, ScoredTree
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.kv_cache import KVCache, cache_dtype, copy_rows, take_slots, with_batch
from rljax.engine.placement import cache_shardings, feature_sharding
from rljax.engine.shapes import Shapes
from rljax.engine.slot_moves import with_slots
from rljax.engine.state import DecodeState, Prefix
from rljax.models.rope import rope_table
from rljax.models.transformer import Params
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.rows import Numerics
from rljax.processes import to_host
from rljax.sharding import constrain, replicated_sharding, row_multiple

_WIDTHS = (2, 4, 8, 16, 64)
"""Numbers of tokens a slot that are absorbed at once; each compiles a program."""


def attended_lengths(cache_buckets: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of pairs that programs read, ascending: the first cache bucket, always the next
    that is at least twice as long, and the last.

    They are fewer than the buckets, since for each of them everything that drafts and absorbs is compiled.
    """
    lengths = [cache_buckets[0]]
    for bucket in cache_buckets:
        if bucket >= 2 * lengths[-1]:
            lengths.append(bucket)
    return tuple(sorted({*lengths, cache_buckets[-1]}))


def head_numerics(engine: DecodeEngine, mesh: Mesh | None) -> Numerics:
    """Returns an engine's numerics on a mesh, or on one device, without row invariance, which drafts do not
    need.
    """
    kernels = KernelChoice() if mesh is None or mesh.size == 1 else KernelChoice().on_mesh(mesh)
    return Numerics(False, engine.numerics.compute_dtype, kernels)


@dataclasses.dataclass(frozen=True)
class PrefilledHead:
    """Prompts that the head has prefilled.

    Attributes:
      state: one slot for each prompt.
      states: [N, T, S, d], the policy's features, on the host; None if nothing is trained on them.
      sizes: tokens of each prompt.
    """

    state: DrafterState
    states: np.ndarray | None
    sizes: tuple[int, ...]


class HeadSlots(SlotDrafter):
    """A head beside the slots of an engine's decode state.

    Args:
      config: the head's shape.
      engine: the engine; its shapes, sampling distribution, verification rule and pool are used, too.
      strategies: the trees that it drafts.
      collector: collects the features of responses that the head is trained on.
      unread_bytes: limit for the unread features, on the device.
      mesh: devices of its own, to which the policy's features and weights are copied; None for the engine's.

    Attributes:
      numerics: the policy's, without row invariance, which drafts do not need.
      unread_bytes: see the arguments.
    """

    def __init__(
        self,
        config: HeadConfig,
        engine: DecodeEngine,
        strategies: tuple[DraftStrategy, ...],
        collector: FeatureCollector,
        unread_bytes: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        self.unread_bytes = unread_bytes
        self.strategies, self._collector = strategies, collector
        self._engine, self._apart = engine, mesh is not None
        self._mesh = engine.mesh if mesh is None else mesh
        self.config, self.numerics = config, head_numerics(engine, self._mesh)
        self._length = engine.buckets.cache[-1]
        self._attended_lengths = attended_lengths(engine.buckets.cache)
        self._rope = jnp.asarray(rope_table(engine.config, self._length + self._reach()))
        if self._mesh is not None:
            self._rope = target.put(self._rope, replicated_sharding(self._mesh))
        self._key = (config, self.numerics, len(self._rope), self._mesh)
        self._unread: collections.deque[tuple[Array, np.ndarray, np.ndarray]] = collections.deque()
        self._unread_size = 0  # bytes of the features in it
        self._should_stop: Callable[[], bool] | None = None  # set where shapes stand in the place of arrays

    def _reach(self) -> int:
        """Returns how many positions behind the last pair drafts stand at."""
        return self.config.reach(max(strategy.depth for strategy in self.strategies))

    def use(self, params: Params, shared: Params) -> None:
        """Sets the head's weights, in its compute dtype, and the policy's (`shared_params`)."""
        if self._mesh is not None:
            params = target.put(params, head_shardings(params, self.config, self._mesh, decoding=True))
        if self._apart:
            shared = target.put(shared, shared_shardings(shared, self._mesh))
        self._params, self._shared = params, shared

    def state_shapes(self, batch: int, length: int | None = None) -> DrafterState:
        """Returns the shapes of the state of so many slots, and their shardings on a mesh. `length` is the
        number of pairs that they have room for; None for the most.
        """
        length = self._length if length is None else length
        empty = functools.partial(empty_state, self.config, batch, length, cache_dtype(self.numerics))
        return self._with_shardings(jax.eval_shape(empty))

    def start(self, batch: int, lengths: np.ndarray | None = None) -> None:
        """Begins with `batch` slots, empty ones: drafting takes as long for those."""
        self._state = self._empty(batch, self._length)
        self._held = np.zeros(batch, np.int64)  # the most pairs that each slot may hold
        self._unread.clear()
        self._unread_size = 0

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> PrefilledHead:
        states = to_host(prefix.states) if self._collector.collects else None
        return PrefilledHead(self._prefill(prefix, prompts), states, tuple(map(len, prompts)))

    def _prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> DrafterState:
        """Returns the state after the prompts' pairs: every token but the first, with the features before."""
        rows, length = prefix.states.shape[:2]
        tokens, counts = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - 1] = prompt[1:]
            counts[row] = len(prompt) - 1
        empty = self._empty(rows, prefix.cache.length)
        return self._absorb(empty, self._here(prefix.states), tokens, counts, KEY_BLOCK)

    def insert(
        self, prefilled: PrefilledHead, assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        rows, slots = ([getattr(each, name) for each in assignments] for name in ("row", "slot"))
        self._skip(slots)
        self._insert(prefilled.state, rows, slots)
        self._held[slots] = prefilled.state.cache.length  # on the host, without waiting for the lengths
        self._collector.insert(prefilled.states, rows, slots, requests)

    def advance(self, result: DecodeResult) -> None:
        """Keeps the features of sampled tokens, and absorbs the oldest ones beyond `unread_bytes`."""
        counts = (result.tokens >= 0).sum(axis=1).astype(np.int32)
        self._unread.append((self._here(result.states), np.maximum(result.tokens, 0), counts.copy()))
        self._unread_size += result.states.nbytes
        while self._unread_size > self.unread_bytes:
            self._collector.totals["absorbed_early"] += self._absorb_oldest()
        self._collector.advance(result.states, counts)

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Empties the slots until they sample again, and does not train on their responses: appended tokens
        come without features.
        """
        self._skip(slots)
        missed = np.zeros(len(self._state.lengths), bool)
        missed[list(slots)] = True
        self._forget(missed)
        self._collector.totals["lost_contexts"] += len(slots)
        self._collector.drop(slots)

    def compact(self, slots: Sequence[int], batch: int) -> None:
        self._skip(sorted(set(range(len(self._state.lengths))) - set(slots)))
        self._catch_up()
        taken = np.zeros(batch, np.int32)
        taken[: len(slots)] = slots
        self._compact(taken)
        self._collector.compact(slots)

    def widen(self, batch: int) -> None:
        """As the engine does, bucket by bucket."""
        self._catch_up()
        for wider in self._engine.buckets.batch:
            slots = len(self._state.lengths)
            if slots < wider <= batch:
                widened = functools.partial(_widen, batch=wider, shardings=self._moved(self._state))
                self._state = self._run("widen", (slots, wider), widened, self._state, donate=())
                self._held = np.pad(self._held, (0, wider - slots))

    def draft(self, state: DecodeState, strategy: DraftStrategy) -> ScoredTree:
        self._catch_up()
        attended, sampling = self._attended(state.cache.length), self._engine.sampling
        coupled = self._engine.verification == "coupled"
        keys = state.noise_keys if coupled else None
        given = self._given(state=self._state, positions=state.lengths, noise_keys=keys)
        shapes = (len(self._state.lengths), strategy, sampling, coupled, attended)

        def drafted(given: dict[str, Any]) -> ScoredTree:
            head, rest = self._taken(given, attended)
            if self._engine.weights == "fsdp" and self._mesh is not None:  # gathered once for all levels
                shared = constrain(head.shared, shared_shardings(head.shared, self._mesh))
                head = head.replace(shared=shared)
            return draft(head, **rest, strategy=strategy, sampling=sampling)

        return self._run("draft", shapes, drafted, given, donate=())

    # -- programs --------------------------------------------------------------------------------------------

    def compile(
        self, shapes: Shapes, batch: int, lengths: Sequence[int], should_stop: Callable[[], bool]
    ) -> None:
        """Compiles without any array, so that another thread may draft meanwhile.

        Raises:
          InterruptedError: it should stop.
        """
        mock = copy.copy(self)  # the same, with shapes in the place of arrays
        mock._should_stop, mock._unread = should_stop, collections.deque()
        mock._params, mock._shared = jax.tree.map(shape_of, (self._params, self._shared))
        entering = [self._engine.prefix_shapes(*each) for each in shapes.entering((batch, self._length))]
        prefilled = [mock._prefill(prefix, []) for prefix in entering]
        larger = shapes.larger(batch)
        for other in larger:
            mock.start(other)
            mock._compact(np.zeros(batch, np.int32))
        mock.start(batch)
        mock._follow_nothing(prefilled, shapes)
        if shapes.widens and larger:
            mock.widen(larger[0])
            mock.start(batch)
        for length in lengths:
            for strategy in self.strategies:
                mock.draft(self._engine.state_shapes(batch, length), strategy)

    def _follow_nothing(self, prefilled: Sequence[DrafterState], shapes: Shapes) -> None:
        """Runs everything that follows the slots of the present batch, but compaction, without any request.

        Args:
          prefilled: results of `_prefill` to insert.
          shapes: see `compile`.
        """
        batch, longest = len(self._state.lengths), shapes.lengths[-1]
        most = self._attended(longest)
        for state in prefilled:
            self._insert(state, [], [])
        self._forget(np.zeros(batch, bool))
        features = (len(self._engine.hidden_layers) + 1, self._engine.config.hidden_size)
        passes = {nodes + 1 for *_, nodes in shapes.passes((batch, longest))}
        for tokens in {self._engine.decode_steps_per_sync} | passes:
            handed_out = self._feature_shapes((batch, tokens, *features))
            nothing = np.zeros((batch, tokens), np.int32)
            for shorter, width in zip((0, *_WIDTHS), _WIDTHS, strict=False):
                if shorter < tokens:
                    window = (*self._window(handed_out, nothing, 0, width), np.zeros(batch, np.int32))
                    for attended in self._attended_lengths:
                        if attended <= most:
                            self._state = self._absorb(self._state, *window, attended)

    def _given(self, **more: Any) -> dict[str, Any]:
        """Returns the arguments of a program of the head: its arrays, and more."""
        return {"params": self._params, "shared": self._shared, "rope": self._rope, **more}

    def _taken(self, given: dict[str, Any], attended: int) -> tuple[Head, dict[str, Any]]:
        """Returns the head of such arguments, and all others; of their `state` so many pairs are read."""
        rest = dict(given)
        arrays = [rest.pop(name) for name in ("params", "shared", "rope")]
        rest["state"] = rest["state"].replace(attended=attended)
        return Head(*arrays, self.config, self.numerics, self._mesh), rest

    def _run(
        self, name: str, shapes: tuple, function: Callable[..., Any], *args: Any, donate: tuple = (0,)
    ) -> Any:
        """Runs a program from the pool. It may overwrite the arguments at `donate`."""
        args = tuple(jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args)
        program = self._program(name, shapes, function, *args, donate=donate)
        if self._should_stop is None:
            return program(*args)
        return self._with_shardings(jax.eval_shape(function, *args))

    def _program(
        self, name: str, shapes: tuple, function: Callable[..., Any], *args: Any, donate: tuple = (0,)
    ) -> Callable[..., Any]:
        """Returns a program from the pool, which compiles it if need be."""
        if self._should_stop is not None and self._should_stop():
            raise InterruptedError("compiling has ended")
        key = (f"head_{name}", *shapes, *self._key)
        return self._engine.pool.get(key, self._placed(function), args, donate_argnums=donate)

    def _placed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with its result laid out on the mesh, so that every program takes the results of
        any other.
        """
        if self._mesh is None:
            return function

        def placed(*args: Any) -> Any:
            result = function(*args)
            return constrain(result, result_shardings(result, self.config, self._mesh))

        return placed

    def _with_shardings(self, shapes: Any) -> Any:
        """Returns the shapes of a result with the shardings that `_placed` gives it."""
        if self._mesh is None:
            return shapes
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            shapes,
            result_shardings(shapes, self.config, self._mesh),
        )

    def _here(self, states: Array) -> Array:
        """Returns the policy's features on the head's devices."""
        if not self._apart:
            return states
        if self._should_stop is not None:
            return self._feature_shapes(states.shape)
        return target.put(states, feature_sharding(self._mesh))

    def _feature_shapes(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return self._with_shardings(jax.ShapeDtypeStruct(shape, self._engine.numerics.dtype))

    def _moved(self, state: DrafterState) -> KVCache | None:
        """Returns the layout of a cache whose slots devices split; None where every device has all slots."""
        if self._mesh is None or row_multiple(self._mesh) == 1:
            return None
        return cache_shardings(state.cache, self.config.layer, self._mesh)

    def _empty(self, batch: int, length: int) -> DrafterState:
        if self._mesh is None and self._should_stop is None:
            return empty_state(self.config, batch, length, cache_dtype(self.numerics))
        shapes = self.state_shapes(batch, length)
        if self._should_stop is not None:
            return shapes
        return target.zeros(shapes, result_shardings(shapes, self.config, self._mesh))

    def _insert(self, prefilled: DrafterState, rows: Sequence[int], slots: Sequence[int]) -> None:
        batch = len(self._state.lengths)
        from_, into = np.zeros(batch, np.int32), np.full(batch, batch, np.int32)  # out of range: skipped
        from_[: len(rows)], into[: len(slots)] = rows, slots
        shapes = (batch, len(prefilled.lengths), prefilled.cache.length)
        insert = functools.partial(_insert, shardings=self._moved(self._state))
        self._state = self._run("insert", shapes, insert, self._state, prefilled, from_, into)

    def _forget(self, missed: np.ndarray) -> None:
        self._state = self._run("forget", (len(missed),), forget, self._state, missed)
        self._held[missed] = 0

    def _compact(self, taken: np.ndarray) -> None:
        shapes = (len(self._state.lengths), len(taken))
        take = functools.partial(_take, shardings=self._moved(self._state))
        self._state = self._run("compact", shapes, take, self._state, taken, donate=())
        self._held = self._held[taken]

    def _attended(self, pairs: int) -> int:
        """Returns the shortest length of a program that reads so many pairs, or the longest there is."""
        return next((each for each in self._attended_lengths if each >= pairs), self._length)

    def _skip(self, slots: Sequence[int]) -> None:
        """Skips the unread features of requests that have left `slots`."""
        for _, _, counts in self._unread:
            counts[list(slots)] = 0

    def _catch_up(self) -> None:
        while self._unread:
            self._absorb_oldest()

    def _absorb_oldest(self) -> bool:
        """Absorbs the features of the oldest host sync; returns False if no request needs them any more."""
        states, tokens, counts = self._unread.popleft()
        self._unread_size -= states.nbytes
        for start in range(0, int(counts.max()), _WIDTHS[-1]):
            left = np.clip(counts - start, 0, _WIDTHS[-1])
            width = next(width for width in _WIDTHS if width >= left.max())
            window = self._window(states, tokens, start, width)
            attended = self._attended(int(self._held.max()))
            self._state = self._absorb(self._state, *window, left, attended)
            self._held += left
        return bool(counts.any())

    def _window(self, states: Array, tokens: np.ndarray, start: int, width: int) -> tuple[Array, np.ndarray]:
        """Returns `width` positions of features and tokens, from `start` on."""
        there = tokens[:, start : start + width]
        tokens = np.pad(there, [(0, 0), (0, width - there.shape[1])])
        if states.shape[1] == width:
            return states, tokens
        window = functools.partial(_window, width=width)
        args = (states, np.asarray(start, np.int32))
        return self._run("window", (*states.shape[:2], width), window, *args, donate=()), tokens

    def _absorb(
        self, state: DrafterState, states: Array, tokens: np.ndarray, counts: np.ndarray, attended: int
    ) -> DrafterState:
        """Appends counts[i] pairs to slot i, none of which has more than `attended` of them."""
        given = self._given(states=states, tokens=jnp.asarray(tokens), counts=jnp.asarray(counts))

        def computed(state: DrafterState, given: dict[str, Any]) -> Pairs:
            head, rest = self._taken({**given, "state": state}, attended)
            return compute_pairs(head, **rest)

        shapes = (*tokens.shape, state.cache.length)
        pairs = self._run("pairs", (*shapes, attended), computed, state, given, donate=())
        append = functools.partial(append_pairs, numerics=self.numerics)
        return self._run("append", shapes, append, state, pairs)


def _window(states: Array, start: Array, width: int) -> Array:
    """Returns states[:, start : start + width], padded with zeros."""
    return lax.dynamic_slice_in_dim(
        jnp.pad(states, [(0, 0), (0, -states.shape[1] % width), (0, 0), (0, 0)]), start, width, axis=1
    )


def _insert(
    state: DrafterState,
    prefilled: DrafterState,
    rows: Array,
    slots: Array,
    shardings: KVCache | None = None,
) -> DrafterState:
    """Copies prefilled row rows[i] into slot slots[i]; slots out of range are skipped. `shardings` as in
    `copy_rows`.
    """
    return DrafterState(
        cache=copy_rows(state.cache, prefilled.cache, rows, slots, shardings),
        lengths=state.lengths.at[slots].set(prefilled.lengths[rows], mode="drop"),
        outputs=state.outputs.at[slots].set(prefilled.outputs[rows], mode="drop"),
    )


def _take(state: DrafterState, slots: Array, shardings: KVCache | None = None) -> DrafterState:
    cache = take_slots(state.cache, slots, shardings)
    return DrafterState(cache, state.lengths[slots], state.outputs[slots])


def _widen(state: DrafterState, batch: int, shardings: KVCache | None = None) -> DrafterState:
    if shardings is None:
        return with_slots(state, batch)
    same = jnp.arange(len(state.lengths), dtype=jnp.int32)
    cache = copy_rows(with_batch(state.cache, batch), state.cache, same, same, shardings)
    rest = with_slots((state.lengths, state.outputs), batch)
    return DrafterState(cache, *rest)
