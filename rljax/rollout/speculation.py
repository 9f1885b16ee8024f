"""Speculative decoding of a batch: ask the drafter, decide how much to verify, verify, tell the drafter.

What is decided is only how much work a forward pass does, never a token. Before each pass the expected tokens
per second of every size of tree that is compiled, and of plain decoding, are compared, from

- how likely the drafter says that each of its nodes is, corrected by how often such nodes were accepted so
  far (`_Calibration`);
- how long a pass of each shape took so far (`_PassTimes`).

So a drafter that is wrong, or a batch that is too large for verification to pay, costs little more than the
asking, and that is done ever more seldom while it does not pay.
"""

import collections
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from drafters.aligned import AlignedDrafter
from drafters.base import (
    Drafter,
    DraftRequest,
    Drafts,
    Outcome,
    Queries,
    Sampled,
    chains,
    usable_nodes,
)
from rljax.engine.draft_tree import DraftTree, empty_tree
from rljax.engine.engine import DecodeEngine, DecodeResult
from rljax.engine.state import DecodeState
from rljax.errors import DrafterError, UserError
from rljax.models.transformer import Params
from rljax.rollout.records import DecodeStatistics, Request
from rljax.rollout.run_ahead import RunAhead

_PROBABILITY_BINS = 16
_PRIOR_WEIGHT = 4.0  # nodes that a bin starts with, as the drafter says
_FORGET = 0.5  # share of the acceptance counts that a new rollout starts with
_TIMES_KEPT = 9
# A plain step timed alone seems longer than it is among many: verifying must promise this much more.
_MARGIN = 1.05


@dataclasses.dataclass(frozen=True)
class ActiveSlots:
    """The slots with a request.

    Attributes:
      slots: int32 [n].
      requests: int32 [n], which request each decodes.
      positions: int32 [n], where its next token will stand.
      wanted: bool [n], False for requests that are only sampled ahead.
    """

    slots: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray


class Speculator:
    """Decodes with a drafter.

    Args:
      engine: the decode engine.
      drafter: what proposes.
      name: the drafter's, for messages.
      max_batch: batch buckets above it decode plainly; no program is compiled to verify them.
      run_ahead: see `RunAhead`; None never samples ahead.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        drafter: Drafter,
        name: str,
        max_batch: int,
        run_ahead: RunAhead | None = None,
    ) -> None:
        self.engine = engine
        self.drafter = drafter if run_ahead is None else AlignedDrafter(drafter)
        self.name = name
        self.max_batch = max_batch
        self.run_ahead = run_ahead
        self._calibration = _Calibration()
        self._times = _PassTimes()
        self._patience = 1  # plain steps until the drafter is asked again

    # -- a rollout -------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request], statistics: DecodeStatistics) -> None:
        """A rollout of `requests` begins, which accounts for itself in `statistics`."""
        self._statistics = statistics
        self._drafted = np.zeros(len(requests), np.int64)
        self._accepted = np.zeros(len(requests), np.int64)
        self._calibration.forget()
        self._patience = 1
        coupled = self.engine.verification == "coupled"
        start = time.perf_counter()
        known = []
        for request in requests:
            ahead = None if self.run_ahead is None else self.run_ahead.recall(request.noise_key)
            known.append(DraftRequest(request.prompt_ids, request.noise_key if coupled else None, ahead))
        self._ask("begin", known)
        statistics.host_seconds += time.perf_counter() - start

    def counts(self, request: int) -> tuple[int, int]:
        """Draft nodes verified for a request, and accepted."""
        return int(self._drafted[request]), int(self._accepted[request])

    def decode(
        self, params: Params, state: DecodeState, active: ActiveSlots, until_active: int
    ) -> tuple[DecodeState, DecodeResult]:
        """The next tokens of every active slot, by one verifying pass or a few plain steps."""
        start = time.perf_counter()
        shape = (state.batch, state.cache.length)
        tree = None
        if state.batch <= self.max_batch:
            tree, bins = self._draft(shape, active)
        self._statistics.host_seconds += time.perf_counter() - start
        start = time.perf_counter()
        if tree is None:
            steps = self._patience if state.batch <= self.max_batch else None
            state, result = self.engine.generate(params, state, steps, until_active)
            seconds = time.perf_counter() - start
            self._times.add((*shape, 0), seconds / max(result.steps, 1))
            self._last = (np.zeros_like(active.requests),) * 2
            self._patience = min(2 * self._patience, self.engine.decode_steps_per_visit)
        else:
            state, result = self.engine.verify(params, state, tree)
            seconds = time.perf_counter() - start
            self._times.add((*shape, tree.nodes), seconds)
            self._patience = 1
            start = time.perf_counter()
            self._account(result, active, tree, bins)
            self._statistics.host_seconds += time.perf_counter() - start
        self._statistics.device_seconds += seconds
        return state, result

    def observe(self, requests: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """What was kept of the tokens that `decode` sampled: int32 [n, T], of which counts [n]."""
        start = time.perf_counter()
        self._ask("observe", Sampled(requests, tokens, counts, *self._last))
        self._statistics.host_seconds += time.perf_counter() - start

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """The rewarded responses of a training rollout."""
        self._ask("learn", outcomes)
        if self.run_ahead is not None:
            for outcome in outcomes:
                self.run_ahead.learn(outcome.prompt_ids, len(outcome.response_ids))

    def metrics(self, statistics: DecodeStatistics) -> dict[str, float]:
        """What speculation did in the rollouts of `statistics`, and what the drafter itself has to tell."""
        waited = statistics.host_seconds + statistics.device_seconds
        metrics = {
            "accept_length": statistics.accept_length,
            "acceptance": statistics.accepted / max(statistics.drafted, 1),
            "verified_per_token": statistics.rows / max(statistics.tokens, 1),
            "speculated_share": statistics.verified / max(statistics.steps, 1),
            "drafted": statistics.drafted,
            "accepted": statistics.accepted,
            "unusable": statistics.unusable,
            "host_share": statistics.host_seconds / max(waited, 1e-9),
        }
        if self.run_ahead is not None:
            metrics["run_ahead_tokens"] = statistics.ahead_tokens
            metrics["run_ahead_share"] = statistics.ahead_seconds / max(waited, 1e-9)
        metrics |= self._ask("metrics")
        return {f"speculation/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps: the drafter's."""
        ahead = {} if self.run_ahead is None else self.run_ahead.state()
        return self._ask("state") | ahead

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Takes up what `state` returned; from a checkpoint without it, the drafter starts empty."""
        if self.run_ahead is not None:
            state = self.run_ahead.load_state(state)
        if state:
            self._ask("load_state", state)

    # -- warming up ------------------------------------------------------------------------------------------

    def warm_up(self, params: Params) -> None:
        """Compiles every program that verifies, and takes the time of a pass of each shape."""
        for batch in self.engine.buckets.batch:
            if batch > self.max_batch:
                continue
            for length in self.engine.buckets.cache:
                for nodes, seconds in time_passes(self.engine, params, batch, length, repeats=1).items():
                    self._times.add((batch, length, nodes), seconds[0])

    # -- drafting --------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.drafter, method)(*arguments)
        except UserError:
            raise
        except Exception as error:
            raise DrafterError(f"speculation.drafter {self.name}: {method} raised {error!r}") from error

    def _draft(self, shape: tuple[int, int], active: ActiveSlots) -> tuple[DraftTree | None, np.ndarray]:
        """The tree to verify next, or None where plain decoding is expected to be faster; and the bins of the
        drafter's nodes.
        """
        width = self.engine.buckets.draft[-1]
        budgets = np.full(len(active.slots), width, np.int32)
        queries = Queries(active.requests, active.positions, budgets, width)
        drafts = self._ask("propose", queries)
        try:
            usable = usable_nodes(drafts, queries, self.engine.config.vocab_size)
        except ValueError as error:
            raise DrafterError(
                f"speculation.drafter {self.name}: propose returned no drafts: {error}"
            ) from error
        returned = np.arange(width) < np.minimum(drafts.counts, budgets)[:, None]
        self._statistics.unusable += int(returned.sum() - usable.sum())
        if self.engine.verification == "rejection":
            drafts, usable = chains(drafts, usable)
        bins = self._calibration.bins(drafts.log_probability)
        probability = np.where(usable, self._calibration.rates[bins], 0.0)
        wanted = active.wanted  # what is sampled ahead must not make a pass longer
        nodes = self._best_size(shape, int(wanted.sum()), probability[wanted])
        if nodes == 0:
            return None, bins
        return _tree(drafts, usable, active.slots, shape[0], nodes), bins

    def _best_size(self, shape: tuple[int, int], slots: int, probability: np.ndarray) -> int:
        """Draft nodes per slot, 0 for plain decoding: what promises the most tokens per second."""
        accepted = np.cumsum(probability.sum(axis=0))  # by how many nodes of each slot are verified
        plain_rate = slots / self._times[(*shape, 0)]
        best, best_rate = 0, plain_rate
        for nodes in self.engine.buckets.draft:
            rate = (slots + accepted[nodes - 1]) / self._times[(*shape, nodes)]
            if accepted[nodes - 1] > 0 and rate > max(best_rate, _MARGIN * plain_rate):
                best, best_rate = nodes, rate
        return best

    def _account(self, result: DecodeResult, active: ActiveSlots, tree: DraftTree, bins: np.ndarray) -> None:
        verified = tree.valid[active.slots]  # [n, N]
        counts = (result.tokens[active.slots] >= 0).sum(axis=1)
        accepted = np.zeros_like(verified)
        rows, depths = np.nonzero(np.arange(1, tree.nodes + 1) < counts[:, None])
        accepted[rows, result.path[active.slots[rows], depths + 1] - 1] = True
        self._calibration.add(bins[:, : tree.nodes][verified], accepted[verified])
        drafted, taken = verified.sum(axis=1), accepted.sum(axis=1)
        self._last = (drafted.astype(np.int32), taken.astype(np.int32))
        self._drafted[active.requests] += drafted
        self._accepted[active.requests] += taken
        statistics = self._statistics
        statistics.verified += 1
        statistics.verified_slots += len(active.slots)
        statistics.verified_rows += result.rows
        statistics.drafted += int(drafted.sum())
        statistics.accepted += int(taken.sum())


def time_passes(
    engine: DecodeEngine, params: Params, batch: int, length: int, repeats: int
) -> dict[int, list[float]]:
    """Seconds of forward passes over a batch in half-filled caches, by draft nodes per slot; 0 is a plain
    step.
    """
    state = engine.init_state(batch, length)
    busy = {
        "active": np.ones(batch, bool),
        "lengths": np.full(batch, length // 2, np.int32),
        "remaining": np.full(batch, length, np.int32),
    }
    placed = {name: getattr(state, name).sharding for name in busy}
    seconds: dict[int, list[float]] = {nodes: [] for nodes in (0, *engine.buckets.draft)}
    for repeat in range(repeats + 1):  # the first may compile
        for nodes, own in seconds.items():
            # Every time anew: a slot that sampled an end of sequence would be idle.
            state = state.replace(**{name: jax.device_put(busy[name], placed[name]) for name in busy})
            start = time.perf_counter()
            if nodes:
                state, _ = engine.verify(params, state, empty_tree(batch, nodes))
            else:
                state, _ = engine.generate(params, state, max_steps=1)
            if repeat:
                own.append(time.perf_counter() - start)
    return seconds


def _tree(drafts: Drafts, usable: np.ndarray, slots: np.ndarray, batch: int, nodes: int) -> DraftTree:
    """The first `nodes` nodes of every query, at the slots of the state."""
    tree = empty_tree(batch, nodes)
    usable = usable[:, :nodes]
    tree.tokens[slots] = np.where(usable, drafts.tokens[:, :nodes], 0)
    tree.parents[slots] = np.where(usable, drafts.parents[:, :nodes], -1)
    tree.valid[slots] = usable
    return tree


class _Calibration:
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


class _PassTimes:
    """Seconds of a forward pass by (batch, cache length, draft nodes; 0 is a plain step): the median of the
    last few.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int, int], collections.deque[float]] = {}

    def __getitem__(self, shape: tuple[int, int, int]) -> float:
        return statistics.median(self._seconds[shape])

    def add(self, shape: tuple[int, int, int], seconds: float) -> None:
        self._seconds.setdefault(shape, collections.deque(maxlen=_TIMES_KEPT)).append(seconds)
