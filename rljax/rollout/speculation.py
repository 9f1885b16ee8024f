"""Speculative decoding of a batch: ask the drafter, decide how much to verify, verify, tell the drafter.

What is decided (`rljax/rollout/pass_choice.py`) is only how much work a forward pass does, never a token.
While verifying does not pay, the drafter is asked ever more seldom.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drafters.aligned import AlignedDrafter
from drafters.base import (
    Drafter,
    DraftRequest,
    Outcome,
    ProtocolError,
    Queries,
    Sampled,
    SelfDrafter,
    chains,
    usable_metrics,
    usable_nodes,
    usable_state,
)
from rljax.engine.draft_tree import DraftTree, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine, DecodeResult, Pending
from rljax.engine.state import DecodeState
from rljax.errors import DrafterError, UserError
from rljax.models.transformer import Params
from rljax.rollout.draft_length import DRAFT_STEP, ChainAcceptance, best_length
from rljax.rollout.lengths import ResponseLengths
from rljax.rollout.pass_choice import (
    Calibration,
    Candidates,
    PassTimes,
    best_rows,
    candidates,
    time_drafts,
    time_passes,
)
from rljax.rollout.records import DecodeStatistics, Request
from rljax.rollout.run_ahead import RunAhead

_WARM_UP_REPEATS = 3
_MOST_OF_AN_ERROR = 300  # characters of what a drafter raised that its message shows
_HALF_SURE = 0.25  # the margin of a draft that falls into the middle of the calibration's bins


@dataclasses.dataclass(frozen=True)
class ActiveSlots:
    """The slots with a request.

    Attributes:
      slots: int32 [n].
      requests: int32 [n], which request each decodes.
      positions: int32 [n], where its next token will stand.
      wanted: bool [n], False for requests that are only sampled ahead.
      standing_by: how many other slots with a wanted request there are.
    """

    slots: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray
    standing_by: int = 0


@dataclasses.dataclass(frozen=True)
class VerifyingPass:
    """A pass that the device is at.

    Attributes:
      active: the slots that take part.
      tree: what is verified.
      bins: of the drafter's nodes, int [n, N].
      shape: (batch, cache length, rows).
      dispatched: when, by `time.perf_counter`.
      timed: whether nothing but passes was before it, so that its time is a pass's.
      pending: what it will bring.
    """

    active: ActiveSlots
    tree: DraftTree
    bins: np.ndarray
    shape: tuple[int, int, int]
    dispatched: float
    timed: bool
    pending: Pending


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
        self.lengths = ResponseLengths() if run_ahead is None else run_ahead.lengths
        self._drafts_itself = isinstance(drafter, SelfDrafter)
        self._state_prefix = getattr(drafter, "state_name", name) + "/"
        self._state_of_others: dict[str, np.ndarray] = {}  # from a checkpoint, for the runs to come
        self._calibration = Calibration()
        self._chains = ChainAcceptance()
        self._times = PassTimes()
        self._patience = 1  # plain steps until the drafter is asked again
        self._plain_requests: set[int] = set()  # those that decoded plainly the last time

    # -- a rollout -------------------------------------------------------------------------------------------

    def begin(self, params: Params, requests: Sequence[Request], statistics: DecodeStatistics) -> None:
        """A rollout of `requests` with weights `params` begins, which accounts for itself in `statistics`."""
        self._statistics = statistics
        if self._drafts_itself:
            start = time.perf_counter()
            self._ask("refresh", params)
            statistics.draft_seconds += time.perf_counter() - start
        self._drafted = np.zeros(len(requests), np.int64)
        self._accepted = np.zeros(len(requests), np.int64)
        self._calibration.forget()
        self._chains.forget()
        self._patience = 1
        self._under_way: list[VerifyingPass] = []
        self._last_end = self._busy_until = time.perf_counter()  # of the device's work
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
        state, under_way = self.start(params, state, active)
        if under_way is None:
            return self.decode_plainly(params, state, active, until_active)
        return state, self.finish(under_way)

    def start(
        self, params: Params, state: DecodeState, active: ActiveSlots
    ) -> tuple[DecodeState, VerifyingPass | None]:
        """Begins a verifying pass; None where plain decoding is expected to be faster. One may be under way
        already, over other slots.
        """
        if state.batch > self.max_batch:
            return state, None
        start, drafting = time.perf_counter(), self._statistics.draft_seconds
        shape, timed = (state.batch, state.cache.length), self._only_passes_before(state)
        if self._drafts_itself:
            state, rows, tree, bins = self._draft_chains(state, active)
        else:
            rows, tree, bins = self._draft(shape, active)
        under_way = None
        if rows:
            state, pending = self.engine.verify(params, state, tree, pack_rows(tree, active.slots, rows))
            self._dispatched(self._times[(*shape, rows)])
            now = time.perf_counter()
            under_way = VerifyingPass(active, tree, bins, (*shape, rows), now, timed, pending)
            self._under_way.append(under_way)
        drafting = self._statistics.draft_seconds - drafting
        self._statistics.host_seconds += time.perf_counter() - start - drafting
        return state, under_way

    def _only_passes_before(self, state: DecodeState) -> bool:
        """Whether the device has not to prefill, insert or move anything first."""
        return bool(self._under_way) or state.lengths.is_ready()

    def finish(self, under_way: VerifyingPass) -> DecodeResult:
        """Waits for the pass that was started first."""
        was_over = under_way.pending.is_ready()
        result = under_way.pending.result()
        now = time.perf_counter()
        self._under_way.remove(under_way)
        seconds = self._times[under_way.shape]
        if not was_over:  # so it ended just now
            seconds = now - max(under_way.dispatched, self._last_end)
            if under_way.timed:
                self._times.add(under_way.shape, seconds)
            self._last_end = now
            self._busy_until = now + sum(self._times[other.shape] for other in self._under_way)
        self._statistics.device_seconds += seconds
        self._patience = 1
        self._account(result, under_way.active, under_way.tree, under_way.bins)
        self._statistics.host_seconds += time.perf_counter() - now
        return result

    def decode_plainly(
        self, params: Params, state: DecodeState, active: ActiveSlots, until_active: int
    ) -> tuple[DecodeState, DecodeResult]:
        """A few plain steps of all slots: more of them every time in a row, until new requests come."""
        asks = state.batch <= self.max_batch
        requests = set(active.requests.tolist())
        if not requests <= self._plain_requests:
            self._patience = 1
        self._plain_requests = requests
        timed = asks and self._only_passes_before(state)
        self._dispatched(0.0)
        start = time.perf_counter()
        state, result = self.engine.generate(params, state, self._patience if asks else None, until_active)
        self._last_end = self._busy_until = time.perf_counter()
        seconds = self._last_end - start
        if timed:
            self._times.add((state.batch, state.cache.length, 0), seconds / max(result.steps, 1))
        self._statistics.device_seconds += seconds
        self._last = (np.zeros_like(active.requests),) * 2
        self._patience = min(2 * self._patience, self.engine.decode_steps_per_visit)
        return state, result

    def _dispatched(self, seconds: float) -> None:
        """The device was given work for about so long: how long had it none?"""
        now = time.perf_counter()
        self._statistics.idle_seconds += max(0.0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + seconds

    def observe(self, requests: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """What was kept of the tokens that `decode` sampled: int32 [n, T], of which counts [n]."""
        start = time.perf_counter()
        self._ask("observe", Sampled(requests, tokens, counts, *self._last))
        self._statistics.host_seconds += time.perf_counter() - start

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """The rewarded responses of a training rollout."""
        self._ask("learn", outcomes)
        for outcome in outcomes:
            self.lengths.learn(outcome.prompt_ids, len(outcome.response_ids))

    def metrics(self, statistics: DecodeStatistics) -> dict[str, float]:
        """What speculation did in the rollouts of `statistics`, and what the drafter itself has to tell."""
        waited = statistics.host_seconds + statistics.device_seconds + statistics.draft_seconds
        metrics = {
            "accept_length": statistics.accept_length,
            "acceptance": statistics.accepted / max(statistics.drafted, 1),
            "verified_per_token": statistics.rows / max(statistics.tokens, 1),
            "speculated_share": statistics.verified / max(statistics.steps, 1),
            "drafted": statistics.drafted,
            "accepted": statistics.accepted,
            "unusable": statistics.unusable,
            "host_share": statistics.host_seconds / max(waited, 1e-9),
            "idle_share": statistics.idle_seconds
            / max(statistics.idle_seconds + statistics.device_seconds, 1e-9),
        }
        if self._drafts_itself:
            metrics["draft_share"] = statistics.draft_seconds / max(waited, 1e-9)
        if self.run_ahead is not None:
            metrics["run_ahead_tokens"] = statistics.ahead_tokens
            metrics["run_ahead_share"] = statistics.ahead_seconds / max(waited, 1e-9)
        metrics |= self._ask_for("metrics", lambda found: usable_metrics(found, metrics))
        return {f"speculation/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps: the drafter's, and what decides the order of requests."""
        own = self._ask_for("state", usable_state)
        named = {self._state_prefix + name: array for name, array in own.items()}
        ahead = {} if self.run_ahead is None else self.run_ahead.state()
        return self._state_of_others | named | ahead | self.lengths.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Takes up what `state` returned; from a checkpoint without it, the drafter starts empty. What other
        drafters left there is kept for them.
        """
        state = self.lengths.load_state(state)
        if self.run_ahead is not None:
            state = self.run_ahead.load_state(state)
        own = {name: array for name, array in state.items() if name.startswith(self._state_prefix)}
        self._state_of_others = {
            name: array for name, array in state.items() if "/" in name and name not in own
        }
        if own:
            self._ask("load_state", {name.removeprefix(self._state_prefix): own[name] for name in own})

    # -- warming up ------------------------------------------------------------------------------------------

    def warm_up(self, params: Params) -> None:
        """Compiles every program that verifies, and takes the time of a pass of each shape."""
        if self._drafts_itself:
            self._ask("refresh", params)
        for batch in self.engine.buckets.batch:
            if batch > self.max_batch:
                continue
            for length in self.engine.buckets.cache:
                taken = time_passes(self.engine, params, batch, length, _WARM_UP_REPEATS)
                if self._drafts_itself:
                    weights = self.drafter.draft_params
                    taken[DRAFT_STEP] = time_drafts(self.engine, weights, batch, length, _WARM_UP_REPEATS)
                for rows, seconds in taken.items():
                    for own in seconds:
                        self._times.add((batch, length, rows), own)

    # -- drafting --------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.drafter, method)(*arguments)
        except UserError:
            raise
        except ProtocolError as error:
            raise DrafterError(f"speculation.drafter {self.name}: {method} returned {error}") from error
        except Exception as error:
            said = " ".join(repr(error).split())[:_MOST_OF_AN_ERROR]
            raise DrafterError(f"speculation.drafter {self.name}: {method} raised {said}") from error

    def _ask_for(self, method: str, check: Callable[[Any], Any]) -> Any:
        found = self._ask(method)
        try:
            return check(found)
        except ProtocolError as error:
            raise DrafterError(f"speculation.drafter {self.name}: {method} returned {error}") from error

    def _draft(self, shape: tuple[int, int], active: ActiveSlots) -> tuple[int, DraftTree | None, np.ndarray]:
        """Rows of the next pass, 0 for a plain step; the tree it verifies; the drafter's nodes' bins."""
        width = self.engine.buckets.max_drafts
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
        found = candidates(usable, self._calibration.rates[bins], active.wanted, active.standing_by)
        return *self._select(shape, found, drafts.tokens, drafts.parents, active.slots), bins

    def _draft_chains(
        self, state: DecodeState, active: ActiveSlots
    ) -> tuple[DecodeState, int, DraftTree | None, np.ndarray | None]:
        """As `_draft`, by the engine."""
        shape = (state.batch, state.cache.length)
        length = self.choose_length(shape, len(active.slots), int(active.wanted.sum()))
        if not length:
            return state, 0, None, None
        self._dispatched(0.0)
        start = time.perf_counter()
        state, chains = self.engine.draft(self.drafter.draft_params, state, length)
        tokens, margins = (np.asarray(x)[active.slots] for x in (chains.tokens, chains.margins))
        self._last_end = self._busy_until = time.perf_counter()
        seconds = self._last_end - start
        self._times.add((*shape, DRAFT_STEP), seconds / length)
        self._statistics.draft_seconds += seconds
        usable = tokens >= 0
        bins = self._calibration.bins(np.log(np.maximum(margins, 1e-9) / (margins + _HALF_SURE)))
        probability = np.cumprod(np.where(usable, self._calibration.rates[bins], 1.0), axis=1)
        found = candidates(usable, probability, active.wanted, active.standing_by)
        parents = np.broadcast_to(np.arange(-1, tokens.shape[1] - 1, dtype=np.int32), tokens.shape)
        return state, *self._select(shape, found, tokens, parents, active.slots), bins

    def _select(
        self,
        shape: tuple[int, int],
        found: Candidates,
        tokens: np.ndarray,
        parents: np.ndarray,
        slots: np.ndarray,
    ) -> tuple[int, DraftTree | None]:
        """Rows of the next pass, 0 for a plain step, and of the candidates [n, N] those that it verifies."""
        rows = self.choose(shape, found)
        if not rows:
            return 0, None
        nodes = dict(self.engine.buckets.passes(shape[0]))[rows]
        taken = found.take(rows, nodes)[:, :nodes]
        tree = empty_tree(shape[0], nodes)
        tree.tokens[slots] = np.where(taken, tokens[:, :nodes], 0)
        tree.parents[slots] = np.where(taken, parents[:, :nodes], -1)
        tree.valid[slots] = taken
        return rows, tree

    def choose_length(self, shape: tuple[int, int], slots: int, wanted: int) -> int:
        """Steps that the self-drafter drafts before the next pass."""
        return best_length(self._chains.rate, slots, wanted, self.engine.buckets, self._times, *shape)

    def choose(self, shape: tuple[int, int], found: Candidates) -> int:
        """Rows of the next pass; 0 for a plain step."""
        return best_rows(found, self.engine.buckets, self._times, *shape)

    def _account(self, result: DecodeResult, active: ActiveSlots, tree: DraftTree, bins: np.ndarray) -> None:
        verified = tree.valid[active.slots]  # [n, N]
        counts = (result.tokens[active.slots] >= 0).sum(axis=1)
        accepted = np.zeros_like(verified)
        rows, depths = np.nonzero(np.arange(1, tree.nodes + 1) < counts[:, None])
        accepted[rows, result.path[active.slots[rows], depths + 1] - 1] = True
        drafted, taken = verified.sum(axis=1), accepted.sum(axis=1)
        judged = verified
        if self._drafts_itself:  # a margin says something of its own token only
            judged = verified & (np.arange(tree.nodes) <= taken[:, None])
            self._chains.add(int(judged.sum()), int(taken.sum()))
        self._calibration.add(bins[:, : tree.nodes][judged], accepted[judged])
        self._last = (drafted.astype(np.int32), taken.astype(np.int32))
        self._drafted[active.requests] += drafted
        self._accepted[active.requests] += taken
        statistics = self._statistics
        statistics.verified += 1
        statistics.verified_slots += len(active.slots)
        statistics.verified_rows += result.rows
        statistics.drafted += int(drafted.sum())
        statistics.accepted += int(taken.sum())
