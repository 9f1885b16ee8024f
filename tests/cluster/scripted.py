"""Workers without an engine: their tokens are a function of request and position, as real ones' are."""

import itertools

from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Begin,
    Build,
    Decode,
    End,
    Facts,
    Fail,
    Load,
    Piece,
    Pieces,
    Spawn,
    Status,
    Stop,
    Tick,
    UnknownRequests,
    Withdraw,
)
from rljax.requests import DecodeStatistics, Request
from rljax.sampling.noise import request_key

FACTS = Facts("c0de", "0.10.2", "here", 1)
NUMERICS = "0f0f0f0f"
LIMITS = Limits(2.0, 20.0, 1.0)


def length_of(key):
    return 3 + 7 * key % 11


def token(key, position, version=0):
    return 100 * key + 10_000 * version + position


def response_to(key, version=0):
    """The tokens and logprobs of a request's whole response."""
    return response_under(key, [version] * length_of(key))


def response_under(key, versions):
    """The same, with a version for each token."""
    tokens = tuple(token(key, position, version) for position, version in enumerate(versions))
    return tokens, tuple(-each / 8 for each in tokens)


def make_requests(count, samples=2, first=0, step=1):
    """Requests by key; so many samples share a prompt."""
    return {
        first + i: Request((7, i // samples), request_key(0, 0, 0, i // samples, i % samples), 16, step=step)
        for i in range(count)
    }


class ScriptedWorker:
    """A worker that decodes one token of each of its slots a turn.

    Attributes:
      at: the version of every token so far, by request.
    """

    def __init__(self, name, get=None, slots=2, facts=FACTS, fingerprint=NUMERICS):
        self.name, self.slots, self.facts, self.fingerprint = name, slots, facts, fingerprint
        self.orders, self.built, self.version, self.rollout = [], False, None, -1
        self.at, self.orders_of = {}, {}
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
                if order.version != self.version and not order.carry:
                    self.at = {}
                if not order.carry or order.version >= (self.version or 0):
                    self.version = order.version
                events.append(self.status())
            elif isinstance(order, Decode):
                events += self.decode(order)
            elif isinstance(order, Withdraw):
                if order.rollout == self.rollout:
                    self.at = {key: versions for key, versions in self.at.items() if key not in order.keys}
            else:
                assert isinstance(order, Ask)
                events += self.answer(order)
        if not self.built:
            return [*events, Arrived(self.name, self.facts)]
        pieces = []
        for key in [key for key in self.at if len(self.at[key]) < length_of(key)][: self.slots]:
            self.at[key].append(self.version)
            pieces += self.pieces(key, len(self.at[key]) - 1)
        if pieces:
            self.counts = DecodeStatistics(host_syncs=self.counts.host_syncs + 1)
            events.append(Pieces(self.name, self.rollout, tuple(pieces), self.counts, 0.1))
        return events

    def status(self):
        return Status(self.name, self.fingerprint, self.slots, self.version)

    def pieces(self, key, begin):
        """What a response has from a position on: a piece for each version."""
        versions = self.at[key]
        tokens, logprobs = response_under(key, versions)
        cuts = [i for i in range(begin + 1, len(versions)) if versions[i] != versions[i - 1]]
        pieces = []
        for first, end in itertools.pairwise([begin, *cuts, len(versions)]):
            ending = "eos" if end == length_of(key) else None
            version = versions[min(first, len(versions) - 1)]
            order = self.orders_of[key]
            pieces.append(
                Piece(key, version, first, tokens[first:end], logprobs[first:end], ending, order=order)
            )
        return pieces

    def decode(self, order):
        if order.version != self.version:
            return [self.status()]
        if order.rollout != self.rollout:
            self.rollout, self.at = order.rollout, {}
        again = []
        for key, _, partial in order.work:
            begins = [at for at, _ in partial.versions] + [len(partial.tokens)]
            versions = [
                version
                for (_, version), (begin, end) in zip(
                    partial.versions, itertools.pairwise(begins), strict=True
                )
                for _ in range(begin, end)
            ]
            assert partial.tokens == response_under(key, versions)[0]
            assert len(partial.tokens) < length_of(key)
            known = self.at.get(key)
            if known is not None and order.number <= self.orders_of[key]:
                continue
            self.orders_of[key] = order.number
            if known is None or len(known) < len(versions):
                self.at[key] = versions
            elif known:  # what the last order brought may have been dropped
                pieces = tuple(self.pieces(key, min(len(versions), len(known))))
                again.append(Pieces(self.name, self.rollout, pieces))
        return again

    def answer(self, order):
        missing = tuple(
            key
            for key, _ in order.positions
            if key not in self.at or self.orders_of[key] < order.orders.get(key, 0)
        )
        if order.rollout != self.rollout:
            missing = tuple(key for key, _ in order.positions)
        pieces = []
        for key, position in order.positions:
            if key in missing:
                continue
            known = len(self.at[key])
            if known > position or known == length_of(key):
                pieces += self.pieces(key, min(position, known))
        events = [UnknownRequests(self.name, order.rollout, missing)] if missing else []
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

    def begin(self, requests, version, renewed=False, rollout=None):
        """Lets requests be decoded, and returns the number of their rollout."""
        number = next(self.rollouts) if rollout is None else rollout
        self.do(self.coordinator.on(Begin(number, version, requests, renewed), self.fabric.now()))
        return number

    def wait(self, keys, most_turns=3000):
        """Waits until these responses have ended."""
        ended = lambda: all(self.coordinator.ledger[key].ending is not None for key in keys)  # noqa: E731
        for _ in range(most_turns):
            if ended():
                break
            self.listen()
        assert ended()

    def finish(self, number, keys, most_turns=3000):
        """Waits for responses, takes them, and returns (tokens, logprobs) by key."""
        self.wait(keys, most_turns)
        entries = {key: self.coordinator.ledger[key] for key in keys}
        self.do(self.coordinator.on(End(number, tuple(keys)), self.fabric.now()))
        return {key: (tuple(entry.tokens), tuple(entry.logprobs)) for key, entry in entries.items()}

    def run(self, requests, version=0, most_turns=3000):
        """Decodes requests to their end, and returns (tokens, logprobs) by key."""
        return self.finish(self.begin(requests, version), requests, most_turns)
