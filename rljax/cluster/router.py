"""Who decodes what: the part of the coordinator that policies replace.

    SharedQueue    every worker takes the next group of requests as it has room: the default
    RankedQueues   each worker has its own ranking group of them (HistoPipe, `pipe.py`)
    Migrating      around either: outliers and halves of full batches go to other workers (`migration.py`)
    Racing         around either: free workers decode copies of stragglers (`racing.py`)

A router decides times, never tokens. It is as pure as the coordinator, and what it forgets costs nothing but
time: a request that it never gives out is one that the coordinator's own list of unfinished ones still has,
so `take` must give every waiting request to somebody as long as somebody asks.
"""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as copied
from typing import Protocol

from rljax.cluster.messages import Key
from rljax.cluster.migration import OutlierRule, halves, less_loaded
from rljax.cluster.pipe import equal_groups, rank, seats
from rljax.cluster.racing import assign
from rljax.requests import Request

_BACKLOG_SHARE = 4  # a worker holds a quarter more requests than slots, so that none waits for a message
_REFILL_SHARE = 8  # and is sent new ones when an eighth of its slots has come free
_CATCH_UP = 256  # tokens: a copy prefills its whole response to go on from there


@dataclasses.dataclass(frozen=True)
class Seat:
    """A worker that has the weights, as a router sees it.

    Attributes:
      name: the worker.
      slots: requests that it decodes at a time.
      held: requests that it has.
    """

    name: str
    slots: int
    held: int

    def room(self, share: int) -> int:
        """Requests that it can be given, no more than its share of what is left; 0 for too few to mention."""
        room = min(self.slots + self.slots // _BACKLOG_SHARE, share) - self.held
        if room <= 0 or (self.held and room < self.slots // _REFILL_SHARE):
            return 0
        return room


@dataclasses.dataclass(frozen=True)
class Move:
    """A request that another worker decodes from now on.

    Attributes:
      key: the request.
      worker: who decodes it.
      copies: whether those that have it go on.
      drafter: name of the drafter that `worker` uses for it; None leaves it to the worker.
    """

    key: Key
    worker: str
    copies: bool = False
    drafter: str | None = None


@dataclasses.dataclass(frozen=True)
class Board:
    """What is under way.

    Attributes:
      seats: workers that have the weights.
      holders: workers that decode each unfinished request, the first one first.
      length: tokens of a request so far.
      acceptance: share of a request's drafts that were accepted so far; 1 before any were.
    """

    seats: Sequence[Seat]
    holders: Mapping[Key, Sequence[str]]
    length: Callable[[Key], int]
    acceptance: Callable[[Key], float]

    def held(self) -> dict[str, list[Key]]:
        """Requests by worker."""
        held: dict[str, list[Key]] = {seat.name: [] for seat in self.seats}
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
        """A rollout begins with these requests, those of one prompt together. Rollouts under way have copies
        of the router that go on apart: nothing of an earlier rollout's may be changed in place.
        """

    def add(self, requests: Mapping[Key, Request]) -> None:
        """Further requests of the same rollout, which wait behind the others."""

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

    def take(self, seat: Seat, share: int) -> list[Key]:
        """Returns requests for a worker, which wait no longer.

        Args:
          seat: the worker.
          share: requests that it should have at most, an even share of the unfinished ones.
        """

    def moves(self, board: Board) -> list[Move]:
        """Returns requests that others than those that have them should decode."""


class GroupQueue:
    """Waiting requests by prompt, in order: those of one prompt share a prefill where one worker has them."""

    def __init__(self) -> None:
        self._groups: collections.deque[list[Key]] = collections.deque()
        self._ran_empty = False

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, groups: Iterable[list[Key]], first: bool = False) -> None:
        if first:
            self._groups.extendleft(reversed(list(groups)))
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
        self._ran_empty |= not self._groups
        return keys

    def discard(self, key: Key) -> None:
        for group in self._groups:
            if key in group:
                group.remove(key)
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


def dealt(prompts: Sequence[list[Key]], count: int) -> list[list[list[Key]]]:
    """Deals requests of prompts out to `count` workers in turn: whole prompts as far as there are as many for
    each, then the requests of the rest.
    """
    parts: list[list[list[Key]]] = [[] for _ in range(count)]
    whole = len(prompts) - len(prompts) % count
    for place, keys in enumerate(prompts[:whole]):
        parts[place % count].append(list(keys))
    rest = [key for keys in prompts[whole:] for key in keys]
    split = [rest[len(rest) * i // count : len(rest) * (i + 1) // count] for i in range(count)]
    for part, keys in zip(parts, split, strict=True):
        if keys:
            part.append(keys)
    return parts


class SharedQueue:
    """Every worker takes the next requests as it has room."""

    mobile, catch_up = False, _CATCH_UP

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

    def take(self, seat: Seat, share: int) -> list[Key]:
        return self._queue.take(seat.room(share)) if self._queue else []

    def moves(self, board: Board) -> list[Move]:
        return []


class RankedQueues:
    """Ranking groups of prompts, each dealt out to workers of its own (HistoPipe).

    A worker takes the lowest place that is free; the place says which group is its own in odd and in even
    steps. Parts of places that nobody has, and the requests of lost workers, are for everyone whose own part
    has nothing left, so that none waits for a worker that does not come.

    Args:
      places: number of workers that are wished for.
      history: returns the lengths of the previous epoch's responses by prompt.
      sizes: (lengths of each ranking group's responses in the previous epoch) -> number of its workers; None
        gives all groups as many.
      groups: number of ranking groups; None for one a place.

    Attributes:
      group_of: ranking group by request.
      longest: largest of each group's prompts' lengths in the previous epoch.
      members: number of responses of each group.
    """

    def __init__(
        self,
        places: int,
        history: Callable[[], Mapping[tuple[int, ...], Sequence[int]]],
        sizes: Callable[[Sequence[Sequence[int]]], Sequence[int]] | None = None,
        groups: int | None = None,
    ) -> None:
        self.mobile, self.catch_up = False, _CATCH_UP
        self._history, self._sizes, self._num_groups = history, sizes, groups or places
        self._places = places
        self._requests: Mapping[Key, Request] = {}
        self._place: dict[str, int] = {}
        self._parts: list[GroupQueue] = []  # by place
        self._shared = GroupQueue()
        self._groups: list[int] = []  # by place
        self.group_of: dict[Key, int] = {}
        self.longest: list[float] = []
        self.members: list[int] = []

    def begin(self, requests: Mapping[Key, Request]) -> None:
        self._requests, self._shared = requests, GroupQueue()
        prompts = by_prompt(requests, requests)
        texts = [requests[keys[0]].prompt_ids for keys in prompts]
        history = self._history()
        # In the first epoch nothing is known, and the order in which requests came is as good as any.
        groups = equal_groups(rank(texts, history), min(self._num_groups, self._places))
        known = [[length for place in group for length in history.get(texts[place], ())] for group in groups]
        if self._sizes is not None and all(known):
            sizes = list(self._sizes(known))
        else:
            sizes = [len(places) for places in equal_groups(range(self._places), len(groups))]
        step = max((request.step for request in requests.values()), default=0)
        self._groups = seats(sizes, step)
        # A prompt's length in history is the median of its responses.
        medians = [
            [statistics.median(history[texts[place]]) for place in group if history.get(texts[place])]
            for group in groups
        ]
        self.longest = [max(each, default=float("inf")) for each in medians]
        self.members = [sum(len(prompts[place]) for place in group) for group in groups]
        self._parts = [GroupQueue() for _ in self._groups]
        self.group_of = {}
        for number, group in enumerate(groups):
            own = [place for place, each in enumerate(self._groups) if each == number]
            # Long ones first: none of them should wait for a slot.
            parts = dealt([prompts[each] for each in reversed(group)], len(own))
            for place, part in zip(own, parts, strict=True):
                self._parts[place].add(part)
            self.group_of |= {key: number for place in group for key in prompts[place]}

    def add(self, requests: Mapping[Key, Request]) -> None:
        self._requests = {**self._requests, **requests}
        self._shared.add(by_prompt(requests, requests))

    def put_back(self, keys: Iterable[Key]) -> None:
        self._shared.add(by_prompt(keys, self._requests), first=True)

    def discard(self, key: Key) -> None:
        for queue in (self._shared, *self._parts):
            queue.discard(key)

    def leave(self, worker: str) -> None:
        self._place.pop(worker, None)

    def group_of_worker(self, worker: str) -> int:
        """Returns the ranking group of a worker; -1 for one beyond those that were wished for."""
        place = self._place_of(worker)
        return self._groups[place] if place < len(self._groups) else -1

    def _place_of(self, worker: str) -> int:
        if worker not in self._place:
            taken = set(self._place.values())
            self._place[worker] = next(i for i in range(len(taken) + 1) if i not in taken)
        return self._place[worker]

    def _sources(self, worker: str) -> Iterable[GroupQueue]:
        """Queues that a worker takes from, in this order."""
        own = self._place_of(worker)
        if own < len(self._parts):
            yield self._parts[own]
        yield self._shared
        if len(self._place) < len(self._parts):
            present = set(self._place.values())
            yield from (part for place, part in enumerate(self._parts) if place not in present)

    def waiting(self, worker: str) -> bool:
        return any(self._sources(worker))

    def ran_empty(self) -> bool:
        return sum(queue.ran_empty() for queue in (self._shared, *self._parts)) > 0  # of every one

    def take(self, seat: Seat, share: int) -> list[Key]:
        place = self._place_of(seat.name)
        own = self._parts[place] if place < len(self._parts) else None
        for queue in self._sources(seat.name):
            if queue:
                # What is dealt out to a worker is its own, however much others have.
                return queue.take(seat.room(2 * seat.slots if queue is own else share))
        return []

    def moves(self, board: Board) -> list[Move]:
        return []


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

    def take(self, seat: Seat, share: int) -> list[Key]:
        return self.inner.take(seat, share)


class Balancing(_Around):
    """Workers without requests take half of those of the worker that has most.

    Args:
      inner: the router.
      least: requests of a worker from which on half of them go; with fewer, its passes are not faster.
    """

    def __init__(self, inner: Router, least: int) -> None:
        super().__init__(inner)
        self._least = least

    def moves(self, board: Board) -> list[Move]:
        held = board.held()
        idle = [name for name, keys in held.items() if not keys and not self.inner.waiting(name)]
        if not idle:
            return self.inner.moves(board)
        busy = {name: keys for name, keys in held.items() if keys}
        return self.inner.moves(board) + [Move(key, to) for key, to in halves(busy, idle, self._least)]


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

    def moves(self, board: Board) -> list[Move]:
        ranked, rule = self.inner, self._rule()
        running: dict[int, dict[Key, int]] = {}
        for key, holders in board.holders.items():
            if holders and key not in self._moved:
                running.setdefault(ranked.group_of[key], {})[key] = board.length(key)
        last = len(ranked.longest) - 1
        held = {name: len(keys) for name, keys in board.held().items()}
        moves = self.inner.moves(board)
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
                to = less_loaded(longer, board.holders[key])
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

    def __init__(self, inner: Router, drafters: Sequence[str], most: int, catch_up: int = _CATCH_UP) -> None:
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

    def moves(self, board: Board) -> list[Move]:
        moves, held = self.inner.moves(board), board.held()
        free = [name for name, keys in held.items() if not keys and not self.inner.waiting(name)]
        if not free:
            return moves
        using: dict[str, list[str]] = {drafter: [] for drafter in self._drafters}
        for name in held:
            if name not in free:
                using[self._using.get(name, self._drafters[0])].append(name)
        open_keys = {key: board.acceptance(key) for key, holders in board.holders.items() if holders}
        given = {key: self._given.get(key, [self._drafters[0]]) for key in open_keys}
        for copy in assign(open_keys, using, free, self._most, given):
            self._using[copy.worker] = copy.drafter
            self._given.setdefault(copy.key, [self._drafters[0]]).append(copy.drafter)
            moves.append(Move(copy.key, copy.worker, True, copy.drafter))
        return moves
