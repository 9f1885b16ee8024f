"""The router of HistoPipe: ranking groups of prompts, dealt out to workers (`pipe.py`)."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from rljax.cluster.messages import Key
from rljax.cluster.pipe import equal_groups, groups_of_places, rank
from rljax.cluster.router import CATCH_UP, GroupQueue, Move, QueueState, WorkerLoad, by_prompt
from rljax.requests import Request


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


class RankedQueues:
    """Ranking groups of prompts, each dealt out to workers of its own (HistoPipe).

    A worker takes the lowest place that is free; the place says which group is its own in odd and in even
    steps. Parts of places that nobody has, and the requests of lost workers, are for everyone whose own part
    has nothing left, so that none waits for a worker that does not come.

    Args:
      places: number of workers that are desired.
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
        self.mobile, self.catch_up = False, CATCH_UP
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
        self._groups = groups_of_places(sizes, step)
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
        """Returns the ranking group of a worker; -1 for one beyond those that are desired."""
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

    def take(self, worker: WorkerLoad, share: int) -> list[Key]:
        place = self._place_of(worker.name)
        own = self._parts[place] if place < len(self._parts) else None
        for queue in self._sources(worker.name):
            if queue:
                # What is dealt out to a worker is its own, however much others have.
                return queue.take(worker.room(2 * worker.slots if queue is own else share, len(queue)))
        return []

    def moves(self, state: QueueState) -> list[Move]:
        return []
