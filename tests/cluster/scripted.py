"""Workers without an engine: their tokens are a function of request and position, as real ones' are."""

import itertools

from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Begin,
    Build,
    Decode,
    Facts,
    Fail,
    Load,
    Missing,
    Piece,
    Pieces,
    Spawn,
    Status,
    Stop,
    Tick,
    Withdraw,
)
from rljax.requests import DecodeStatistics, Request
from rljax.sampling.noise import request_key

FACTS = Facts("c0de", "0.10.2", "here", 1)
NUMERICS = "0f0f0f0f"
LIMITS = Limits(2.0, 20.0, 1.0)


def length_of(key):
    return 3 + 7 * key % 11


def response_to(key, version=0):
    """The tokens and logprobs of a request's whole response."""
    tokens = tuple(100 * key + 10_000 * version + position for position in range(length_of(key)))
    return tokens, tuple(-token / 8 for token in tokens)


def make_requests(count, samples=2, first=0, step=1):
    """Requests by key; so many samples share a prompt."""
    return {
        first + i: Request((7, i // samples), request_key(0, 0, 0, i // samples, i % samples), 16, step=step)
        for i in range(count)
    }


class ScriptedWorker:
    """A worker that decodes one token of each of its slots a turn."""

    def __init__(self, name, get=None, slots=2, facts=FACTS, fingerprint=NUMERICS):
        self.name, self.slots, self.facts, self.fingerprint = name, slots, facts, fingerprint
        self.orders, self.built, self.version, self.rollout = [], False, None, -1
        self.at, self.begun = {}, {}
        self.counts = DecodeStatistics()

    def receive(self, order):
        self.orders.append(order)

    def turn(self):
        events = []
        orders, self.orders = self.orders, []
        for order in orders:
            if isinstance(order, Build):
                self.built = True
                events.append(self.status())
            elif not self.built:
                continue
            elif isinstance(order, Load):
                self.version = max(order.version, self.version or 0)
                events.append(self.status())
            elif isinstance(order, Decode):
                events += self.decode(order)
            elif isinstance(order, Withdraw):
                if order.rollout == self.rollout:
                    self.at = {key: at for key, at in self.at.items() if key not in order.keys}
            else:
                assert isinstance(order, Ask)
                events += self.answer(order)
        if not self.built:
            return [*events, Arrived(self.name, self.facts)]
        pieces = []
        for key in [key for key in self.at if self.at[key] < length_of(key)][: self.slots]:
            pieces.append(self.piece(key, self.at[key], self.at[key] + 1))
            self.at[key] += 1
        if pieces:
            self.counts = DecodeStatistics(host_syncs=self.counts.host_syncs + 1)
            events.append(Pieces(self.name, self.rollout, tuple(pieces), self.counts, 0.1))
        return events

    def status(self):
        return Status(self.name, self.fingerprint, self.slots, self.version)

    def piece(self, key, begin, end):
        tokens, logprobs = response_to(key, self.version)
        ending = "eos" if end == length_of(key) else None
        return Piece(key, self.version, begin, tokens[begin:end], logprobs[begin:end], ending)

    def decode(self, order):
        if order.rollout < self.rollout:
            return []
        if order.version != self.version:
            return [self.status()]
        if order.rollout > self.rollout:
            self.rollout, self.at = order.rollout, {}
        for key, _, partial in order.work:
            assert partial.tokens == response_to(key, self.version)[0][: len(partial.tokens)]
            assert len(partial.tokens) < length_of(key)
            self.at[key] = max(self.at.get(key, 0), len(partial.tokens))
        return []

    def answer(self, order):
        if order.rollout < self.rollout:
            return []
        missing = tuple(key for key, _ in order.positions if key not in self.at)
        if order.rollout > self.rollout:
            missing = tuple(key for key, _ in order.positions)
        pieces = [
            self.piece(key, position, self.at[key])
            for key, position in order.positions
            if key not in missing and (self.at[key] > position or self.at[key] == length_of(key))
        ]
        events = [Missing(self.name, order.rollout, missing)] if missing else []
        return events + ([Pieces(self.name, self.rollout, tuple(pieces))] if pieces else [])


class Failure(Exception):
    """A `Fail` of the coordinator."""


class Driver:
    """Carries the commands of a coordinator out over a local fabric."""

    def __init__(self, fabric, workers=2, limits=None, strict=True, router=None):
        self.fabric = fabric
        self.coordinator = Coordinator(workers, FACTS, limits or LIMITS, NUMERICS, strict, router)
        self.said, self.rollouts, self.keys = [], itertools.count(1), itertools.count()
        self.do(self.coordinator.build(0.0))

    def do(self, commands):
        for command in commands:
            if isinstance(command, Fail):
                raise Failure(f"{command.kind}: {command.message}")
            elif isinstance(command, Spawn):
                self.fabric.spawn(command.worker)
            elif isinstance(command, Stop):
                self.fabric.stop(command.worker)
            elif hasattr(command, "worker"):
                self.fabric.send(command.worker, command)
            else:
                self.said.append(command.message)

    def listen(self):
        for event in self.fabric.receive(0):
            self.do(self.coordinator.on(event, self.fabric.now()))
        self.do(self.coordinator.on(Tick(), self.fabric.now()))

    def run(self, requests, version=0, most_turns=3000):
        """Decodes requests to their end, and returns (tokens, logprobs) by key."""
        self.do(self.coordinator.on(Begin(next(self.rollouts), version, requests), self.fabric.now()))
        for _ in range(most_turns):
            if self.coordinator.done:
                break
            self.listen()
        assert self.coordinator.done
        entries = self.coordinator.ledger.entries
        return {key: (tuple(entry.tokens), tuple(entry.logprobs)) for key, entry in entries.items()}
