"""Drafting for slots on devices of one's own, while the target verifies (SpecActor, section 4.1).

A drafter that drafts ahead shares no array with the target, so that neither waits for the other's device: the
positions, limits and noise keys that it drafts with are kept on the host, where they are known before the
target's next pass. `DraftWindows` says how far it may go on behind drafts that are not answered yet.

    tokens, scores = ahead.take_drafts(slots, length, width)  # what to verify now; waits if nothing is there
    ahead.draft_ahead(slots)               # while the target verifies: as if all were accepted
    ahead.answered(slots, tokens, counts)  # the answer, taken over with what was drafted meanwhile

`DraftingAhead` is what drafters share; a small model (`decoupled_companion.py`) and an EAGLE head
(`rljax/papers/specactor/slots_ahead.py`) add how they draft.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from jax import Array

from drafters.device import AheadDrafting
from rljax.papers.specactor.draft_windows import DraftWindows


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


class DraftingAhead(AheadDrafting):
    """The windows of a drafter with a state of its own for every slot of the target; its `AheadDrafting`.

    What a subclass adds is `_sizes`, int32 [B], the known tokens of each slot, 0 for one without a request;
    `_draft_behind`; and `_take_over`.

    Attributes:
      window: most tokens that are drafted at a time.
      windows: the unanswered drafts, and how far to draft.
      counts: counts since `count_anew`.
      drafts_ahead: whether `draft_ahead` drafts; without, drafts are made between passes only.
    """

    _sizes: np.ndarray
    drafts_ahead = True

    @property
    def ahead(self) -> AheadDrafting:
        """See `SlotDrafter`."""
        return self

    def _plan_ahead(self, window: int, eos_token_ids: Sequence[int]) -> None:
        """Sets what does not change from rollout to rollout."""
        self.window, self._eos = window, tuple(eos_token_ids)
        self.count_anew()

    def count_anew(self) -> None:
        """A rollout begins, whose windows are counted."""
        self.counts = WindowCounts()

    def _begin_ahead(self, batch: int) -> None:
        """Begins with `batch` slots without drafts."""
        self.windows = DraftWindows(batch, self.window)
        self._limits = np.zeros(batch, np.int32)  # positions of prompt and response together, at most
        self._keys = np.zeros((batch, 2), np.uint32)  # of the noise
        self._answers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # not taken over yet
        self._in_flight: tuple[np.ndarray, Array, Array] | None = None  # room, and what is drafted
        self._since = 0.0  # when this was begun, by `time.perf_counter`
        self._measured: list[float] = []

    def add_requests(
        self, slots: Sequence[int], keys: Sequence[np.ndarray], responses: Sequence[int]
    ) -> None:
        """Requests have entered `slots`: their noise keys, uint32 [2] each, and the most response tokens that
        each may still get.
        """
        slots = np.asarray(slots, np.int32)
        self._keys[slots] = np.stack(keys)
        self._limits[slots] = self._sizes[slots] + np.asarray(responses, np.int32)
        self.windows.windows[slots], self.windows.ahead[slots] = self.window, True
        self.counts.requests += len(slots)

    # -- drafting --------------------------------------------------------------------------------------------

    def configure(
        self, slots: np.ndarray, windows: np.ndarray, ahead: np.ndarray, drafts_ahead: bool
    ) -> None:
        self.drafts_ahead = drafts_ahead
        self.windows.windows[slots], self.windows.ahead[slots] = windows, ahead

    def fill(self, slots: np.ndarray) -> None:
        """Drafts a window for those of `slots` that have no drafts, and waits for it."""
        self._apply_finished()
        self._begin_to_draft(slots[self.windows.unanswered[slots] == 0])
        self._apply_finished()

    def take_drafts(self, slots: np.ndarray, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Waits for drafts where none of the slots has any, and where nothing is drafted beside passes."""
        self._apply_finished()
        self._grow(length)
        if not self.drafts_ahead or not self.windows.unanswered[slots].any():
            self.fill(slots)
        tokens, scores = self.windows.chains[slots, :width], self.windows.scores[slots, :width]
        missing = [(0, 0), (0, width - tokens.shape[1])]
        tokens = np.pad(tokens, missing, constant_values=-1)
        return tokens, np.cumsum(np.pad(scores, missing), axis=1)

    def draft_ahead(self, slots: np.ndarray) -> None:
        """Begins to draft behind the drafts of `slots`, as if all of these were accepted; `answered` brings
        the answer of the target's pass.
        """
        if self.drafts_ahead:
            self._apply_finished()
            self._begin_to_draft(slots)

    def _begin_to_draft(self, slots: np.ndarray) -> None:
        batch = len(self._sizes)
        room = np.zeros(batch, np.int32)
        room[slots] = self.windows.room()[slots]
        unanswered = self.windows.unanswered
        last = self.windows.chains[np.arange(batch), np.maximum(unanswered, 1) - 1]
        room[(self._sizes == 0) | (unanswered > 0) & np.isin(last, self._eos)] = 0
        # Behind its last draft, a slot samples one token more.
        room = np.clip(room, 0, np.maximum(self._limits - self._sizes - unanswered - 1, 0))
        if room.any():
            self._start(room)

    def _start(self, room: np.ndarray) -> tuple[Array, Array]:
        self._since = time.perf_counter()
        drafted = self._draft_behind(room)
        self._in_flight = (room, *drafted)
        return drafted

    def _draft_behind(self, room: np.ndarray) -> tuple[Array, Array]:
        """Begins to draft up to room[slot] tokens behind the drafts of each slot.

        Returns:
          Tokens, int32 [B, T], -1 where there is none, and T numbers a slot for `_scores`, on the device.
        """
        raise NotImplementedError

    def _scores(self, sure: np.ndarray) -> np.ndarray:
        """Returns the log-probabilities, float32 [B, T], that drafts are right if those before them are."""
        raise NotImplementedError

    def _grow(self, length: int) -> None:
        """The target's cache has room for `length` positions."""

    # -- answers ---------------------------------------------------------------------------------------------

    def answered(self, slots: Sequence[int], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Notes an answer; it is taken over when the drafts that are in flight are needed.

        Args:
          slots: n slots.
          tokens: int32 [n, T], what the target sampled in them.
          counts: int [n], how many of the T.
        """
        if self._in_flight is not None:
            self.counts.windows += 1
            self.counts.in_time += int(self._in_flight[1].is_ready())
        self._answers.append((np.asarray(slots, np.int32), tokens, np.asarray(counts)))

    def step_seconds(self) -> list[float]:
        """Of all drafts that the host has waited for."""
        seconds, self._measured = self._measured, []
        return seconds

    def metrics(self) -> dict[str, float]:
        """Returns, of the last rollout: windows drafted beside passes, the share that was ready in time, and
        drafts thrown away, of a request and at most by one rejection.
        """
        counts = self.counts
        return {
            "decoupled_windows": float(counts.windows),
            "decoupled_ready_share": counts.in_time / max(counts.windows, 1),
            "decoupled_wasted": counts.wasted / max(counts.requests, 1),
            "decoupled_most_wasted": float(counts.most_wasted),
        }

    def _apply_finished(self) -> None:
        """Takes over drafts that are in flight, for which it waits, and then answers."""
        if self._in_flight is not None:
            self._take_drafts()
        answers, self._answers = self._answers, []
        for answer in answers:
            self._take_over(*answer)

    def _take_over(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Takes over an answer, by `_check`; arguments as of `answered`."""
        raise NotImplementedError

    def _take_drafts(self) -> None:
        (room, drafted, sure), self._in_flight = self._in_flight, None
        waits = not drafted.is_ready()
        tokens = np.asarray(drafted)
        steps = int((tokens >= 0).sum(axis=1).max())
        if waits and steps:
            self._measured.append((time.perf_counter() - self._since) / steps)
        ends = np.isin(tokens, self._eos)
        ended = np.cumsum(ends, axis=1) - ends > 0  # behind an EOS
        kept = (np.arange(tokens.shape[1]) < room[:, None]) & ~ended
        self.windows.extend(np.where(kept, tokens, -1), self._scores(np.asarray(sure)))

    def _check(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Holds an answer against the drafts; returns how many tokens these had foretold, int [n]."""
        foretold, wasted = self.windows.answer(slots, tokens, counts)
        self.counts.wasted += int(wasted.sum())
        self.counts.most_wasted = max(self.counts.most_wasted, int(wasted.max(initial=0)))
        return foretold

    def _keep_ahead(self, slots: Sequence[int], batch: int) -> None:
        """Keeps some slots, in that order, as the first of `batch`."""
        slots = np.asarray(slots, np.int32)
        self.windows.keep(slots, batch)
        missing = batch - len(slots)
        self._limits = np.pad(self._limits[slots], (0, missing))
        self._keys = np.pad(self._keys[slots], [(0, missing), (0, 0)])
