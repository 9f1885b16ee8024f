"""Routers around another one that let requests move: halves of full batches, outliers (`migration.py`), and
copies that race (`racing.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as copied

from rljax.cluster.messages import Key
from rljax.cluster.migration import OutlierRule, halves, less_loaded
from rljax.cluster.racing import assign
from rljax.cluster.ranked_queues import RankedQueues
from rljax.cluster.router import CATCH_UP, Move, QueueState, Router, WorkerLoad
from rljax.requests import Request


class _Around:
    """A router that adds moves to another one's."""

    def __init__(self, inner: Router) -> None:
        self.inner, self.mobile, self.catch_up = inner, True, inner.catch_up

    def __copy__(self) -> "_Around":
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, inner=copied(self.inner))
        return new

    def begin(self, requests: Mapping[Key, Request]) -> None:
        self.inner.begin(requests)

    def add(self, requests: Mapping[Key, Request]) -> None:
        self.inner.add(requests)

    def put_back(self, keys: Iterable[Key]) -> None:
        self.inner.put_back(keys)

    def discard(self, key: Key) -> None:
        self.inner.discard(key)

    def leave(self, worker: str) -> None:
        self.inner.leave(worker)

    def waiting(self, worker: str) -> bool:
        return self.inner.waiting(worker)

    def ran_empty(self) -> bool:
        return self.inner.ran_empty()

    def take(self, worker: WorkerLoad, share: int) -> list[Key]:
        return self.inner.take(worker, share)


class Balancing(_Around):
    """Workers without requests take half of those of the worker that has most.

    Args:
      inner: the router.
      least: requests of a worker from which on half of them go; with fewer, its passes are not faster.
    """

    def __init__(self, inner: Router, least: int) -> None:
        super().__init__(inner)
        self._least = least

    def moves(self, state: QueueState) -> list[Move]:
        held = state.held()
        idle = [name for name, keys in held.items() if not keys and not self.inner.waiting(name)]
        if not idle:
            return self.inner.moves(state)
        busy = {name: keys for name, keys in held.items() if keys}
        return self.inner.moves(state) + [Move(key, to) for key, to in halves(busy, idle, self._least)]


class Migrating(_Around):
    """Outliers of ranking groups go to workers that still decode longer ones in the same rollout.

    Args:
      inner: the ranking groups.
      rule: returns the threshold of this step.
    """

    inner: RankedQueues

    def __init__(self, inner: RankedQueues, rule: Callable[[], OutlierRule]) -> None:
        super().__init__(inner)
        self._rule = rule
        self._moved: set[Key] = set()

    def begin(self, requests: Mapping[Key, Request]) -> None:
        self._moved = set()
        super().begin(requests)

    def moves(self, state: QueueState) -> list[Move]:
        ranked, rule = self.inner, self._rule()
        running: dict[int, dict[Key, int]] = {}
        for key, holders in state.holders.items():
            if holders and key not in self._moved:
                running.setdefault(ranked.group_of[key], {})[key] = state.length(key)
        last = len(ranked.longest) - 1
        held = {name: len(keys) for name, keys in state.held().items()}
        moves = self.inner.moves(state)
        for group, lengths in running.items():
            if group == last:  # these may take as long as they do
                continue
            for key in rule.outliers(lengths, ranked.members[group], ranked.longest[group]):
                groups = {name: ranked.group_of_worker(name) for name, load in held.items() if load}
                longer = {
                    name: held[name]
                    for name, other in groups.items()
                    if other == last or ranked.longest[other] > lengths[key]
                }
                to = less_loaded(longer, state.holders[key])
                if to is None:
                    continue
                self._moved.add(key)
                held[to] += 1
                moves.append(Move(key, to))
        return moves


class Racing(_Around):
    """Workers without requests decode copies of the stragglers.

    Args:
      inner: the router.
      drafters: names of the drafters; the first one is what workers begin with.
      most: requests of which a worker takes copies.
      catch_up: see `Router`.
    """

    def __init__(self, inner: Router, drafters: Sequence[str], most: int, catch_up: int = CATCH_UP) -> None:
        super().__init__(inner)
        self.catch_up = catch_up
        self._drafters, self._most = tuple(drafters), most
        self._using: dict[str, str] = {}
        self._given: dict[Key, list[str]] = {}

    def begin(self, requests: Mapping[Key, Request]) -> None:
        self._using, self._given = {}, {}
        super().begin(requests)

    def leave(self, worker: str) -> None:
        self._using.pop(worker, None)
        super().leave(worker)

    def moves(self, state: QueueState) -> list[Move]:
        first, held = self._drafters[0], state.held()
        moves = []
        for move in self.inner.moves(state):
            changes = self._using.pop(move.worker, first) != first
            moves.append(dataclasses.replace(move, drafter=first) if changes else move)
        given = {move.worker for move in moves}
        free = [
            name
            for name, keys in held.items()
            if not keys and name not in given and not self.inner.waiting(name)
        ]
        if not free:
            return moves
        using: dict[str, list[str]] = {drafter: [] for drafter in self._drafters}
        for name in held:
            if name not in free:
                using[self._using.get(name, first)].append(name)
        open_keys = {key: state.acceptance(key) for key, holders in state.holders.items() if holders}
        tried = {key: self._given.get(key, [first]) for key in open_keys}
        for copy in assign(open_keys, using, free, self._most, tried):
            self._using[copy.worker] = copy.drafter
            self._given.setdefault(copy.key, [first]).append(copy.drafter)
            moves.append(Move(copy.key, copy.worker, True, copy.drafter))
        return moves
