"""A head on devices of its own, which drafts the next window while the policy verifies the last one.

SpecActor, section 4.1; `rljax/papers/specactor/drafting_ahead.py` has the protocol. Features travel from the
policy's devices to the head's when a pass is over, and weights when a rollout begins.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh

from drafters.eagle.collecting import FeatureCollector
from drafters.eagle.drafting_behind import draft_behind
from drafters.eagle.model import HeadConfig
from drafters.eagle.slots import HeadSlots, PrefilledHead
from rljax import target
from rljax.engine.draft_tree import DraftStrategy, ScoredTree
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import DecodeState
from rljax.papers.specactor.drafting_ahead import DraftingAhead
from rljax.sharding import replicated_sharding


class AheadHeadSlots(DraftingAhead, HeadSlots):
    """A head that drafts ahead.

    Args:
      config, engine, collector, unread_bytes: see `HeadSlots`.
      mesh: its devices.
      window: most tokens that it drafts at a time.
    """

    def __init__(
        self,
        config: HeadConfig,
        engine: DecodeEngine,
        collector: FeatureCollector,
        mesh: Mesh,
        window: int,
        unread_bytes: int,
    ) -> None:
        chain = (DraftStrategy(window, 1, window),)
        HeadSlots.__init__(self, config, engine, chain, collector, unread_bytes, mesh)
        self._plan_ahead(window, engine.eos_token_ids)
        # Numbers of unanswered drafts that programs read, rounded up: none, a window, and the most.
        self._unanswered_sizes = sorted({0, window, 2 * window - 2})

    def _reach(self) -> int:
        return 3 * self.strategies[0].depth  # behind at most two windows that are not answered

    # -- slots -----------------------------------------------------------------------------------------------

    def start(self, batch: int, lengths: np.ndarray | None = None) -> None:
        super().start(batch)
        self._begin_ahead(batch)
        self._sizes = np.zeros(batch, np.int32)
        self._cache_length = self._engine.buckets.cache[0]
        if lengths is not None:  # as if every slot held the pairs of so many tokens
            placed = target.put(np.asarray(lengths, np.int32), self._state.lengths.sharding)
            self._state = dataclasses.replace(self._state, lengths=placed)
            self._sizes, self._limits = lengths + 1, lengths + 1 + self._length

    def insert(
        self, prefilled: PrefilledHead, assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        super().insert(prefilled, assignments, requests)
        slots = [assignment.slot for assignment in assignments]
        self._resize(slots, [prefilled.sizes[assignment.row] for assignment in assignments])
        keys = [assignment.noise_key for assignment in assignments]
        self.add_requests(slots, keys, [assignment.max_response for assignment in assignments])

    def advance(self, result: DecodeResult) -> None:
        super().advance(result)
        counts = (result.tokens >= 0).sum(axis=1)
        slots = np.flatnonzero(counts)
        self.answered(slots, result.tokens[slots], counts[slots])

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        super().append(slots, sizes, tokens, counts)
        self._resize(slots, np.asarray(sizes) + np.asarray(counts))

    def _resize(self, slots: Sequence[int], sizes: Sequence[int] | np.ndarray) -> None:
        """Slots have so many tokens now, and no drafts."""
        self._apply_finished()
        self._sizes[list(slots)] = sizes
        self.windows.drop(np.asarray(slots, np.int32))

    def compact(self, slots: Sequence[int], batch: int) -> None:
        self._apply_finished()
        super().compact(slots, batch)
        self._keep(slots, batch)

    def widen(self, batch: int) -> None:
        self._apply_finished()
        before = len(self._sizes)
        super().widen(batch)
        self._keep(range(before), len(self._held))

    def _keep(self, slots: Sequence[int], batch: int) -> None:
        self._keep_ahead(slots, batch)
        self._sizes = np.pad(self._sizes[list(slots)], (0, batch - len(slots)))

    # -- drafting --------------------------------------------------------------------------------------------

    def _grow(self, length: int) -> None:
        self._cache_length = length

    def draft(self, state: DecodeState, strategy: DraftStrategy) -> ScoredTree:
        """Compiles and times drafting: every slot's drafts are replaced by a window of others."""
        batch, length = len(self._state.lengths), state.cache.length
        for unanswered in self._unanswered_sizes[1:]:
            self._program("draft_behind", *self._behind(batch, unanswered, length), donate=())
        if self._should_stop is not None:  # shapes stand in the place of arrays
            return self._run("draft_behind", *self._behind(batch, 0, length), donate=())
        self._apply_finished()
        self.windows.drop(np.arange(batch))
        self._grow(length)
        self._start(np.where(self._sizes > 0, self.window, 0).astype(np.int32))
        return self._drafts

    def _draft_behind(self, room: np.ndarray) -> tuple[Array, Array]:
        self._catch_up()
        unanswered = self.windows.unanswered
        size = next(size for size in self._unanswered_sizes if size >= unanswered.max())
        job = self._behind(len(room), size, self._cache_length)
        self._drafts = self._run("draft_behind", *job, donate=())
        return self._drafts.tree.tokens, self._drafts.log_probability

    def _behind(self, batch: int, unanswered: int, length: int) -> tuple[tuple, Any, dict[str, Any]]:
        """What `_run` takes to draft behind at most so many unanswered drafts: shapes, program, arguments."""
        chains = np.full((batch, unanswered), -1, np.int32)
        positions, keys = np.zeros(batch, np.int32), np.zeros((batch, 2), np.uint32)
        if self._should_stop is None:
            mine, counts = self.windows.chains, self.windows.unanswered
            rows, order = np.nonzero(np.arange(mine.shape[1]) < counts[:, None])
            chains[rows, unanswered - counts[rows] + order] = mine[rows, order]
            positions, keys = np.maximum(self._sizes - 1, 0), self._keys
        here = replicated_sharding(self._mesh)
        # Copies: a device may read an array in place, and later.
        arrays = [target.put(array, here) for array in (chains, positions.copy(), keys.copy())]
        given = self._given(state=self._state, chains=arrays[0], positions=arrays[1], noise_keys=arrays[2])
        sampling, attended = self._engine.sampling, self._attended(length)

        def behind(given: dict[str, Any]) -> ScoredTree:
            head, rest = self._taken(given, attended)
            return draft_behind(head, **rest, steps=self.window, sampling=sampling)

        return (batch, unanswered, self.window, sampling, attended), behind, given

    def _scores(self, sure: np.ndarray) -> np.ndarray:
        before = np.pad(sure[:, :-1], [(0, 0), (1, 0)])
        with np.errstate(invalid="ignore"):  # -inf behind the end, where nothing reads it
            return np.nan_to_num(sure - before)

    def _take_over(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        counts = np.where(self._sizes[slots] > 0, counts, 0)
        self._check(slots, tokens, counts)
        self._sizes[slots] += counts
