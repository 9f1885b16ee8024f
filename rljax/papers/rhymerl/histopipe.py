"""HistoPipe: ranking groups of prompts, dealt out to workers, so that long steps follow short ones (RhymeRL).

Section 6.2. Prompts are ranked by the median length that their group of responses had in the previous epoch,
and cut into ranking groups of equal size. Odd steps give the groups to workers in ascending order, even steps
in descending order. A worker begins its part of the next step when it is free, one version of the weights
behind.

Section 6.3. A response is an outlier that is among the last share alpha of its ranking group and longer than
beta times the longest one that the group's prompts had in the previous epoch. It moves within the step, to a
worker that decodes longer ones. Only its tokens move; keys and values are computed again.

How many workers a group gets, section 6.4, is in `two_tiers.py`.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from rljax.cluster.messages import Key
from rljax.cluster.router import CATCH_UP, Around, GroupQueue, Move, QueueState, WorkerLoad, by_prompt
from rljax.requests import Request


def rank(prompts: Sequence[tuple[int, ...]], history: Mapping[tuple[int, ...], Sequence[int]]) -> list[int]:
    """Returns places in `prompts`, by ascending median of the lengths that each had before.

    Args:
      prompts: token ids.
      history: lengths of the previous epoch's responses by prompt. One that is not there counts as the
        median prompt: nothing is known of it.
    """
    known = {prompt: statistics.median(history[prompt]) for prompt in set(prompts) if history.get(prompt)}
    middle = statistics.median(known.values()) if known else 0.0
    return sorted(range(len(prompts)), key=lambda place: known.get(prompts[place], middle))


def equal_groups(ranked: Sequence[int], count: int) -> list[list[int]]:
    """Cuts ranked places into `count` groups of equal size, the first ones larger by one where needed."""
    count = max(1, min(count, len(ranked)))
    size, more = divmod(len(ranked), count)
    groups, begin = [], 0
    for group in range(count):
        end = begin + size + (group < more)
        groups.append(list(ranked[begin:end]))
        begin = end
    return groups


def groups_of_places(sizes: Sequence[int], step: int) -> list[int]:
    """Returns the ranking group of each worker in a step: ascending in odd steps, descending in even ones.

    Args:
      sizes: number of workers of each group.
      step: number of the step, from 1.
    """
    ascending = [group for group, size in enumerate(sizes) for _ in range(size)]
    return ascending if step % 2 else ascending[::-1]


def growth_factor(before: Mapping[object, float], now: Mapping[object, float]) -> float:
    """beta: the 75th percentile of the growth of prompts' lengths from one epoch to the next, at least 1.1
    (section 6.3)."""
    growth = sorted(now[prompt] / before[prompt] for prompt in now if before.get(prompt))
    if not growth:
        return 1.1
    return max(1.1, growth[min(int(0.75 * len(growth)), len(growth) - 1)])


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

    In the first epoch, as long as most prompts are new, there are no groups, and every worker takes the next
    prompts as it has room: nothing is known of their lengths (section 6.2).

    A worker takes the lowest place that is free; the place says which group is its own in odd and in even
    steps. Parts of places that nobody has, and the requests of lost workers, are for everyone whose own part
    has nothing left, so that none waits for a worker that does not come.

    Args:
      places: number of workers that are desired.
      history: returns the lengths of the previous epoch's responses by prompt; None deals prompts out in
        their order, whatever is known.
      sizes: (lengths of each ranking group's responses in the previous epoch) -> number of its workers; None
        gives all groups as many.
      groups: number of ranking groups; None for one a place.

    Attributes:
      group_of: ranking group by request, of the newest step, as are the other two.
      longest: largest of each group's prompts' lengths in the previous epoch.
      members: number of responses of each group.
    """

    def __init__(
        self,
        places: int,
        history: Callable[[], Mapping[tuple[int, ...], Sequence[int]]] | None,
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
        self._requests, self._shared = {}, GroupQueue()
        self._parts = [GroupQueue() for _ in range(self._places)]
        self.add(requests)

    def add(self, requests: Mapping[Key, Request]) -> None:
        """The requests of a step, which wait behind those of the steps before."""
        self._requests = {**self._requests, **requests}
        self._groups, self.group_of, self.longest, self.members = [], {}, [], []
        prompts = by_prompt(requests, requests)
        texts = [requests[keys[0]].prompt_ids for keys in prompts]
        history = {} if self._history is None else self._history()
        if self._history is not None and 2 * sum(bool(history.get(text)) for text in texts) < len(texts):
            self._shared.add(prompts)
            return
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
        for number, group in enumerate(groups):
            own = [place for place, each in enumerate(self._groups) if each == number]
            # Long ones first: none of them should wait for a slot.
            parts = dealt([prompts[each] for each in reversed(group)], len(own))
            for place, part in zip(own, parts, strict=True):
                self._parts[place].add(part)
            self.group_of |= {key: number for place in group for key in prompts[place]}

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


@dataclasses.dataclass(frozen=True)
class OutlierRule:
    """The threshold.

    Attributes:
      last: alpha, a share.
      beyond: beta, a factor; see `growth_factor`.
    """

    last: float = 0.1
    beyond: float = 1.1

    def outliers(self, running: Mapping[int, int], size: int, longest: float) -> list[int]:
        """Returns the outliers among a group's responses that have not ended, the longest first.

        Args:
          running: tokens so far, by request.
          size: responses of the group, ended ones included.
          longest: largest length of the group's prompts in the previous epoch, each the median of its
            responses; infinity in the first epoch.
        """
        if len(running) > math.ceil(self.last * size):
            return []
        beyond = [key for key, length in running.items() if length > self.beyond * longest]
        return sorted(beyond, key=lambda key: -running[key])


def less_loaded(loads: Mapping[str, int], avoid: Sequence[str]) -> str | None:
    """Returns the worker with the fewest requests that is none of some, the first one of equals."""
    others = [name for name in loads if name not in avoid]
    return min(others, key=lambda name: loads[name]) if others else None


class Migrating(Around):
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
        if not ranked.longest:  # there are no groups
            return self.inner.moves(state)
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
