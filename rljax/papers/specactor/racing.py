"""Prefix racing: workers that are free decode copies of stragglers with other drafters (SpecActor, Algorithm
3).

Copies of a request agree on every token (`ledger.py`), so the longest prefix counts, whichever copy has it,
and a copy that is behind goes on from there.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from rljax.cluster.messages import ALL_DRAFTERS, Key
from rljax.cluster.router import CATCH_UP, Around, Move, QueueState, Router
from rljax.cluster.routing import Routing
from rljax.config.speculation import SpeculationConfig
from rljax.papers.specactor import RaceKeys
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
    acceptances: Mapping[Key, float],
    using: Mapping[str, Sequence[str]],
    free: Sequence[str],
    loads: Mapping[str, int],
    most: int,
    had: Mapping[Key, Collection[str]],
) -> list[Copy]:
    """Returns who decodes copies of what (Algorithm 3). Drafters that all requests have had are left out.

    Args:
      acceptances: acceptance by request, of those in progress.
      using: workers that use each drafter alone now.
      free: workers without requests.
      loads: requests of each worker that has some.
      most: b_max, requests of a worker up to which it takes copies.
      had: drafters that decode a request already; none of them is given to it twice.
    """
    slowest, copies = sorted(acceptances, key=lambda key: acceptances[key]), []
    waiting = {drafter: [key for key in slowest if drafter not in had.get(key, ())] for drafter in using}
    workers = {drafter: list(using[drafter]) for drafter, keys in waiting.items() if keys}
    for worker in free if workers else ():
        rarest = min(workers, key=lambda drafter: len(workers[drafter]))
        workers[rarest].append(worker)
    for drafter, names in workers.items():
        keys = waiting[drafter]
        for worker in names:
            room = max(most - loads.get(worker, 0), 0)
            copies += [Copy(key, worker, drafter) for key in keys[:room]]
            keys = keys[room:]
    return copies


class Racing(Around):
    """Workers without requests decode copies of the stragglers, each with one drafter alone. One whose copies
    end takes further ones, up to `most`.

    Args:
      inner: the router.
      drafters: names of the drafters.
      most: requests of a worker up to which it takes copies.
      catch_up: see `Router`.
      initial: the drafter that workers begin with, which their requests have had then; `ALL_DRAFTERS` where
        they choose before every pass, by which no request has had any to itself.
    """

    def __init__(
        self,
        inner: Router,
        drafters: Sequence[str],
        most: int,
        catch_up: int = CATCH_UP,
        initial: str = ALL_DRAFTERS,
    ) -> None:
        super().__init__(inner)
        self.catch_up = catch_up
        self._drafters, self._most, self._initial = tuple(drafters), most, initial
        self._using: dict[str, str] = {}  # drafter by worker, of those that were given copies
        self._copies: dict[Key, dict[str, str]] = {}  # worker by drafter

    def begin(self, requests: Mapping[Key, Request]) -> None:
        self._using, self._copies = {}, {}
        super().begin(requests)

    def leave(self, worker: str) -> None:
        self._using.pop(worker, None)
        for copies in self._copies.values():
            for drafter in [drafter for drafter, name in copies.items() if name == worker]:
                del copies[drafter]
        super().leave(worker)

    def moves(self, state: QueueState) -> list[Move]:
        moves = []
        for move in self.inner.moves(state):  # on a worker that has raced before, drafted as in the beginning
            raced = self._using.pop(move.worker, self._initial) != self._initial
            moves.append(dataclasses.replace(move, drafter=self._initial) if raced else move)
        loads = {name: len(keys) for name, keys in state.held().items()}
        for move in moves:
            loads[move.worker] += 1
        free = [name for name, load in loads.items() if not load and not self.inner.waiting(name)]
        using: dict[str, list[str]] = {drafter: [] for drafter in self._drafters}
        for name, load in loads.items():
            drafter = self._using.get(name, self._initial)
            if load and drafter in using:
                using[drafter].append(name)
        acceptances = {key: state.acceptance(key) for key, holders in state.holders.items() if holders}
        had = {key: {self._initial, *self._copies.get(key, ())} for key in acceptances}
        for copy in assign(acceptances, using, free, loads, self._most, had):
            self._using[copy.worker] = copy.drafter
            self._copies.setdefault(copy.key, {})[copy.drafter] = copy.worker
            moves.append(Move(copy.key, copy.worker, True, copy.drafter))
        return moves


class Races(Routing):
    """Races as the cluster asks for them (`cluster.race`)."""

    def __init__(self, config: RaceKeys) -> None:
        self._most = config.race

    def around(self, router: Router, speculation: SpeculationConfig) -> Router:
        return Racing(router, list(speculation.kinds), self._most) if self._most else router
