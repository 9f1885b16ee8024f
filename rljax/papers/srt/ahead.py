"""Run-ahead on idle workers: requests of a later step, decoded before it begins, into drafts only.

    order    SampleAhead: requests, from the driver, to a worker that has nothing to decode
    event    SampledAhead: the tokens of all of them so far, after every host sync

A worker gets as many requests as it has slots, those likely to be long first, and ends them at once when it
has something to decode or gets other weights. What it has sampled until then is known to the driver, which
sends it with the next weights to all workers: who decodes a request finds its tokens by its noise
(`run_ahead.py`). What was lost or came late costs drafts and nothing else.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from rljax.cluster.idle_work import ClusterSnapshot, WorkerParts
from rljax.cluster.messages import Command, Event, IdleEvent, IdleOrder
from rljax.config.cluster_keys import ClusterKeys
from rljax.engine.engine import DecodeEngine
from rljax.models.transformer import Params
from rljax.papers.srt.run_ahead import RunAhead
from rljax.requests import Completion, Request
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import open_loop, open_slots
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator

_RETRY = 5.0  # seconds without a word, after which a worker gets its requests again
_LOOKS, _WAIT = 3, 0.02  # times and seconds to wait for what workers have sampled while nobody listened


@dataclasses.dataclass(frozen=True)
class SampledAhead(IdleEvent):
    """What a worker has sampled ahead so far.

    Attributes:
      number: of the `SampleAhead`.
      tokens: of each of its requests.
      ended: whether no more is decoded.
    """

    number: int
    tokens: tuple[tuple[int, ...], ...]
    ended: bool


@dataclasses.dataclass(frozen=True)
class SampleAhead(IdleOrder):
    """Decode requests of a later step until there is something else to do.

    Attributes:
      number: of the order, ascending; a later one ends an earlier one.
      version: of the weights that the worker has to have.
      requests: those of one prompt together.
    """

    number: int
    version: int
    requests: tuple[Request, ...]


class AheadDriver:
    """The driver's part: see the module's docstring.

    Args:
      run_ahead: the driver's; it has what is upcoming, and gets what was sampled.
      slots: number of requests that a worker gets at a time.
    """

    def __init__(self, run_ahead: RunAhead, slots: int) -> None:
        self._run_ahead, self._slots = run_ahead, slots
        self._waiting: collections.deque[Request] = collections.deque()
        self._number = 0
        self._orders: dict[int, SampleAhead] = {}  # of the present plan
        self._tokens: dict[int, tuple[tuple[int, ...], ...]] = {}  # by number of the order
        self._at_work: dict[str, tuple[int, float]] = {}  # number of the order, and when it was last heard
        self._earlier: list[tuple[Request, tuple[int, ...], Completion | None]] = []  # of the plan before
        self._sampled = 0  # tokens since the last metrics
        self._changed = False  # whether there are tokens that `RunAhead` does not have

    def direct(self, snapshot: ClusterSnapshot, now: float) -> list[Command]:
        """Gives idle workers requests of steps that have not begun."""
        self._take_plan()
        known = (next(iter(each.requests.values()), None) for each in snapshot.rollouts.values())
        begun = max((request.step for request in known if request is not None), default=-1)
        if self._waiting and self._waiting[0].step <= begun:
            self._waiting.clear()
        self._at_work = {name: work for name, work in self._at_work.items() if name in snapshot.idle}
        commands: list[Command] = []
        for name, version in snapshot.idle.items():
            if name in self._at_work:
                number, heard = self._at_work[name]
                if now - heard < _RETRY:
                    continue
            elif self._waiting and version is not None:
                self._number = number = self._number + 1
                count = min(self._slots, len(self._waiting))
                requests = tuple(self._waiting.popleft() for _ in range(count))
                self._orders[number] = SampleAhead(name, number, version, requests)
            else:
                continue
            self._at_work[name] = number, now
            commands.append(self._orders[number])
        return commands

    def _take_plan(self) -> None:
        """Takes what is upcoming from `RunAhead`. What was sampled for the step before may still be needed:
        with staleness that step is decoded now.
        """
        if not self._run_ahead.upcoming:
            return
        self._earlier = self._samples()
        self._waiting = collections.deque(self._run_ahead.upcoming)
        self._run_ahead.upcoming = ()
        self._orders, self._tokens, self._at_work = {}, {}, {}

    def _samples(self) -> list[tuple[Request, tuple[int, ...], Completion | None]]:
        return [
            (request, tokens, None)
            for number, of_order in self._tokens.items()
            for request, tokens in zip(self._orders[number].requests, of_order, strict=True)
        ]

    def on(self, event: IdleEvent, now: float) -> list[Command]:
        """Takes the tokens that a worker has sampled ahead; they only get more."""
        if not isinstance(event, SampledAhead) or event.number not in self._orders:
            return []
        before = self._tokens.get(event.number, ((),) * len(event.tokens))
        longest = tuple(max(pair, key=len) for pair in zip(before, event.tokens, strict=True))
        grown = sum(map(len, longest)) - sum(map(len, before))
        if grown:
            self._tokens[event.number], self._changed = longest, True
            self._sampled += grown
        if self._at_work.get(event.worker, (0, 0.0))[0] == event.number:
            self._at_work[event.worker] = event.number, now
            if event.ended:
                del self._at_work[event.worker]
        return []

    def trains(self, worker: str) -> bool:
        """Timelines count a worker that samples ahead as idle."""
        return False

    def completed(self, order: IdleOrder) -> IdleOrder:
        """Returns the order as it is."""
        return order

    def finish(self, listen: Callable[[float], None]) -> None:
        """Listens for a moment: during an update nobody has."""
        for _ in range(_LOOKS if self._at_work else 0):
            listen(_WAIT)

    def adopt(self) -> bool:
        """Hands what was sampled to `RunAhead`, whose drafts are a part of `Speculator.weights`."""
        self._take_plan()
        changed, self._changed = self._changed, False
        if changed:
            self._run_ahead.keep(self._earlier + self._samples())
        return changed

    def metrics(self) -> dict[str, float]:
        """Returns the tokens sampled ahead since the last call, in place of those of the driver's slots."""
        sampled, self._sampled = self._sampled, 0
        return {"speculation/run_ahead_tokens": sampled}


class AheadWorker:
    """A worker's part: it decodes plainly, up to a host sync in every turn.

    Args:
      name: the worker's.
      engine: its engine.
    """

    def __init__(self, name: str, engine: DecodeEngine) -> None:
        self._name, self._engine = name, engine
        self._number = 0
        self._loop: DecodeLoop | None = None
        self._responses: list[LiveResponse] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is decoded ahead."""
        return self._loop is None

    def take(self, order: SampleAhead, params: Params | None, version: int | None) -> list[Event]:
        """Takes requests; those of an earlier order end."""
        if order.number == self._number:  # sent again
            return [self._report()]
        if order.number < self._number or order.version != version:
            return []
        self._number = order.number
        self._responses = [LiveResponse(request) for request in order.requests]
        slots = open_slots(self._engine, params, version=version)
        self._loop = open_loop(slots, self._engine.buckets.batch[-1], policy=LoopPolicy(start_full=True))
        self._loop.submit(self._responses)
        return []

    def stop(self) -> list[Event]:
        """Ends what goes on: the driver has all of it."""
        self._loop = None
        return []

    def work(self, params: Params, alone: bool) -> list[Event]:
        """Decodes up to the next host sync, unless other responses are decoded."""
        if self._loop is None or not alone:
            return []
        self._loop.step()
        if not self._loop.live:
            self._loop = None
        return [self._report()]

    def _report(self) -> SampledAhead:
        tokens = tuple(tuple(response.tokens) for response in self._responses)
        return SampledAhead(self._name, self._number, tokens, self._loop is None)


def make_driver(
    config: ClusterKeys, speculator: Speculator | NoDrafts, put: Callable[[Any], Any]
) -> AheadDriver | None:
    """Returns the driver's part; None without `speculation.run_ahead_below`. See `make_idle_work`."""
    idle = speculator.idle
    return AheadDriver(idle, speculator.engine.buckets.batch[-1]) if isinstance(idle, RunAhead) else None


def make_worker(parts: WorkerParts) -> AheadWorker | None:
    """Returns a worker's part; None without `speculation.run_ahead_below`."""
    if not isinstance(parts.speculator.idle, RunAhead):
        return None
    return AheadWorker(parts.name, parts.speculator.engine)
