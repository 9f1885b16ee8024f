"""A rollout worker: the decode loop, driven by orders, that says what it has sampled.

    worker.receive(order)       # Build the engine, Load weights, Decode, Ask
    events = worker.turn()      # up to the next host sync

It has no thread and no network of its own: a fabric gives it turns. One decode loop serves one rollout under
one version of the weights.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.cluster.blueprint import Blueprint, Built, build
from rljax.cluster.idle_work import IdleWorker
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Build,
    Decode,
    Event,
    Facts,
    Failed,
    FetchFailed,
    IdleOrder,
    Key,
    Load,
    Order,
    Piece,
    Pieces,
    Prefetch,
    Status,
    UnknownRequests,
    Weights,
    Withdraw,
)
from rljax.cluster.weights import WeightsError, fetch, to_params
from rljax.errors import UserError
from rljax.models.host_params import Part
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics, PartialResponse, Request, accumulate
from rljax.rollout.collector import Scheduler
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy
from rljax.rollout.live_response import LiveResponse


class RolloutWorker:
    """See the module's docstring.

    Args:
      name: the worker's name.
      get: returns what a reference to the fabric's store stands for; it may raise.
      put: stores a value, and returns a reference; by default the value travels with the messages.

    Attributes:
      loop: the decode loop of the present rollout; None before one begins.
    """

    def __init__(
        self, name: str, get: Callable[[Any], Any], put: Callable[[Any], Any] = pickle.dumps
    ) -> None:
        self.name, self._get, self._put = name, get, put
        self.loop: DecodeLoop | None = None
        self._orders: collections.deque[Order] = collections.deque()
        self._blueprint: Blueprint | None = None
        self._built: Built | None = None
        self._params: Params | None = None
        self._version: int | None = None
        self._fetch_seconds = 0.0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
        # What comes next, on its way to the host.
        self._ahead: tuple[Weights, concurrent.futures.Future[list[Part]]] | None = None
        self._prefetched = False  # whether the version in use came so
        self._rollout = -1
        self._counted = DecodeStatistics()  # of the rollout, in loops with earlier weights
        self._responses: dict[Key, LiveResponse] = {}
        self._keys: dict[LiveResponse, Key] = {}
        self._sent: dict[Key, int] = {}  # tokens, by request
        self._order_of: dict[Key, int] = {}  # the order by which it is decoded
        self._ended: list[Key] = []  # with earlier weights, in a rollout that is renewed
        self._pieces: list[Piece] = []
        self._busy_seconds = self._cpu_seconds = 0.0

    def receive(self, order: Order) -> None:
        """Takes an order, which the next turn carries out. May be called from another thread."""
        self._orders.append(order)

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        at_work = self._idle_worker is not None and not self._idle_worker.idle
        return not (self._orders or self._decodes or at_work)

    @property
    def _idle_worker(self) -> IdleWorker | None:
        return None if self._built is None else self._built.idle_worker

    @property
    def _decodes(self) -> bool:
        return self.loop is not None and bool(self.loop.live)

    def turn(self) -> list[Event]:
        """Carries out the orders that have come, decodes up to the next host sync, and returns what is new.

        Raises:
          Exception: the worker is of no more use. What the user can mend is an event instead.
        """
        events: list[Event] = []
        try:
            while self._orders:
                events += self._carry_out(self._orders.popleft())
            if self._decodes:
                start, cpu = time.perf_counter(), time.process_time()
                self.loop.step()
                self._busy_seconds += time.perf_counter() - start
                self._cpu_seconds += time.process_time() - cpu
            if self._idle_worker is not None:
                events += self._idle_worker.work(self._params, alone=not self._decodes)
        except UserError as error:
            return [*events, Failed(self.name, type(error).__name__, str(error))]
        if self._built is None:
            return [*events, Arrived(self.name, Facts())]
        if self._pieces:
            pieces, self._pieces = tuple(self._pieces), []
            events.append(self._report(pieces))
        return events

    # -- orders --------------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> list[Event]:
        if isinstance(order, Build):
            if self._built is None:
                self._blueprint = self._get(order.blueprint)
                self._built = build(self._blueprint, self.name, self._get, self._put)
            return [self._status()]
        if self._built is None:  # it is sent again
            return []
        if isinstance(order, IdleOrder):
            idle_worker = self._idle_worker
            return [] if idle_worker is None else idle_worker.take(order, self._params, self._version)
        if isinstance(order, Load):
            return self._load(order)
        if isinstance(order, Prefetch):
            limit = self._blueprint.config.cluster.fetch_seconds
            self._ahead = order.weights, self._thread.submit(fetch, order.weights, self._get, limit)
            return []
        if isinstance(order, Decode):
            return self._begin(order)
        if isinstance(order, Withdraw):
            return self._withdraw(order)
        assert isinstance(order, Ask)
        return self._answer(order)

    @property
    def _scheduler(self) -> Scheduler:
        return self._built.scheduler

    def _status(self) -> Status:
        slots = self._scheduler.max_slots
        facts = self._built.fingerprint, slots, self._version, self._fetch_seconds, self._prefetched
        return Status(self.name, *facts)

    def _load(self, load: Load) -> list[Event]:
        weights, speculator = load.weights, self._scheduler.speculator
        late = load.carry and weights.version < (self._version or 0)
        if weights.version == self._version or late:
            return [self._status()]
        start = time.perf_counter()
        try:
            parts, prefetched = self._on_host(weights)
            params = to_params(weights, parts, self._blueprint.policy)
            state = None if load.state is None else self._get(load.state)
            drafters = None if load.drafters is None else self._get(load.drafters)
            outcomes = [self._get(reference) for reference in load.outcomes]
        except WeightsError as error:
            return [FetchFailed(self.name, weights.version, str(error))]
        except Exception as error:  # whatever the store raises
            reason = f"what drafters learn did not come: {type(error).__name__}"
            return [FetchFailed(self.name, weights.version, reason)]
        events: list[Event] = [] if self._idle_worker is None else self._idle_worker.stop()
        carried = self._unfinished() if load.carry else []
        self.loop = None
        self._params = self._scheduler.engine.load_params(params)
        self._version, self._prefetched = weights.version, prefetched
        if state is not None:
            speculator.load_state(state)
        for responses in outcomes:
            speculator.learn(responses)
        if drafters is not None:
            speculator.load_weights(drafters)
        if outcomes and self._built.directories:
            speculator.state()  # with it, a history deletes files that are out of date
        if carried:
            self._start()
            self._submit(carried)
        self._fetch_seconds = time.perf_counter() - start
        return [*events, self._status()]

    def _on_host(self, weights: Weights) -> tuple[list[Part], bool]:
        """Returns a version's arrays, and whether they were copied while others decoded: into the host memory
        of the worker, which loads them when it is free (RhymeRL, section 4.2).
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0].digest == weights.digest:
            with contextlib.suppress(WeightsError):  # it is fetched again
                return ahead[1].result(), True
        return fetch(weights, self._get, self._blueprint.config.cluster.fetch_seconds), False

    def _unfinished(self) -> list[tuple[Key, Request, PartialResponse]]:
        """Takes the responses in progress out of the loop, for one with other weights to go on with: keys and
        values are computed again, so that a token depends on those before it and on its weights alone.
        """
        found = []
        for key, response in self._responses.items():
            partial = None if response.ending is not None else self.loop.withdraw(response)
            if partial is not None:
                found.append((key, response.request, partial))
        for key in self._ended:  # nobody has asked for them for as long as a version lasts
            self._responses.pop(key, None)
        self._ended = [key for key, response in self._responses.items() if response.ending is not None]
        self._keys = {response: key for key, response in self._responses.items()}
        accumulate(self._counted, self.loop.statistics)
        return found

    def _begin(self, order: Decode) -> list[Event]:
        """Takes requests; the first ones of a rollout end the last."""
        if order.rollout < self._rollout and self._decodes:  # it comes late
            return []
        if order.version != self._version:  # what it needs was lost, or comes later
            return [self._status()]
        events: list[Event] = []
        if order.work and self._idle_worker is not None:
            events = self._idle_worker.stop()
        if order.rollout != self._rollout or self.loop is None:
            if order.rollout != self._rollout:
                self._rollout, self._counted = order.rollout, DecodeStatistics()
                self._busy_seconds = self._cpu_seconds = 0.0
                self._responses, self._keys, self._sent, self._pieces, self._ended = {}, {}, {}, [], []
            self._start()
        self.loop.expects_more = order.more
        if order.drafter is not None:
            self._scheduler.speculator.prefer(order.drafter or None)
        self._take(order)
        return events

    def _start(self) -> None:
        scheduler, serves = self._scheduler, self._blueprint.serves
        scheduler.speculator.prefer(None)
        policy = LoopPolicy(sync_at_every_ending=True) if serves else LoopPolicy(start_full=True)
        self.loop = scheduler.open_loop(self._params, policy, self._collect, self._version)

    def _take(self, order: Decode) -> None:
        """Decodes requests; one that it decodes already only if this has more of it."""
        new = []
        for key, request, partial in order.work:
            known = self._responses.get(key)
            if known is None:
                new.append((key, request, partial))
            elif order.number < self._order_of[key]:  # it comes late
                continue
            elif known in self.loop.live and len(partial.tokens) > len(known.tokens):
                self.loop.cancel([known])
                new.append((key, request, partial))
            elif order.number > self._order_of[key]:  # what was sent by the last order may have been dropped
                self._sent[key] = min(len(partial.tokens), self._sent[key])
                if known.ending is not None:
                    self._pieces += self._pieces_of(key, known, self._sent[key], order.number)
                    self._sent[key] = len(known.tokens)
            self._order_of[key] = order.number
        self._submit(new)

    def _submit(self, work: Sequence[tuple[Key, Request, PartialResponse]]) -> None:
        responses = []
        for key, request, partial in work:
            if self._scheduler.tools is not None:
                partial = _before_a_call(partial)
            response = LiveResponse.resume(request, partial, self._scheduler.stop_strings)
            self._responses[key], self._keys[response] = response, key
            self._sent[key] = len(response.tokens)
            responses.append(response)
        if responses:
            self.loop.submit(responses)

    def _withdraw(self, order: Withdraw) -> list[Event]:
        if order.rollout == self._rollout and self.loop is not None:
            known = {key: self._responses.pop(key) for key in order.keys if key in self._responses}
            self.loop.cancel(known.values())
            for key, response in known.items():
                del self._keys[response], self._sent[key], self._order_of[key]
        return []

    def _answer(self, order: Ask) -> list[Event]:
        if order.rollout != self._rollout or self.loop is None:
            return [UnknownRequests(self.name, order.rollout, tuple(key for key, _ in order.positions))]
        self.loop.expects_more = order.more
        missing = tuple(
            key
            for key, _ in order.positions
            if key not in self._responses or self._order_of[key] < order.orders.get(key, 0)
        )
        for key, position in order.positions:
            response = None if key in missing else self._responses[key]
            if response is not None and (position < len(response.tokens) or response.ending is not None):
                self._say(key, response, min(position, len(response.tokens)))
        return [UnknownRequests(self.name, order.rollout, missing)] if missing else []

    # -- what is sampled -----------------------------------------------------------------------------------

    def _collect(self, responses: Sequence[LiveResponse]) -> None:
        for response in responses:
            key = self._keys[response]
            if self._responses.get(key) is response and response.ending != "cancelled":
                self._say(key, response, self._sent[key])

    def _say(self, key: Key, response: LiveResponse, begin: int) -> None:
        """Keeps a response's tokens from a position on to be sent."""
        self._pieces += self._pieces_of(key, response, begin, self._order_of[key])
        self._sent[key] = len(response.tokens)

    def _pieces_of(self, key: Key, response: LiveResponse, begin: int, order: int) -> list[Piece]:
        """Returns a response's tokens from a position on: a piece for each version of the weights."""
        length, pieces = len(response.tokens), []
        drafted, accepted = self.loop.slots.drafts_of(response)
        cuts = [at for at, _ in response.versions if begin < at < length]
        for first, end in itertools.pairwise([begin, *cuts, length]):
            ended = response.ending is not None and end == length
            piece = Piece(
                key,
                next((version for at, version in reversed(response.versions) if at <= first), self._version),
                first,
                tuple(response.tokens[first:end]),
                tuple(np.asarray(response.logprobs[first:end], np.float32).tolist()),
                response.ending if ended else None,
                drafted,
                accepted,
                tuple(answer for answer in response.tool_answers if first <= answer[0] < end),
                order,
            )
            pieces.append(piece)
        return pieces

    def _report(self, pieces: tuple[Piece, ...]) -> Pieces:
        statistics = dataclasses.replace(self._counted)
        if self.loop is not None:
            accumulate(statistics, self.loop.statistics)
        return Pieces(self.name, self._rollout, pieces, statistics, self._busy_seconds, self._cpu_seconds)

    def close(self) -> None:
        """Ends what goes on in the background."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._built is not None:
            self._built.close()


def _before_a_call(partial: PartialResponse) -> PartialResponse:
    """Returns a response without its last token, which may have completed a call whose answer the ledger does
    not have: sampled again, it is the same, and the tool is asked again.
    """
    end = len(partial.tokens)
    if not end or (partial.tool_answers and partial.tool_answers[-1][1] == end):
        return partial
    return dataclasses.replace(partial, tokens=partial.tokens[:-1], logprobs=partial.logprobs[:-1])
