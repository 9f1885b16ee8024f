"""A companion on devices of its own, which drafts the next window while the target verifies the last one.

SpecActor, section 4.1. It shares no array with the target, so that neither waits for the other's device: the
tokens, positions and noise keys that it drafts from are kept on the host, where they are known before the
target's next pass. `DraftWindows` says how far it may go on behind drafts that are not answered yet.

    companion.fill(slots)                           # drafts where nothing is ready, and waits for it
    tokens, scores = companion.ready(slots, width)  # what to verify now
    companion.go_on(slots)                          # while the target verifies: as if all were accepted
    companion.advance(slots, tokens, counts)        # the answer, taken over with what was drafted meanwhile

The entries that drafting wrote behind a rejected draft are never read: the next window overwrites them.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.engine.companion import Companion
from rljax.engine.draft_windows import DraftWindows
from rljax.engine.engine import DecodeEngine
from rljax.engine.self_drafting import SelfDrafts, margin_log_probability
from rljax.engine.state import DecodeState
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics


@dataclasses.dataclass
class WindowCounts:
    """Counts of a rollout's windows.

    Attributes:
      requests: number of requests that entered slots.
      windows: number of times that drafts were made beside a pass of the target.
      in_time: number of these that were over when the pass was.
      wasted: drafts that were thrown away, rejected ones included.
      most_wasted: the most that one rejection threw away.
    """

    requests: int = 0
    windows: int = 0
    in_time: int = 0
    wasted: int = 0
    most_wasted: int = 0


class DecoupledCompanion(Companion):
    """A companion that drafts ahead.

    Args:
      target, config, params, numerics: see `Companion`.
      mesh: its devices.
      window: most tokens that it drafts at a time.

    Attributes:
      windows: the unanswered drafts, and how far to draft.
      counts: counts since `count_anew`.
    """

    def __init__(
        self,
        target: DecodeEngine,
        config: ModelConfig,
        params: Params,
        numerics: Numerics,
        mesh: Mesh,
        window: int,
    ) -> None:
        super().__init__(target, config, params, numerics, mesh)
        self._window = window
        self.count_anew()

    def count_anew(self) -> None:
        """A rollout begins, whose windows are counted."""
        self.counts = WindowCounts()

    def begin(self, batch: int, length: int) -> None:
        super().begin(batch, length)
        self.windows = DraftWindows(self.batch, self._window)
        self._limits = np.zeros(self.batch, np.int32)  # positions of prompt and response together, at most
        self._keys = np.zeros((self.batch, 2), np.uint32)  # of the noise
        self._answers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # not taken over yet
        self._under_way: SelfDrafts | None = None
        self._since = 0.0  # when these were begun, by `time.perf_counter`
        self._measured: list[float] = []

    def entitle(self, slots: Sequence[int], keys: Sequence[np.ndarray], responses: Sequence[int]) -> None:
        """Requests have entered `slots`: their noise keys, uint32 [2] each, and the most response tokens that
        each may still get.
        """
        slots = np.asarray(slots, np.int32)
        self._keys[slots] = np.stack(keys)
        self._limits[slots] = self._sizes[slots] + np.asarray(responses, np.int32)
        self.windows.windows[slots], self.windows.ahead[slots] = self._window, True
        self.counts.requests += len(slots)

    def pretend(self, lengths: np.ndarray) -> None:
        super().pretend(lengths)
        self._limits = self._sizes + self._state.cache.length

    # -- drafting --------------------------------------------------------------------------------------------

    def fill(self, slots: np.ndarray, length: int) -> None:
        """Drafts a window for those of `slots` that have no drafts, and waits for it.

        Args:
          length: positions of the target's cache.
        """
        self._settle()
        self.grow(length)
        self._go_on(slots[self.windows.unanswered[slots] == 0])
        self._settle()

    def ready(self, slots: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `width` drafts of each of n slots: tokens, int32 [n, width], -1 behind the last, and how
        sure the companion is of them and of all before, float32 [n, width].
        """
        self._settle()
        tokens, scores = self.windows.chains[slots, :width], self.windows.scores[slots, :width]
        missing = [(0, 0), (0, width - tokens.shape[1])]
        tokens = np.pad(tokens, missing, constant_values=-1)
        return tokens, np.cumsum(np.pad(scores, missing), axis=1)

    def go_on(self, slots: np.ndarray) -> None:
        """Begins to draft behind the drafts of `slots`, as if all of these were accepted, and does not wait.

        The target's pass over these slots is under way; `advance` brings its answer.
        """
        self._settle()
        self._go_on(slots)

    def _go_on(self, slots: np.ndarray) -> None:
        room = np.zeros(self.batch, np.int32)
        room[slots] = self.windows.room()[slots]
        unanswered = self.windows.unanswered
        rows, eos = np.arange(self.batch), self.engine.eos_token_ids
        ended = (unanswered > 0) & np.isin(self.windows.chains[rows, np.maximum(unanswered, 1) - 1], eos)
        room = np.where((self._sizes > 0) & ~ended, room, 0)
        if room.any():
            self._draft(room, int(room.max()))

    def draft(self, target: DecodeState, steps: int, with_proposal: bool = False) -> SelfDrafts:
        """Compiles and times drafting: every slot's drafts are replaced by `steps` others at most."""
        self._settle()
        self._drop(np.arange(self.batch))
        self.grow(target.cache.length)
        return self._draft(np.where(self._sizes > 0, steps, 0), steps)

    def _draft(self, room: np.ndarray, steps: int) -> SelfDrafts:
        """Begins to draft up to room[slot] tokens behind the drafts of each slot, `steps` at most."""
        self._catch_up()
        unanswered, rows = self.windows.unanswered, np.arange(self.batch)
        sizes = self._sizes + unanswered
        known = self._known[rows, np.maximum(self._sizes, 1) - 1]
        last = np.where(
            unanswered > 0, self.windows.chains[rows, np.maximum(unanswered, 1) - 1], known
        ).astype(np.int32)
        # What is left of the response also cuts a slot's chain to its room, behind which one more is sampled.
        remaining = np.minimum(self._limits - sizes, room + 1).astype(np.int32)
        state = DecodeState(
            cache=None,
            tokens=jnp.asarray(last),
            lengths=jnp.asarray(np.maximum(sizes - 1, 0).astype(np.int32)),
            remaining=jnp.asarray(remaining),
            active=jnp.asarray(room > 0),
            noise_keys=jnp.asarray(self._keys.copy()),
        )
        self._since = time.perf_counter()
        cache, drafts = self.engine.draft_for(
            self.params,
            self._state.cache,
            state,
            np.maximum(sizes, 1).astype(np.int32),
            steps,
            self.vocab_size,
        )
        self._state = self._state.replace(cache=cache)
        self._under_way = drafts
        return drafts

    # -- answers ---------------------------------------------------------------------------------------------

    def advance(self, slots: Sequence[int], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Notes an answer; it is taken over when the drafts that are under way are needed."""
        if self._under_way is not None:
            self.counts.windows += 1
            self.counts.in_time += int(self._under_way.tokens.is_ready())
        self._answers.append((np.asarray(slots, np.int32), tokens, counts))

    def measured(self) -> list[float]:
        """Seconds of a drafted token of every slot, of all drafts since that the host has waited for."""
        seconds, self._measured = self._measured, []
        return seconds

    def _settle(self) -> None:
        if self._under_way is not None:
            drafts, self._under_way = self._under_way, None
            waits = not drafts.tokens.is_ready()
            tokens = np.asarray(drafts.tokens)
            steps = int((tokens >= 0).sum(axis=1).max())
            if waits and steps:
                self._measured.append((time.perf_counter() - self._since) / steps)
            self.windows.extend(tokens, margin_log_probability(np.asarray(drafts.margins)))
        answers, self._answers = self._answers, []
        for answer in answers:
            super().advance(*answer)

    def _answer(
        self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        unanswered = self.windows.unanswered[slots]
        foretold, wasted = self.windows.answer(slots, tokens, counts)
        self.counts.wasted += int(wasted.sum())
        self.counts.most_wasted = max(self.counts.most_wasted, int(wasted.max(initial=0)))
        return foretold, unanswered

    def _drop(self, slots: np.ndarray) -> None:
        self.windows.drop(slots)

    def _keep(self, slots: Sequence[int]) -> None:
        super()._keep(slots)
        slots = np.asarray(slots, np.int32)
        self.windows.keep(slots, self.batch)
        missing = self.batch - len(slots)
        self._limits = np.pad(self._limits[slots], (0, missing))
        self._keys = np.pad(self._keys[slots], [(0, missing), (0, 0)])
