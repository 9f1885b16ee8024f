"""Who decodes what: the part of the coordinator that policies replace.

    SharedQueue    every worker takes the next group of requests as it has room: the default
    Balancing      around any: a worker without requests takes half of another one's

Those of papers come by `routing.py`.

A router decides times, never tokens. It is as pure as the coordinator, and what it forgets costs nothing but
time: a request that it never gives out is one that the coordinator's own list of unfinished ones still has,
so `take` must give every waiting request to somebody as long as somebody asks.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as copied
from typing import Protocol

from rljax.cluster.messages import Key
from rljax.requests import Request

_BACKLOG_SHARE = 4  # a worker holds a quarter more requests than slots, so that none waits for a message
_REFILL_SHARE = 8  # and is sent new ones when an eighth of its slots has come free
CATCH_UP = 256  # tokens: a copy prefills its whole response to go on from there


@dataclasses.dataclass(frozen=True)
class WorkerLoad:
    """A worker that has the weights, as a router sees it.

    Attributes:
      name: the worker.
      slots: requests that it decodes at a time.
      held: requests that it has.
    """

    name: str
    slots: int
    held: int

    def room(self, share: int, waiting: int) -> int:
        """Requests that it can be given, no more than its share of what is left; 0 for too few to mention.

        The last ones are never too few: as long as one waits, workers keep their batch wide for it.

        Args:
          share: requests that it should have at most.
          waiting: requests that wait.
        """
        room = min(self.slots + self.slots // _BACKLOG_SHARE, share) - self.held
        few = self.held and waiting >= self.slots and room < self.slots // _REFILL_SHARE
        return 0 if few else max(room, 0)


@dataclasses.dataclass(frozen=True)
class Move:
    """A request that another worker decodes from now on.

    Attributes:
      key: the request.
      worker: who decodes it.
      copies: whether those that have it go on.
      drafter: see `Decode`.
    """

    key: Key
    worker: str
    copies: bool = False
    drafter: str | None = None


@dataclasses.dataclass(frozen=True)
class QueueState:
    """What is in progress.

    Attributes:
      workers: those that have the weights.
      holders: workers that decode each unfinished request, the first one first.
      length: tokens of a request so far.
      acceptance: share of a request's drafts that were accepted so far, on the worker where it is largest:
        the longest copy counts; 0 where none was drafted for it, 1 before anything is known.
    """

    workers: Sequence[WorkerLoad]
    holders: Mapping[Key, Sequence[str]]
    length: Callable[[Key], int]
    acceptance: Callable[[Key], float]

    def held(self) -> dict[str, list[Key]]:
        """Requests by worker."""
        held: dict[str, list[Key]] = {worker.name: [] for worker in self.workers}
        for key, holders in self.holders.items():
            for name in holders:
                if name in held:
                    held[name].append(key)
        return held


class Router(Protocol):
    """See the module's docstring.

    Attributes:
      mobile: whether `moves` ever returns something.
      catch_up: tokens behind the longest copy of a request from which on a copy goes on from there.
    """

    mobile: bool
    catch_up: int

    def begin(self, requests: Mapping[Key, Request]) -> None:
        """A rollout begins with these requests, those of one prompt together. Rollouts in progress have
        copies of the router that go on apart: nothing of an earlier rollout's may be changed in place.
        """

    def add(self, requests: Mapping[Key, Request]) -> None:
        """Further requests of the same rollout, which wait after the others."""

    def put_back(self, keys: Iterable[Key]) -> None:
        """Requests of a lost worker, which wait first."""

    def discard(self, key: Key) -> None:
        """A waiting request has ended: a lost worker's last piece came late."""

    def leave(self, worker: str) -> None:
        """A worker is lost."""

    def waiting(self, worker: str) -> bool:
        """Whether a worker may be given further requests in this rollout."""

    def ran_empty(self) -> bool:
        """Whether requests that somebody waited for have run out since the last call."""

    def take(self, worker: WorkerLoad, share: int) -> list[Key]:
        """Returns requests for a worker, which wait no longer.

        Args:
          worker: the worker.
          share: requests that it should have at most, an even share of the unfinished ones.
        """

    def moves(self, state: QueueState) -> list[Move]:
        """Returns requests that others than those that have them should decode."""


class GroupQueue:
    """Waiting requests by prompt, in order: those of one prompt share a prefill where one worker has them."""

    def __init__(self) -> None:
        self._groups: collections.deque[list[Key]] = collections.deque()
        self._count = 0
        self._ran_empty = False

    def __len__(self) -> int:
        return self._count

    def add(self, groups: Iterable[list[Key]], first: bool = False) -> None:
        groups = list(groups)
        self._count += sum(map(len, groups))
        if first:
            self._groups.extendleft(reversed(groups))
        else:
            self._groups.extend(groups)

    def take(self, count: int) -> list[Key]:
        keys: list[Key] = []
        while self._groups and len(keys) < count:
            group = self._groups[0]
            taken = group[: count - len(keys)]
            keys += taken
            del group[: len(taken)]
            if not group:
                self._groups.popleft()
        self._count -= len(keys)
        self._ran_empty |= not self._groups
        return keys

    def discard(self, key: Key) -> None:
        for group in self._groups:
            if key in group:
                group.remove(key)
                self._count -= 1
        self._groups = collections.deque(group for group in self._groups if group)
        self._ran_empty |= not self._groups

    def ran_empty(self) -> bool:
        """Whether it has become empty since the last call."""
        ran_empty, self._ran_empty = self._ran_empty, False
        return ran_empty


def by_prompt(keys: Iterable[Key], requests: Mapping[Key, Request]) -> list[list[Key]]:
    """Returns keys in groups of one prompt, in order."""
    groups: dict[tuple[int, ...], list[Key]] = {}
    for key in keys:
        groups.setdefault(requests[key].prompt_ids, []).append(key)
    return list(groups.values())


class SharedQueue:
    """Every worker takes the next requests as it has room."""

    mobile, catch_up = False, CATCH_UP

    def __init__(self) -> None:
        self._requests: Mapping[Key, Request] = {}
        self._queue = GroupQueue()

    def begin(self, requests: Mapping[Key, Request]) -> None:
        self._requests, self._queue = requests, GroupQueue()
        self._queue.add(by_prompt(requests, requests))

    def add(self, requests: Mapping[Key, Request]) -> None:
        self._requests = {**self._requests, **requests}
        self._queue.add(by_prompt(requests, requests))

    def put_back(self, keys: Iterable[Key]) -> None:
        self._queue.add(by_prompt(keys, self._requests), first=True)

    def discard(self, key: Key) -> None:
        self._queue.discard(key)

    def leave(self, worker: str) -> None:
        pass

    def waiting(self, worker: str) -> bool:
        return bool(self._queue)

    def ran_empty(self) -> bool:
        return self._queue.ran_empty()

    def take(self, worker: WorkerLoad, share: int) -> list[Key]:
        return self._queue.take(worker.room(share, len(self._queue))) if self._queue else []

    def moves(self, state: QueueState) -> list[Move]:
        return []


class Around:
    """A router that adds moves to another one's."""

    def __init__(self, inner: Router) -> None:
        self.inner, self.mobile, self.catch_up = inner, True, inner.catch_up

    def __copy__(self) -> "Around":
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


class Balancing(Around):
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


def halves(held: Mapping[str, Sequence[int]], idle: Sequence[str], least: int) -> list[tuple[int, str]]:
    """Returns (request, worker) such that workers without work take half of the requests of those that have
    most, as long as these have at least `least`.

    Args:
      held: requests in progress by worker.
      idle: workers without any.
      least: below so many requests a worker's pass is not faster with half of them.
    """
    left = {name: list(keys) for name, keys in held.items()}
    moves = []
    for taker in idle:
        giver = max(left, key=lambda name: len(left[name]), default=None)
        if giver is None or len(left[giver]) < max(least, 2):
            break
        half = left[giver][len(left[giver]) // 2 :]
        left[giver] = left[giver][: len(left[giver]) // 2]
        left[taker] = half
        moves += [(key, taker) for key in half]
    return moves
