"""A rollout worker: the decode loop, driven by orders, that says what it has sampled.

    worker.receive(order)       # Plan: build the engine. Delivery: load weights. Decode, Ask
    events = worker.turn()      # up to the next host sync

It has no thread and no network of its own: a fabric gives it turns. One decode loop serves one rollout.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.cluster.blueprint import Blueprint, Built, build
from rljax.cluster.facts import facts
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Decode,
    Delivery,
    Event,
    Failed,
    FetchFailed,
    Key,
    Missing,
    Order,
    Piece,
    Pieces,
    Plan,
    Status,
)
from rljax.cluster.weights import WeightsError, fetch
from rljax.errors import UserError
from rljax.models.transformer import Params
from rljax.requests import PartialResponse
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.scheduler import Scheduler


class RolloutWorker:
    """See the module's docstring.

    Args:
      name: the worker's name.
      get: returns what a reference to the fabric's store stands for; it may raise.

    Attributes:
      loop: the decode loop of the present rollout; None before one begins.
    """

    def __init__(self, name: str, get: Callable[[Any], Any]) -> None:
        self.name, self._get = name, get
        self.loop: DecodeLoop | None = None
        self._orders: collections.deque[Order] = collections.deque()
        self._blueprint: Blueprint | None = None
        self._built: Built | None = None
        self._params: Params | None = None
        self._version: int | None = None
        self._fetch_seconds = 0.0
        self._rollout = -1
        self._responses: dict[Key, LiveResponse] = {}
        self._keys: dict[LiveResponse, Key] = {}
        self._sent: dict[Key, int] = {}  # tokens, by request
        self._pieces: list[Piece] = []
        self._busy_seconds = 0.0

    def receive(self, order: Order) -> None:
        """Takes an order, which the next turn carries out. May be called from another thread."""
        self._orders.append(order)

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return not self._orders and not self._decodes

    @property
    def _decodes(self) -> bool:
        return self.loop is not None and bool(self.loop.waiting or self.loop.running)

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
                start = time.perf_counter()
                self.loop.step()
                self._busy_seconds += time.perf_counter() - start
        except UserError as error:
            return [*events, Failed(self.name, type(error).__name__, str(error))]
        if self._built is None:
            return [*events, Arrived(self.name, facts())]
        if self._pieces:
            pieces, self._pieces = tuple(self._pieces), []
            events.append(self._report(pieces))
        return events

    # -- orders --------------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> list[Event]:
        if isinstance(order, Plan):
            if self._built is None:
                self._blueprint = self._get(order.blueprint)
                self._built = build(self._blueprint, self.name)
            return [self._status()]
        if self._built is None:  # it is sent again
            return []
        if isinstance(order, Delivery):
            return self._load(order)
        if isinstance(order, Decode):
            return self._begin(order)
        assert isinstance(order, Ask)
        return self._answer(order)

    @property
    def _scheduler(self) -> Scheduler:
        return self._built.scheduler

    def _status(self) -> Status:
        slots = self._scheduler.max_slots
        return Status(self.name, self._built.fingerprint, slots, self._version, self._fetch_seconds)

    def _load(self, delivery: Delivery) -> list[Event]:
        weights, speculator = delivery.weights, self._scheduler.speculator
        if weights.version == self._version:
            return [self._status()]
        start = time.perf_counter()
        try:
            params = fetch(weights, self._get, self._blueprint.policy)
            state = None if delivery.state is None else self._get(delivery.state)
            drafters = None if delivery.drafters is None else self._get(delivery.drafters)
            lessons = [self._get(lesson) for lesson in delivery.lessons]
        except WeightsError as error:
            return [FetchFailed(self.name, weights.version, str(error))]
        except Exception as error:  # whatever the store raises
            reason = f"what drafters learn did not come: {type(error).__name__}"
            return [FetchFailed(self.name, weights.version, reason)]
        self.loop = None
        self._params = self._scheduler.engine.load_params(params)
        self._version = weights.version
        if speculator is not None:
            if state is not None:
                speculator.load_state(state)
            for lesson in lessons:
                speculator.learn(lesson)
            if drafters is not None:
                speculator.load_weights(drafters)
            if lessons and self._built.directories:
                speculator.state()  # with it, a history deletes files that are out of date
        self._fetch_seconds = time.perf_counter() - start
        return [self._status()]

    def _begin(self, order: Decode) -> list[Event]:
        """Takes requests; the first ones of a rollout end the last."""
        if order.rollout < self._rollout:
            return []
        if order.version != self._version:  # what it needs was lost, or comes later
            return [self._status()]
        if order.rollout > self._rollout or self.loop is None:
            self._start(order.rollout)
        self.loop.expects_more = order.more
        new = []
        for key, request, partial in order.work:
            if key in self._responses:
                continue
            if self._scheduler.tools is not None:
                partial = _before_a_call(partial)
            response = LiveResponse.resume(request, partial, self._scheduler.stop_strings)
            self._responses[key], self._keys[response] = response, key
            self._sent[key] = len(response.tokens)
            new.append(response)
        if new:
            self.loop.submit(new)
        return []

    def _start(self, rollout: int) -> None:
        scheduler = self._scheduler
        self._rollout, self._busy_seconds = rollout, 0.0
        self._responses, self._keys, self._sent, self._pieces = {}, {}, {}, []
        self.loop = DecodeLoop(
            scheduler.engine,
            self._params,
            scheduler.max_slots,
            scheduler.speculator,
            scheduler.overlap,
            scheduler.tools,
            policy=LoopPolicy(start_full=True),
            on_sync=self._collect,
            version=self._version,
        )

    def _answer(self, order: Ask) -> list[Event]:
        if order.rollout < self._rollout:
            return []
        if order.rollout > self._rollout or self.loop is None:
            return [Missing(self.name, order.rollout, tuple(key for key, _ in order.positions))]
        self.loop.expects_more = order.more
        missing = tuple(key for key, _ in order.positions if key not in self._responses)
        for key, position in order.positions:
            response = self._responses.get(key)
            if response is not None and (position < len(response.tokens) or response.ending is not None):
                self._pieces.append(self._piece(key, response, min(position, len(response.tokens))))
                self._sent[key] = len(response.tokens)
        return [Missing(self.name, order.rollout, missing)] if missing else []

    # -- what is sampled -----------------------------------------------------------------------------------

    def _collect(self, responses: Sequence[LiveResponse]) -> None:
        for response in responses:
            key = self._keys[response]
            self._pieces.append(self._piece(key, response, self._sent[key]))
            self._sent[key] = len(response.tokens)

    def _piece(self, key: Key, response: LiveResponse, begin: int) -> Piece:
        logprobs = np.asarray(response.logprobs[begin:], np.float32).tolist()
        counts = (response.drafted, response.accepted) if response.ending is not None else (0, 0)
        return Piece(
            key,
            self._version,
            begin,
            tuple(response.tokens[begin:]),
            tuple(logprobs),
            response.ending,
            *counts,
            tuple(answer for answer in response.tool_answers if answer[0] >= begin),
        )

    def _report(self, pieces: tuple[Piece, ...]) -> Pieces:
        statistics = dataclasses.replace(self.loop.statistics)
        return Pieces(self.name, self._rollout, pieces, statistics, self._busy_seconds)

    def close(self) -> None:
        """Ends what goes on in the background."""
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
