"""Prefix racing: workers that are free decode copies of stragglers with other drafters (SpecActor, Algorithm
3).

Copies of a request agree on every token (`ledger.py`), so the longest prefix counts, whichever copy has it,
and a copy that is behind goes on from there.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from rljax.cluster.messages import Key
from rljax.cluster.router import CATCH_UP, Around, Move, QueueState, Router
from rljax.requests import Request


@dataclasses.dataclass(frozen=True)
class Copy:
    """A request that a free worker decodes too.

    Attributes:
      key: the request.
      worker: the free worker.
      drafter: name of the drafter that it uses.
    """

    key: int
    worker: str
    drafter: str


def assign(
    acceptances: Mapping[int, float],
    drafters: Mapping[str, Sequence[str]],
    free: Sequence[str],
    most: int,
    already: Mapping[int, Sequence[str]] = {},
) -> list[Copy]:
    """Returns who decodes copies of what (Algorithm 3).

    Args:
      acceptances: acceptance by request, of those under way.
      drafters: workers that use each drafter now.
      free: workers without requests.
      most: b_max, requests of a worker.
      already: drafters with which a request is decoded; none of them is given to it twice.
    """
    using = {drafter: list(workers) for drafter, workers in drafters.items()}
    method = {}
    for worker in free:
        drafter = min(using, key=lambda name: len(using[name]))
        using[drafter].append(worker)
        method[worker] = drafter
    slowest = sorted(acceptances, key=lambda key: acceptances[key])
    copies, used = [], {key: set(already.get(key, ())) for key in slowest}
    for drafter in drafters:
        waiting = [key for key in slowest if drafter not in used[key]]
        for worker in free:
            if method[worker] != drafter:
                continue
            taken, waiting = waiting[:most], waiting[most:]
            copies += [Copy(key, worker, drafter) for key in taken]
            for key in taken:
                used[key].add(drafter)
    return copies


class Racing(Around):
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
