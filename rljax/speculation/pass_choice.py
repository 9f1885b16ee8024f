"""How much a forward pass verifies: which nodes of which slots, or none at all.

Before each pass the expected tokens per second of every number of rows that is compiled, and of plain
decoding, are compared, from

- how likely the drafter says that each of its nodes is, corrected by how often such nodes were accepted so
  far (`NodeCalibration`);
- how long a pass of each shape took so far (`PassTimes`).

The rows of a pass go to the most likely nodes of all slots: requests compete for them. So a drafter that is
wrong, or a batch that is too large for verification to pay, costs little more than the asking.
"""

import collections
import dataclasses
import statistics
import time
import warnings
from collections.abc import Hashable

import jax
import numpy as np

from drafters.device import DeviceDrafter, KnowingDrafter
from drafters.eagle.drafting import DraftStrategy
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import free_bytes
from rljax.engine.state import DecodeState
from rljax.models.transformer import Params

_PROBABILITY_BINS = 16
_PRIOR_WEIGHT = 4.0  # nodes that a bin starts with, as the drafter says
_FORGET = 0.5  # share of the acceptance counts that a new rollout starts with
_TIMES_KEPT = 9
_UNWANTED = 1e-6  # what a node of a request that is only sampled ahead is worth: it takes what room is left
_PLAIN_STEPS = 4  # of a visit that is timed


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The nodes that the slots of a pass could verify.

    Attributes:
      probability: float [n, N], of being accepted; 0 for what is no node. Not increasing along a row.
      wanted: bool [n], False for slots whose requests are only sampled ahead.
      standing_by: slots with a wanted request that decode only in a plain step, not in this pass.
      spent: seconds that drafting them took. They are gone whatever is verified, and come again with the next
        pass of this kind.
    """

    probability: np.ndarray
    wanted: np.ndarray
    standing_by: int = 0
    spent: float = 0.0

    def expected(self, rows: int, nodes: int) -> float:
        """Wanted tokens from a pass of so many rows, at most `nodes` draft nodes a slot; 0 if none fits."""
        room = rows - len(self.wanted)
        if room < 1:
            return 0.0
        likely = self.probability[self.wanted, :nodes].ravel()
        accepted = likely.sum() if likely.size <= room else np.partition(likely, -room)[-room:].sum()
        return float(self.wanted.sum() + accepted) if accepted > 0 else 0.0

    def take(self, rows: int, nodes: int) -> np.ndarray:
        """The nodes of that pass, bool [n, N]: with a node, everything before it in its row that is one."""
        room = rows - len(self.wanted)
        worth = np.where(self.wanted[:, None], self.probability, _UNWANTED * self.probability)
        worth[:, nodes:] = 0.0
        # Of equally likely nodes, those nearer to the root first.
        order = np.argsort(-worth.T.ravel(), kind="stable")[: max(room, 0)]
        taken = np.zeros(worth.T.size, bool)
        taken[order] = True
        return taken.reshape(worth.T.shape).T & (worth > 0)


def candidates(
    usable: np.ndarray,
    probability: np.ndarray,
    wanted: np.ndarray,
    standing_by: int = 0,
    spent: float = 0.0,
) -> Candidates:
    """Candidates from a drafter's nodes: usable bool [n, N], probability float [n, N] of those."""
    # No node is more likely than those that the drafter put before it: its ancestors are among them.
    falling = np.minimum.accumulate(np.where(usable, probability, 1.0), axis=1)
    return Candidates(np.where(usable, falling, 0.0), wanted, standing_by, spent)


Shape = tuple[int, int, Hashable]
"""Batch, cache length, and what is computed over them: so many rows of a pass, 0 for a plain step; or what
drafting calls itself.
"""


class PassTimes:
    """Seconds that a shape took: the last ones' median."""

    def __init__(self) -> None:
        self._seconds: dict[Shape, collections.deque[float]] = {}

    def __getitem__(self, shape: Shape) -> float:
        return statistics.median(self._seconds[shape])

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._seconds

    def add(self, shape: Shape, seconds: float) -> None:
        self._seconds.setdefault(shape, collections.deque(maxlen=_TIMES_KEPT)).append(seconds)


def plain_rate(wanted: int, times: PassTimes, batch: int, length: int) -> float:
    """Tokens per second of plain steps of so many slots."""
    return wanted / times[batch, length, 0]


def best_rows(found: Candidates, buckets: Buckets, times: PassTimes, batch: int, length: int) -> int:
    """Rows of the pass that promises the most tokens per second; 0 is a plain step.

    Between passes, the time of drafting counts: to leave out half of what took long to draft would waste it.
    Against a plain step it does not: it is gone.
    """
    best, best_rate = 0, 0.0
    plain = plain_rate(found.wanted.sum() + found.standing_by, times, batch, length)
    for rows, nodes in buckets.passes(batch):
        tokens, seconds = found.expected(rows, nodes), times[batch, length, rows]
        rate = tokens / (found.spent + seconds)
        if tokens / seconds > plain and rate > best_rate:
            best, best_rate = rows, rate
    return best


class NodeCalibration:
    """From the probability that a drafter gives a node to how often such nodes were accepted."""

    def __init__(self) -> None:
        middle = (np.arange(_PROBABILITY_BINS) + 0.5) / _PROBABILITY_BINS
        self._prior = _PRIOR_WEIGHT * middle
        self._accepted = np.zeros(_PROBABILITY_BINS)
        self._total = np.zeros(_PROBABILITY_BINS)

    def forget(self) -> None:
        """Old counts weigh less: the policy has moved."""
        self._accepted *= _FORGET
        self._total *= _FORGET

    def bins(self, log_probability: np.ndarray) -> np.ndarray:
        """Which bin each node falls into; what is no number counts as unlikely."""
        probability = np.nan_to_num(np.exp(np.minimum(log_probability, 0.0)), nan=0.0)
        return np.minimum((probability * _PROBABILITY_BINS).astype(np.int64), _PROBABILITY_BINS - 1)

    @property
    def rates(self) -> np.ndarray:
        """Acceptance of each bin."""
        return (self._accepted + self._prior) / (self._total + _PRIOR_WEIGHT)

    def add(self, bins: np.ndarray, accepted: np.ndarray) -> None:
        """Nodes that were verified, by bin."""
        self._accepted += np.bincount(bins, accepted, _PROBABILITY_BINS)
        self._total += np.bincount(bins, minlength=_PROBABILITY_BINS)

    def state(self) -> np.ndarray:
        """What a checkpoint keeps: float64 [2, bins], nodes accepted and nodes verified."""
        return np.stack([self._accepted, self._total])

    def load_state(self, state: np.ndarray) -> None:
        """Takes up what `state` returned; what has another number of bins says nothing here."""
        if state.shape == (2, _PROBABILITY_BINS):
            self._accepted, self._total = state.astype(np.float64)


def time_passes(
    engine: DecodeEngine, params: Params, batch: int, length: int, repeats: int, passes: int | None = None
) -> dict[int, list[float]]:
    """Seconds of forward passes over a batch in half-filled caches, by rows; 0 is a plain step, one of a few.

    The shapes take turns, so that a busy machine slows all of them. A pass for which the device has not the
    memory is not run, now or ever.

    Args:
      passes: of each shape between two looks of the host, whose mean counts; less than half of `length`. None
        for what a rollout does: one that verifies, or a few plain steps.
    """
    state, slots = engine.init_state(batch, length), np.arange(batch)
    _drop_too_large(engine, params, state)
    widths = {0: 0} | dict(engine.buckets.passes(batch))
    seconds: dict[int, list[float]] = {rows: [] for rows in widths}
    for repeat in range(repeats + 1):  # the first may compile
        for rows, own in seconds.items():
            state = _half_full(state)
            start, steps = time.perf_counter(), passes or 1
            if rows:
                tree = empty_tree(batch, widths[rows])
                for _ in range(steps):
                    state, pending = engine.verify(params, state, tree, pack_rows(tree, slots, rows))
                pending.result()
            else:
                state, result = engine.generate(params, state, max_steps=passes or _PLAIN_STEPS)
                steps = max(result.steps, 1)
            if repeat:
                own.append((time.perf_counter() - start) / steps)
    return seconds


def _drop_too_large(engine: DecodeEngine, params: Params, state: DecodeState) -> None:
    free, batch = free_bytes(), state.batch
    if free is None:
        return
    for rows, nodes in engine.buckets.passes(batch):
        tree = empty_tree(batch, nodes)
        needed = engine.verify_bytes(params, state, tree, pack_rows(tree, np.arange(batch), rows))
        if needed > free:
            engine.buckets.too_large.add((batch, rows))
            warnings.warn(
                f"a pass over {rows} tokens of {batch} responses needs {needed / 1e6:.0f} MB where"
                f" {free / 1e6:.0f} MB are free: it is left out",
                stacklevel=2,
            )


def time_drafts(
    engine: DecodeEngine, draft_params: Params, batch: int, length: int, repeats: int
) -> list[float]:
    """Seconds of steps of drafting, as `time_passes` takes those of passes."""
    state, seconds, steps = engine.init_state(batch, length), [], min(_PLAIN_STEPS, engine.buckets.max_drafts)
    for _ in range(repeats + 1):
        state = _half_full(state)
        start = time.perf_counter()
        state, drafts = engine.draft(draft_params, state, steps)
        drafted = np.count_nonzero(np.asarray(drafts.tokens) >= 0, axis=1).max()
        seconds.append((time.perf_counter() - start) / int(drafted))  # all may have ended before `steps`
    return seconds[1:]  # the first may compile


def time_trees(
    engine: DecodeEngine,
    drafter: DeviceDrafter,
    strategy: DraftStrategy,
    batch: int,
    length: int,
    repeats: int,
) -> list[float]:
    """Seconds of drafting a tree for every slot, as `time_passes` takes those of passes."""
    state, seconds = _half_full(engine.init_state(batch, length)), []
    drafter.start(batch)
    knowing = isinstance(drafter, KnowingDrafter)
    if knowing:
        drafter.pretend(state)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        drafted = drafter.draft(state, strategy)
        np.asarray(drafted.log_probability)
        taken = time.perf_counter() - start
        if knowing and strategy.top_k == 1:  # all chains may have ended before
            taken *= strategy.depth / max(int(np.asarray(drafted.tree.valid).sum(axis=1).max()), 1)
        seconds.append(taken)
    return seconds[1:]  # the first may compile


def _half_full(state: DecodeState) -> DecodeState:
    """All slots busy in half-filled caches; a slot that sampled an end of sequence would be idle."""
    batch, length = state.batch, state.cache.length
    busy = {
        "active": np.ones(batch, bool),
        "lengths": np.full(batch, length // 2, np.int32),
        "remaining": np.full(batch, length, np.int32),
    }
    placed = {name: jax.device_put(value, getattr(state, name).sharding) for name, value in busy.items()}
    return state.replace(**placed)
