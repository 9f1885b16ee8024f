"""Speculative decoding of a batch: ask the drafter, decide how much to verify, verify, tell the drafter.

What is decided (`rljax/speculation/pass_choice.py`) is only how much work a forward pass does, never a token.
While verifying does not pay, the drafter is asked ever more seldom.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drafters.aligned import aligned
from drafters.base import Drafter, DraftRequest, Outcome, Sampled
from drafters.device import DeviceDrafter, SelfDrafter, TrainedDrafter
from drafters.validation import usable_metrics, usable_state
from rljax.engine.draft_tree import DraftTree, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.state import DecodeState, Prefix
from rljax.engine.visits import Assignment, DecodeResult, Pending
from rljax.models.transformer import Params
from rljax.rollout.lengths import ResponseLengths
from rljax.rollout.records import DecodeStatistics, Request
from rljax.speculation.choices import Choice
from rljax.speculation.decision_log import DecisionLog
from rljax.speculation.managers.manager import EXPECTED, StrategyChoice
from rljax.speculation.pass_choice import (
    Candidates,
    PassTimes,
    best_rows,
    time_passes,
)
from rljax.speculation.proposers import ActiveSlots, Proposal, ask, ask_for, make_proposer
from rljax.speculation.run_ahead import RunAhead

_WARM_UP_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class VerifyingPass:
    """A pass that the device is at.

    Attributes:
      active: the slots that take part.
      tree: what is verified.
      choice: why.
      shape: (batch, cache length, rows).
      dispatched: when, by `time.perf_counter`.
      timed: whether nothing but passes was before it, so that its time is a pass's.
      pending: what it will bring.
    """

    active: ActiveSlots
    tree: DraftTree
    choice: Choice
    shape: tuple[int, int, int]
    dispatched: float
    timed: bool
    pending: Pending


class Speculator:
    """Decodes with drafters.

    Args:
      engine: the decode engine.
      drafters: who proposes, by name. What is sampled ahead is proposed by the first one on the host.
      max_batch: batch buckets above it decode plainly; no program is compiled to verify them.
      run_ahead: see `RunAhead`; None never samples ahead.
      times: what passes took so far; speculators of the same engine may share them.
      strategies: how the manager chooses among the drafters.

    Attributes:
      has_history: whether some drafter looks at what other responses to a prompt were.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        drafters: Mapping[str, Drafter],
        max_batch: int,
        run_ahead: RunAhead | None = None,
        times: PassTimes | None = None,
        strategies: StrategyChoice = EXPECTED,
    ) -> None:
        self.engine = engine
        self.max_batch = max_batch
        self.run_ahead = run_ahead
        self.lengths = ResponseLengths() if run_ahead is None else run_ahead.lengths
        self._times = PassTimes() if times is None else times
        self.drafters = dict(drafters)
        if run_ahead is not None:  # what was sampled ahead is proposed by the first drafter on the host
            name = next(name for name, drafter in drafters.items() if _on_host(drafter))
            self.drafters[name] = aligned(self.drafters[name])
        self._trained = {
            name: each for name, each in self.drafters.items() if isinstance(each, TrainedDrafter)
        }
        self._on_device = [each for each in self.drafters.values() if isinstance(each, DeviceDrafter)]
        self.has_history = any(map(_on_host, self.drafters.values()))
        for drafter in self.drafters.values():
            if isinstance(drafter, DeviceDrafter | SelfDrafter):
                drafter.attach(engine)
        self.proposers = [
            make_proposer(name, drafter, engine, self._times) for name, drafter in self.drafters.items()
        ]
        self.manager = strategies.manager(
            self.proposers,
            engine.buckets,
            self._times,
            max_batch,
            lambda shape, found: self.choose(shape, found),
        )
        self.decisions = DecisionLog()
        self._state_of_others: dict[str, np.ndarray] = {}  # from a checkpoint, for the runs to come
        self._patience = 1  # plain steps until the drafters are asked again
        self._plain_requests: set[int] = set()  # those that decoded plainly the last time

    # -- a rollout -------------------------------------------------------------------------------------------

    def begin(
        self,
        params: Params,
        requests: Sequence[Request],
        wanted: int,
        batch: int,
        statistics: DecodeStatistics,
    ) -> None:
        """A rollout begins.

        Args:
          params: the weights.
          requests: what may be decoded.
          wanted: how many of them, the first ones, are not only sampled ahead.
          batch: slots of the state.
          statistics: what the rollout accounts for itself in.
        """
        self._statistics = statistics
        start = time.perf_counter()
        own = requests[:wanted]
        self.manager.begin(any(each.training for each in own), max((each.step for each in own), default=0))
        self.decisions.begin()
        for proposer in self.proposers:
            proposer.refresh(params)
            proposer.forget()
        statistics.draft_seconds += time.perf_counter() - start
        self._drafted = np.zeros(len(requests), np.int64)
        self._accepted = np.zeros(len(requests), np.int64)
        self._patience = 1
        self._choice: Choice | None = None  # the last one
        # Of the last visit, see `Proposal.counts`.
        self._counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._under_way: list[VerifyingPass] = []
        self._last_end = self._busy_until = time.perf_counter()  # of the device's work
        start = time.perf_counter()
        self._ask_all("begin", self._as_drafters_know(requests, wanted))
        self.restart(batch)
        statistics.host_seconds += time.perf_counter() - start

    def _as_drafters_know(self, requests: Sequence[Request], wanted: int) -> list[DraftRequest]:
        coupled = self.engine.verification == "coupled"
        known = []
        for index, request in enumerate(requests):
            ahead = None if self.run_ahead is None else self.run_ahead.recall(request.noise_key)
            key = request.noise_key if coupled else None
            trainable = request.training and index < wanted
            known.append(DraftRequest(request.prompt_ids, key, ahead, trainable))
        return known

    def admit(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> None:
        """Requests have joined those that are decoded, between two calls of `decode`.

        Drafters begin anew, and are told what was sampled so far; those on the device go on with the slots
        that they know. Only then the new requests' prompts are inserted.

        Args:
          requests: all that are decoded from now on.
          tokens: what was sampled of each so far.
        """
        start = time.perf_counter()
        self._drafted = np.zeros(len(requests), np.int64)
        self._accepted = np.zeros(len(requests), np.int64)
        self._patience, self._plain_requests = 1, set()
        self._ask_all("begin", self._as_drafters_know(requests, len(requests)))
        under_way = np.asarray([i for i, own in enumerate(tokens) if len(own)], np.int32)
        if len(under_way):
            known, counts = _padded([tokens[i] for i in under_way])
            self._tell_undrafted(under_way, known, counts, np.zeros(len(under_way), bool))
        self._statistics.host_seconds += time.perf_counter() - start

    def restart(self, batch: int) -> None:
        """The state is another one, of `batch` empty slots."""
        for drafter in self._on_device:
            drafter.start(batch)

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """What drafters on the device want to know of prompts that the engine has begun to prefill, for
        `insert`.
        """
        self._dispatched(0.0)
        prefilled = [drafter.prefill(prefix, prompts) for drafter in self._on_device]
        self._busy_until = max(self._busy_until, time.perf_counter())  # some of them wait for it
        return prefilled

    def insert(
        self, prefilled: list[Any], assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        """Prompts have gone into slots."""
        for drafter, own in zip(self._on_device, prefilled, strict=True):
            drafter.insert(own, assignments, requests)

    def compact(self, slots: Sequence[int], batch: int) -> None:
        """Only `slots` go on."""
        for drafter in self._on_device:
            drafter.compact(slots, batch)

    def widen(self, batch: int) -> None:
        """All slots go on, in a state of `batch`, which may be as before."""
        for drafter in self._on_device:
            drafter.widen(batch)

    def spare(self, running: int) -> None:
        """Between two passes, with so many responses running: time to train a little."""
        statistics = self._statistics
        for name, drafter in self._trained.items():
            if running > drafter.train_below:
                continue
            start = time.perf_counter()
            if ask(name, drafter, "train"):
                self._last_end = self._busy_until = time.perf_counter()
                statistics.train_seconds += self._last_end - start

    def counts(self, request: int) -> tuple[int, int]:
        """Draft nodes verified for a request, and accepted."""
        return int(self._drafted[request]), int(self._accepted[request])

    def decode(
        self,
        params: Params,
        state: DecodeState,
        active: ActiveSlots,
        until_active: int,
        most_steps: int | None = None,
    ) -> tuple[DecodeState, DecodeResult]:
        """The next tokens of every active slot, by one verifying pass or a few plain steps: at most
        `most_steps`, where it is given.
        """
        state, under_way = self.start(params, state, active)
        if under_way is None:
            return self.decode_plainly(params, state, active, until_active, most_steps)
        return state, self.finish(under_way)

    def start(
        self, params: Params, state: DecodeState, active: ActiveSlots
    ) -> tuple[DecodeState, VerifyingPass | None]:
        """Begins a verifying pass; None where plain decoding is expected to be faster. One may be under way
        already, over other slots.
        """
        if not self._speculates(state.batch):
            return state, None
        start, drafting = time.perf_counter(), self._statistics.draft_seconds
        shape, timed = (state.batch, state.cache.length), self._only_passes_before(state)
        state, choice = self.manager.choose(state, active, self._statistics)
        if self._statistics.draft_seconds > drafting:
            self._last_end = self._busy_until = time.perf_counter()
        self._choice, under_way, rows = choice, None, choice.rows
        if rows:
            tree = self._tree(choice, state.batch, active.slots)
            state, pending = self.engine.verify(params, state, tree, pack_rows(tree, active.slots, rows))
            self._dispatched(self._times[(*shape, rows)])
            now = time.perf_counter()
            under_way = VerifyingPass(active, tree, choice, (*shape, rows), now, timed, pending)
            self._under_way.append(under_way)
        elif self._under_way and choice.seconds:  # no plain step comes of it while the others are verified
            self.decisions.add(choice, state.batch, len(active.slots), 0, 0.0)
        drafting = self._statistics.draft_seconds - drafting
        self._statistics.host_seconds += time.perf_counter() - start - drafting
        return state, under_way

    def _speculates(self, batch: int) -> bool:
        """Whether some pass may verify drafts of a batch."""
        return batch <= self.max_batch and bool(self.engine.buckets.passes(batch))

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
        verified, accepted = self._account(
            result, under_way.active, under_way.tree, under_way.choice.proposal
        )
        kept = int((result.tokens[under_way.active.slots] >= 0).sum())
        batch, responses = under_way.shape[0], len(under_way.active.slots)
        waited = responses + under_way.active.standing_by  # the pass is over for all of them
        self.manager.record(under_way.choice, batch, waited, kept, seconds)
        self.decisions.add(under_way.choice, batch, responses, kept, seconds, verified, accepted)
        for drafter in self._on_device:
            drafter.advance(result)
        self._statistics.host_seconds += time.perf_counter() - now
        return result

    def decode_plainly(
        self,
        params: Params,
        state: DecodeState,
        active: ActiveSlots,
        until_active: int,
        most_steps: int | None = None,
    ) -> tuple[DecodeState, DecodeResult]:
        """A few plain steps of all slots: more of them every time in a row, until new requests come."""
        asks = self._speculates(state.batch)
        requests = set(active.requests.tolist())
        if not requests <= self._plain_requests:
            self._patience = 1
        self._plain_requests = requests
        timed = asks and self._only_passes_before(state)
        self._dispatched(0.0)
        start = time.perf_counter()
        most = self.engine.decode_steps_per_visit if most_steps is None else most_steps
        steps = min(self._patience, most) if asks else most
        state, result = self.engine.generate(params, state, steps, until_active)
        self._last_end = self._busy_until = time.perf_counter()
        seconds = self._last_end - start
        if timed:
            self._times.add((state.batch, state.cache.length, 0), seconds / max(result.steps, 1))
        self._statistics.device_seconds += seconds
        if asks and self._choice is not None:
            kept = int((result.tokens >= 0).sum())
            self.manager.record(self._choice, state.batch, len(active.slots), kept, seconds)
            self.decisions.add(self._choice, state.batch, len(active.slots), kept, seconds)
        self._counts = {}
        for drafter in self._on_device:
            drafter.advance(result)
        self._patience = min(2 * self._patience, self.engine.decode_steps_per_visit)
        return state, result

    def _dispatched(self, seconds: float) -> None:
        """The device was given work for about so long: how long had it none?"""
        now = time.perf_counter()
        self._statistics.idle_seconds += max(0.0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + seconds

    def observe(
        self, requests: np.ndarray, tokens: np.ndarray, counts: np.ndarray, ended: np.ndarray
    ) -> None:
        """What was kept of the tokens that `decode` sampled: int32 [n, T], of which counts [n]; and which
        responses are complete, bool [n].
        """
        start = time.perf_counter()
        nothing = (np.zeros_like(counts),) * 2
        for name, drafter in self.drafters.items():
            drafted, accepted = self._counts.get(name, nothing)
            ask(name, drafter, "observe", Sampled(requests, tokens, counts, drafted, accepted, ended))
        self._statistics.host_seconds += time.perf_counter() - start

    def append(
        self,
        slots: Sequence[int],
        requests: Sequence[int],
        sizes: Sequence[int],
        tokens: Sequence[Sequence[int]],
        ended: Sequence[bool],
    ) -> None:
        """Tokens that nobody sampled now stand behind the first sizes[i] of request requests[i], in slot
        slots[i], or the response is complete.
        """
        start = time.perf_counter()
        padded, counts = _padded(tokens)
        for drafter in self._on_device:
            drafter.append(slots, sizes, padded, counts)
        self._tell_undrafted(np.asarray(requests, np.int32), padded, counts, np.asarray(ended, bool))
        self._statistics.host_seconds += time.perf_counter() - start

    def _tell_undrafted(
        self, requests: np.ndarray, tokens: np.ndarray, counts: np.ndarray, ended: np.ndarray
    ) -> None:
        """Drafters hear of tokens that no draft of theirs stood for; arguments as of `Sampled`."""
        nothing = np.zeros_like(counts)
        self._ask_all("observe", Sampled(requests, tokens, counts, nothing, nothing, ended))

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """The rewarded responses of a training rollout."""
        self._ask_all("learn", outcomes)
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
        if not all(map(_on_host, self.drafters.values())):
            metrics["draft_share"] = statistics.draft_seconds / max(waited, 1e-9)
        if self._trained:
            metrics["train_share"] = statistics.train_seconds / max(waited, 1e-9)
        if self.run_ahead is not None:
            metrics["run_ahead_tokens"] = statistics.ahead_tokens
            metrics["run_ahead_share"] = statistics.ahead_seconds / max(waited, 1e-9)
        for number, (name, drafter) in enumerate(self.drafters.items()):
            prefix, known = (f"{name}/" if number else ""), tuple(metrics)
            own = ask_for(name, drafter, "metrics", functools.partial(usable_metrics, taken=known))
            metrics |= {prefix + key: value for key, value in own.items()}
        return {f"speculation/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps: the drafters', what was accepted of their drafts, what the manager has
        learned, and what decides the order of requests.
        """
        state = self._state_of_others | ({} if self.run_ahead is None else self.run_ahead.state())
        for prefix, (name, drafter) in self._state_prefixes().items():
            own = ask_for(name, drafter, "state", usable_state)
            state |= {prefix + key: array for key, array in own.items()}
        for proposer in self.proposers:
            state |= proposer.state()
        return state | self.manager.state() | self.lengths.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Takes up what `state` returned; a drafter that the checkpoint does not have starts empty. What
        others left there is kept for them.
        """
        state = self.manager.load_state(self.lengths.load_state(state))
        for proposer in self.proposers:
            state = proposer.load_state(state)
        if self.run_ahead is not None:
            state = self.run_ahead.load_state(state)
        for prefix, (name, drafter) in self._state_prefixes().items():
            own = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
            if own:
                named = {key.removeprefix(prefix): array for key, array in own.items()}
                ask(name, drafter, "load_state", named)
        self._state_of_others = {key: array for key, array in state.items() if "/" in key}

    def _state_prefixes(self) -> dict[str, tuple[str, Drafter]]:
        """Under what checkpoints keep each drafter's state: those of a kind share it, so that one may go on
        where another left off; of several in a run, the first.
        """
        prefixes: dict[str, tuple[str, Drafter]] = {}
        for name, drafter in self.drafters.items():
            prefix = getattr(drafter, "state_name", name) + "/"
            prefixes[f"{name}/" if prefix in prefixes else prefix] = (name, drafter)
        return prefixes

    # -- warming up ------------------------------------------------------------------------------------------

    def warm_up(self, params: Params, prompt_length: int = 1, widens: bool = False) -> None:
        """Compiles every program that drafts and verifies, and takes the time of each.

        Args:
          params: weights from `engine.load_params`.
          prompt_length: the longest prompt, in tokens.
          widens: also what `widen` needs.
        """
        for proposer in self.proposers:
            proposer.refresh(params)
        if self._on_device:
            batches = self.engine.buckets.batch
            prefixes = self.engine.warm_up_prefill(params, batches[-1], prompt_length)
            for drafter in self._on_device:
                drafter.warm_up(prefixes, batches, prompt_length, widens)
        for batch in self.engine.buckets.batch:
            if not self._speculates(batch):
                continue
            for length in self.engine.buckets.cache:
                if (batch, length, 0) not in self._times:
                    taken = time_passes(self.engine, params, batch, length, _WARM_UP_REPEATS)
                    for rows, seconds in taken.items():
                        for own in seconds:
                            self._times.add((batch, length, rows), own)
                for proposer in self.proposers:
                    proposer.warm_up(params, batch, length, _WARM_UP_REPEATS)

    # -- drafting --------------------------------------------------------------------------------------------

    def _ask_all(self, method: str, *arguments: Any) -> None:
        for name, drafter in self.drafters.items():
            ask(name, drafter, method, *arguments)

    def choose(self, shape: tuple[int, int], found: Candidates) -> int:
        """Rows of the next pass; 0 for a plain step."""
        return best_rows(found, self.engine.buckets, self._times, *shape)

    def _tree(self, choice: Choice, batch: int, slots: np.ndarray) -> DraftTree:
        """The nodes that the pass verifies, at the slots of the state."""
        nodes = dict(self.engine.buckets.passes(batch))[choice.rows]
        taken = choice.found.take(choice.rows, nodes)[:, :nodes]
        tree = empty_tree(batch, nodes)
        tree.tokens[slots] = np.where(taken, choice.proposal.tokens[:, :nodes], 0)
        tree.parents[slots] = np.where(taken, choice.proposal.parents[:, :nodes], -1)
        tree.valid[slots] = taken
        return tree

    def _account(
        self, result: DecodeResult, active: ActiveSlots, tree: DraftTree, proposal: Proposal
    ) -> tuple[list[int], list[int]]:
        """Nodes of every depth that were verified, and that tokens came from."""
        verified = tree.valid[active.slots]  # [n, N]
        path = result.path[active.slots]
        counts = (result.tokens[active.slots] >= 0).sum(axis=1, keepdims=True)
        accepted = self._on_path(path, np.arange(1, tree.nodes + 2) <= counts)
        # A response's last token comes by itself: the node that foretold it was right, too.
        proposal.credit(verified, self._on_path(path, path >= 0))
        drafted, taken = verified.sum(axis=1), accepted.sum(axis=1)
        self._counts = proposal.counts(verified, accepted)
        self._drafted[active.requests] += drafted
        self._accepted[active.requests] += taken
        statistics = self._statistics
        statistics.verified += 1
        statistics.verified_slots += len(active.slots)
        statistics.verified_rows += result.rows
        statistics.drafted += int(drafted.sum())
        statistics.accepted += int(taken.sum())
        levels = proposal.levels[:, : tree.nodes]
        return np.bincount(levels[verified]).tolist()[1:], np.bincount(levels[accepted]).tolist()[1:]

    @staticmethod
    def _on_path(path: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The tree's nodes that stand in these columns of paths: bool [n, N], both arguments [n, N + 1]."""
        nodes = np.zeros(path.shape, bool)
        np.put_along_axis(nodes, np.where(columns, path, 0), True, axis=1)
        return nodes[:, 1:]  # node 0 is the last token


def _on_host(drafter: Drafter) -> bool:
    return not isinstance(drafter, SelfDrafter | DeviceDrafter)


def _padded(tokens: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Each sequence from its first column on, int32 [n, T], T at least 1, and their lengths, int32 [n]."""
    counts = np.asarray([len(own) for own in tokens], np.int32)
    padded = np.zeros((len(tokens), max(1, int(counts.max()))), np.int32)
    for row, own in enumerate(tokens):
        padded[row, : len(own)] = own
    return padded, counts
