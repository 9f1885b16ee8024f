"""A cluster on a virtual clock.

It carries out the commands of the coordinator that runs use, with workers of which only times are computed.
The trainer and the order of steps are simulated here:

    order       step s is decoded with the weights of step      and begins when
    on-policy   s - 1                                           these are there
    one-off     s - 2                                           these are there, and rollout s - 1 has ended
    pipe        s - 2                                           these are there; a worker, when it is free

In a pipe two rollouts are in progress at once; a worker works on one of them at a time.
"""

import contextlib
import dataclasses
import gc
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from rljax.cluster import messages
from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.router import Router
from rljax.config.wing import part
from rljax.errors import ClusterError
from rljax.requests import Request
from rljax.simulation.costs import PassCosts
from rljax.simulation.drafting import LEVELS, Drafting
from rljax.simulation.ledger import CountingLedger
from rljax.simulation.worker import Job, SimulatedWorker

Order = Literal["on-policy", "one-off", "pipe"]

_FACTS = messages.Facts("", "")
_NO_KEY = np.zeros(2, np.uint32)
_NO_LIMITS = Limits(lease=math.inf, patience=math.inf, retry=math.inf)  # nothing is lost on the way


@dataclasses.dataclass(frozen=True)
class Response:
    """A response of a step.

    Attributes:
      prompt: number of the prompt.
      prompt_tokens: its tokens.
      tokens: tokens of the response.
      levels: level of acceptance of each drafter's drafts (`drafting.LEVELS`).
    """

    prompt: int
    prompt_tokens: int
    tokens: int
    levels: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machines:
    """What steps run on.

    Attributes:
      workers, slots, failures_per_hour, sync_seconds, look_seconds: see the keys of `Scenario`.
      costs: seconds of passes.
      drafting: how workers draft; None never drafts.
      train_seconds: time of an update, from the tokens of the step's responses.
      weight_seconds: from the end of an update until a worker has the weights.
      start_seconds: until a new worker has its engine, in place of a lost one.
      detect_seconds: until a failure is noticed.
      sync_passes: see `SimulatedWorker`.
      cores: that all workers share; infinity where each has its own.
      cores_of_worker: that a worker which decodes keeps busy, if it gets them.
      spot: `SpotTimes` of workers that train a head where they have nothing to decode; None for none.
      moved_seconds: of a token of a response that goes on elsewhere; see `SimulatedWorker`.
    """

    workers: int
    slots: int
    costs: PassCosts
    drafting: Drafting | None = None
    train_seconds: Callable[[int], float] = lambda tokens: 0.0
    weight_seconds: float = 0.0
    start_seconds: float = 60.0
    failures_per_hour: float = 0.0
    detect_seconds: float = 10.0
    sync_seconds: float = 0.0
    look_seconds: float = 5.0
    sync_passes: int = 0
    cores: float = math.inf
    cores_of_worker: float = 1.0
    spot: Any = None
    moved_seconds: float | None = None

    def slowdown(self, decoding: int) -> float:
        """Returns the factor by which passes take longer while so many workers decode."""
        return max(1.0, decoding * self.cores_of_worker / self.cores)


@dataclasses.dataclass
class StepTimes:
    """When the parts of a step were, in seconds.

    Attributes:
      begin: of the rollout.
      end: of the rollout.
      trained: end of the update.
      tokens: of all responses.
      migrations: responses that went on elsewhere.
    """

    begin: float = 0.0
    end: float = 0.0
    trained: float = 0.0
    tokens: int = 0
    migrations: int = 0


@dataclasses.dataclass
class Span:
    """A worker's time in which it decoded for a step without a pause.

    Attributes:
      worker: number of the worker.
      begin, end: seconds.
      step: number of the step.
      kind: "rollout", or "copy" for the drafter of a race.
    """

    worker: int
    begin: float
    end: float
    step: int
    kind: str = "rollout"


class _Place:
    """A worker as the fabric has it."""

    def __init__(self, number: int, worker: SimulatedWorker) -> None:
        self.number, self.worker = number, worker
        self.loads: int | None = None  # version that it waits for
        self.busy_since: float | None = None
        self.step = 0
        self.kind = "rollout"


class Cluster:
    """See the module's docstring.

    Args:
      machines: what steps run on.
      order: the order of steps.
      router: decides who decodes what.
      spans: whether to record when each worker decoded.
      seed: of failures.

    Attributes:
      steps: times of the steps, from the first.
      spans: see `Span`.
      now: seconds.
      places: the workers that are there, by name.
      failures: number of workers that were lost.
      events: number of events that coordinators took.
    """

    def __init__(
        self,
        machines: Machines,
        order: Order = "on-policy",
        router: Router | None = None,
        spans: bool = False,
        seed: int = 0,
    ) -> None:
        self.machines, self._order = machines, order
        self.steps: list[StepTimes] = []
        self.spans: list[Span] = []
        self.now, self.failures, self.events = 0.0, 0, 0
        self.lost_busy = 0.0
        self._record = spans
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._keys = itertools.count()
        self.places: dict[str, _Place] = {}
        self._free_numbers = list(range(machines.workers))[::-1]
        self._version = 0
        self._trained_steps = 0
        self._trainer_free = 0.0
        self._most_open = 2 if order == "pipe" else 1
        self._responses: dict[int, dict[messages.Key, Response]] = {}  # of the rollouts in progress
        self._counted_migrations = 0
        self._slow = 1.0
        self.coordinator = Coordinator(
            machines.workers, _FACTS, _NO_LIMITS, router=router, ledger=CountingLedger(strict=True)
        )
        self._spot: Any = None  # `SimulatedSpot`
        if machines.spot is not None:
            self.coordinator.idle_work = part("SpotTraining")(machines.spot.rule)
            self._spot = part("SimulatedSpot")(machines.spot, self._at, self._tell)
        self._mobile = self.coordinator.rollouts.router.mobile
        self._tell(messages.Tick())
        self.coordinator.building = True
        for name in list(self.places):
            self._tell(messages.Arrived(name, _FACTS))

    # -- time --------------------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._numbers), action, arguments))

    def run(self, steps: Iterator[Sequence[Response]], count: int) -> list[StepTimes]:
        """Runs steps, each with the responses that the iterator yields for it."""
        self._coming, self._count = steps, count
        with _without_garbage_collection():
            self._begin_next()
            while len(self.steps) < count or self.steps[-1].trained == 0.0:
                if not self._heap:
                    raise ClusterError("simulation: nothing happens any more, and a step has not ended")
                self.now, _, action, arguments = heapq.heappop(self._heap)
                action(*arguments)
        return self.steps

    # -- the order of steps ------------------------------------------------------------------------------

    def _needed(self, step: int) -> int:
        """The version of the weights that a step, counted from 1, is decoded with."""
        return step - 1 if self._order == "on-policy" else max(step - 2, 0)

    def _begin_next(self) -> None:
        """Begins the next rollout as far as its weights are there."""
        step = len(self.steps) + 1
        version = self._needed(step)
        if step > self._count or len(self._responses) >= self._most_open or self._version < version:
            return
        responses = {next(self._keys): response for response in next(self._coming)}
        requests = {
            key: Request((response.prompt,), _NO_KEY, response.tokens, step=step)
            for key, response in responses.items()
        }
        self._responses[step] = responses
        self.steps.append(StepTimes(self.now))
        self._tell(messages.Begin(step, version, requests))
        if self._mobile:
            self._at(self.now + self.machines.look_seconds, self._look, step)
        self._begin_next()

    def _rollout_ended(self, step: int) -> None:
        times, coordinator = self.steps[step - 1], self.coordinator
        times.end, times.tokens = self.now, coordinator.rollouts.open[step].tokens
        times.migrations = coordinator.counts.migrations - self._counted_migrations
        self._counted_migrations = coordinator.counts.migrations
        self._tell(messages.End(step, tuple(self._responses.pop(step))))
        self._train_next()
        self._begin_next()

    def _train_next(self) -> None:
        """Updates with the rollouts that have ended, in their order."""
        while self._trained_steps < len(self.steps) and self.steps[self._trained_steps].end:
            self._trained_steps += 1
            seconds = self.machines.train_seconds(self.steps[self._trained_steps - 1].tokens)
            self._trainer_free = max(self.now, self._trainer_free) + seconds
            self._at(self._trainer_free, self._trained, self._trained_steps)

    def _trained(self, step: int) -> None:
        self.steps[step - 1].trained = self.now
        self._at(self.now + self.machines.weight_seconds, self._published, step)

    def _published(self, version: int) -> None:
        self._version = version
        for place in list(self.places.values()):
            self._load(place)
        self._begin_next()

    # -- workers -----------------------------------------------------------------------------------------

    def _spawn(self, name: str) -> None:
        machines = self.machines
        worker = SimulatedWorker(
            name,
            machines.slots,
            machines.costs,
            machines.drafting,
            machines.sync_passes,
            machines.moved_seconds,
        )
        worker.slow(self._slow, self.now)
        place = _Place(self._free_numbers.pop(), worker)
        self.places[name] = place
        if machines.failures_per_hour:
            hours = self._random.expovariate(machines.failures_per_hour)
            self._at(self.now + 3600 * hours, self._fail, name)
        if self.coordinator.building:  # those that a run begins with are there
            self._at(self.now + machines.start_seconds, self._arrive, name)

    def _arrive(self, name: str) -> None:
        if name in self.places:
            self._tell(messages.Arrived(name, _FACTS))

    def _fail(self, name: str) -> None:
        place = self.places.pop(name, None)
        if place is None:
            return
        self.failures += 1
        place.worker.advance(self.now)
        self._span_ends(place)
        self.lost_busy += place.worker.busy
        if self._spot is not None:
            self._spot.lost(name)
        self._free_numbers.append(place.number)
        self._at(self.now + self.machines.detect_seconds, self._noticed, name)

    def _noticed(self, name: str) -> None:
        self._tell(messages.Died(name, "it failed"))
        if self.coordinator.next_start > self.now:
            self._at(self.coordinator.next_start, self._tell, messages.Tick())

    def _load(self, place: _Place) -> None:
        """A worker takes the weights that it waits for, once they are there."""
        version = place.loads
        if version is not None and version <= self._version:
            place.loads = None
            self._tell(messages.Status(place.worker.name, None, place.worker.slots, version))

    # -- messages ------------------------------------------------------------------------------------------

    def _tell(self, event: Any) -> None:
        self.events += 1
        for command in self.coordinator.on(event, self.now):
            self._do(command)
        if isinstance(event, messages.Pieces):
            rollout = self.coordinator.rollouts.open.get(event.rollout)
            if rollout is not None and rollout.done:
                self._rollout_ended(event.rollout)

    def _do(self, command: messages.Command) -> None:
        match command:
            case messages.Decode():
                self._decode(command)
            case messages.Withdraw():
                self._withdraw(command)
            case messages.Load():
                place = self.places.get(command.worker)
                if place is not None:
                    place.loads = command.version
                    if self._spot is not None:
                        self._spot.stop(command.worker, self.now)
                    self._load(place)
            case messages.Spawn():
                self._spawn(command.worker)
            case messages.Build():
                place = self.places.get(command.worker)
                if place is not None:
                    self._tell(messages.Status(command.worker, None, place.worker.slots, None))
            case messages.IdleOrder():
                if command.worker in self.places:
                    self._spot.take(command, self.now)
            case messages.Fail():
                raise ClusterError(command.message)
            case messages.Ask() | messages.Say() | messages.Stop():
                pass

    def _decode(self, command: messages.Decode) -> None:
        place = self.places.get(command.worker)
        if place is None:
            return
        if command.drafter is not None:
            place.worker.use(command.drafter, self.now)
        elif place.step != command.rollout:  # a copy's drafter is that of its rollout alone
            place.worker.use_first(self.now)
        worker, jobs, responses = place.worker, [], self._responses[command.rollout]
        for key, _, partial in command.work:
            response, begin = responses[key], len(partial.tokens)
            known = worker.jobs.get(key)
            if known is not None:
                worker.advance(self.now)
                if worker.tokens(known) >= begin:
                    continue
                worker.remove([key], self.now)
            jobs.append(
                Job(
                    key,
                    command.rollout,
                    response.tokens,
                    begin,
                    response.prompt_tokens,
                    response.prompt,
                    response.levels,
                    sent=begin,
                )
            )
        if jobs:
            if place.busy_since is None or place.step != command.rollout:
                self._span_ends(place)
                place.busy_since, place.step = self.now, command.rollout
                place.kind = "rollout" if command.drafter is None else "copy"
            self._share_cores()
            if self._spot is not None:
                worker.pause(self._spot.stop(worker.name, self.now))
            worker.add(jobs, self.now)
            self._schedule(place)

    def _withdraw(self, command: messages.Withdraw) -> None:
        place = self.places.get(command.worker)
        if place is not None:
            place.worker.remove(list(command.keys), self.now)
            self._schedule(place)
            if not place.worker:
                self._span_ends(place)

    def _share_cores(self) -> None:
        """Workers that decode share the cores evenly."""
        if self.machines.cores == math.inf:
            return
        slow = self.machines.slowdown(sum(place.busy_since is not None for place in self.places.values()))
        if slow != self._slow:
            self._slow = slow
            for place in self.places.values():
                place.worker.slow(slow, self.now)
                self._schedule(place)

    def _schedule(self, place: _Place) -> None:
        """Notes when the next response of a worker ends."""
        end = place.worker.next_end()
        if end == math.inf:
            return
        sync = self.machines.sync_seconds
        if sync:
            end = math.ceil(end / sync - 1e-9) * sync
        self._at(max(end, self.now), self._ends, place, place.worker.generation)

    def _ends(self, place: _Place, generation: int) -> None:
        worker = place.worker
        if worker.generation != generation or self.places.get(worker.name) is not place:
            return
        done = worker.ended(self.now)
        if not worker:
            self._span_ends(place)
        generation = worker.generation
        pieces: dict[int, list[messages.Piece]] = {}
        for job in done:
            tokens: Any = range(job.sent, job.total)
            piece = messages.Piece(job.key, self._needed(job.rollout), job.sent, tokens, tokens, "eos")
            pieces.setdefault(job.rollout, []).append(piece)
        for rollout, ended in pieces.items():
            self._tell(messages.Pieces(worker.name, rollout, tuple(ended)))
        if worker.generation == generation:
            self._schedule(place)

    def _look(self, step: int) -> None:
        """All workers report what is in progress, and the router may move it."""
        version = self._needed(step)
        for place in list(self.places.values()):
            worker, pieces = place.worker, []
            worker.advance(self.now)
            for job in worker.jobs.values():
                tokens = worker.tokens(job)
                if job.rollout == step and tokens > job.sent:
                    new: Any = range(job.sent, tokens)
                    drafted = LEVELS if job.levels else 0
                    pieces.append(
                        messages.Piece(job.key, version, job.sent, new, new, None, drafted, job.level)
                    )
                    job.sent = tokens
            if pieces:
                self._tell(messages.Pieces(worker.name, step, tuple(pieces)))
        if step in self._responses:
            self._tell(messages.Tick())
            self._at(self.now + self.machines.look_seconds, self._look, step)

    # -- what is reported ------------------------------------------------------------------------------------

    def _span_ends(self, place: _Place) -> None:
        if place.busy_since is not None and self._record and self.now > place.busy_since:
            self.spans.append(Span(place.number, place.busy_since, self.now, place.step, place.kind))
        place.busy_since, place.kind = None, "rollout"
        self._share_cores()

    def busy_seconds(self) -> list[float]:
        """Seconds that each worker has decoded, by place; without those of workers that were lost."""
        by_number = {place.number: place.worker.busy for place in self.places.values()}
        return [by_number.get(number, 0.0) for number in range(self.machines.workers)]


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Context of millions of small objects, none of which is in a cycle: looking for one took a sixth of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
