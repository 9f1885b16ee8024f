"""What the collector calls instead of a `Scheduler` where workers decode: the driver's side of a cluster.

    cluster = ClusterDecoder(fabric, config.cluster, say)   # starts processes, and compares versions
    cluster.build(scheduler, config, policy, invariance)    # workers build and compile meanwhile
    completions, statistics = cluster.run(params, requests) # as `Scheduler.run`
    cluster.learn(outcomes)                                 # drafters of all workers learn what came of it

    begun = cluster.begin(params, requests, version=3)      # several rollouts may be in progress
    with cluster.listening():                               # workers go on while the trainer updates
        ...
    completions, statistics = cluster.finish(begun)

It carries out the coordinator's commands over a fabric, and publishes weights. The tokens are those that
`Scheduler.run` returns, bit for bit.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Outcome
from rljax import errors
from rljax.assembly.checkpoint import ROUTING
from rljax.assembly.policy import Policy
from rljax.cluster.blueprint import check_moves, check_shared, make_blueprint
from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.desired_workers import DesiredWorkersFile
from rljax.cluster.fabric import Fabric
from rljax.cluster.idle_work import IdleWork, make_idle_work
from rljax.cluster.messages import (
    Begin,
    Build,
    Command,
    DesiredWorkers,
    End,
    Facts,
    Fail,
    FetchFailed,
    IdleOrder,
    Key,
    Load,
    Pieces,
    Prefetch,
    Renew,
    Say,
    Spawn,
    Status,
    Stop,
    Tick,
    Weights,
)
from rljax.cluster.publisher import Publisher
from rljax.cluster.rollouts import Rollout
from rljax.cluster.routing import make_router, make_routings
from rljax.cluster.timeline import TRAINER, Timeline, described
from rljax.cluster.weights import make_channel
from rljax.cluster.weights.object_store import ObjectStore
from rljax.config import ExperimentConfig
from rljax.config.cluster import ClusterConfig
from rljax.engine.invariance import Invariance
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, PartialResponse, Request, accumulate, difference
from rljax.rollout.collector import OnFinished, OnProgress, Scheduler
from rljax.rollout.decode_loop import check_request
from rljax.rollout.running import RunningRequests

_WAIT = 0.2  # seconds for an event, at most
_SHORT_WAIT = 0.02  # while somebody may want to go on at any moment


@dataclasses.dataclass
class BegunRollout:
    """Requests that workers decode.

    Attributes:
      number: of the rollout in the coordinator.
      keys: of the requests, in their order.
      requests: the requests.
      params: the weights that they began with.
      began: `time.perf_counter()` then.
      running: number of running responses over time.
      handed_on: number of ended responses that were.
    """

    number: int
    keys: tuple[Key, ...]
    requests: Sequence[Request]
    params: Params
    began: float
    running: RunningRequests
    handed_on: int = 0


@dataclasses.dataclass
class _Sums:
    """Sums since the last metrics."""

    began: float
    busy: float = 0.0  # seconds of all workers
    rollout: float = 0.0  # seconds of rollouts times workers
    fetch: float = 0.0
    prefetched: int = 0  # workers


class ClusterDecoder:
    """See the module's docstring.

    Args:
      fabric: carries messages; `close` closes it.
      config: keys of the cluster.
      say: shows a line to the user.
      versions: versions of the weights that are kept.
      desired: says that another number of workers is desired than `cluster.workers`; None for never.

    Raises:
      ClusterError: of what is known at once.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: ClusterConfig,
        say: Callable[[str], None],
        versions: int = 2,
        desired: DesiredWorkersFile | None = None,
    ) -> None:
        self._fabric, self._say = fabric, say
        limits = Limits(config.lease_seconds, config.patience_seconds)
        strict = config.numerics == "refuse"
        self.coordinator = Coordinator(config.workers, Facts(), limits, strict=strict)
        self._scheduler: Scheduler | None = None
        self._blueprint: Any = None
        channel = make_channel(config, fabric.put)
        self._publisher = Publisher(channel, ObjectStore(fabric.put), versions)
        self._loads: dict[str, Load] = {}  # that wait for their version to be published
        self._failure: Exception | None = None  # of the thread that listens
        self._rollout = self._next_key = 0
        self._finished = 0.0  # when the last rollout was
        self._renewed: int | None = None  # the rollout whose responses go on under newer weights
        self._together: list[Begin] | None = None  # see `together`
        self._drafters: Any = None  # reference to the newest weights of those that are trained here
        self._outcomes: dict[int, Any] = {}  # references to lists of `Outcome`, by number
        self._num_outcomes = 0
        self._taught: dict[str, int] = {}  # number of these that each worker has
        self._sent: dict[str, tuple[Load, int]] = {}  # and those with what was sent last
        self._announced: dict[str, int] = {}  # the version that each worker has last copied to its host
        self._desired_file, self._timeline, self._decodes = desired, Timeline(fabric.now()), False
        self._routings = make_routings(config)
        self._idle_work: IdleWork | None = None
        self._sums = _Sums(time.perf_counter())
        self._counted = dataclasses.replace(self.coordinator.counts)

    # -- start and end -------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Starts the workers' processes, and waits until those that there is room for have come.

        Raises:
          ClusterError: one has another code or JAX, or none comes within `cluster.patience_seconds`.
        """
        while self.coordinator.arrived < min(self.coordinator.desired, max(self._fabric.room(), 1)):
            self.listen()

    def build(
        self,
        scheduler: Scheduler,
        config: ExperimentConfig,
        policy: Policy,
        invariance: Invariance | None,
        serves: bool = False,
    ) -> None:
        """Lets workers build their engines, which they do meanwhile.

        Args:
          scheduler: the driver's own, of which buckets, drafters and lengths are used.
          config: the experiment.
          policy: the policy; workers get its weights later.
          invariance: of the driver's numerics; None where it is not measured.
          serves: see `Blueprint`.

        Raises:
          ConfigError: a drafter cannot be trained for workers, or the task is an environment.
        """
        check_moves(scheduler)
        check_shared(scheduler.speculator)
        self._idle_work = make_idle_work(config.cluster, scheduler.speculator, self._fabric.put)
        self.coordinator.idle_work = self._idle_work
        self.coordinator.only_holders = scheduler.tools is not None
        self._scheduler, self._blueprint = scheduler, self._fabric.put(make_blueprint(config, policy, serves))
        self.coordinator.fingerprint = None if invariance is None else invariance.fingerprint
        self.coordinator.rollouts.router = make_router(
            config.cluster, self._routings, config.speculation, scheduler.max_slots
        )
        self._do(self.coordinator.build(self._fabric.now()))

    def wait(self) -> None:
        """Waits until every worker that there is has built its engine."""
        while not self.coordinator.ready or self.coordinator.ready < self.coordinator.arrived:
            self.listen()

    def close(self) -> None:
        """Ends all workers."""
        self._fabric.close()
        self._publisher.close()

    # -- rollouts ------------------------------------------------------------------------------------------

    def run(
        self,
        params: Params,
        requests: Sequence[Request],
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
        version: int = 0,
        partials: Mapping[int, PartialResponse] | None = None,
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Returns completions in the order of `requests`, and counts of the work; see `Scheduler.run`.

        Raises:
          ValueError: a request cannot fit.
          ClusterError: there has been no worker for `cluster.patience_seconds`.
          NumericsError: workers disagree about a token.
          UserError: what a worker raised.
        """
        begun = self.begin(params, requests, version, partials)
        return self.finish(begun, on_progress, on_finished)

    def begin(
        self,
        params: Params,
        requests: Sequence[Request],
        version: int,
        partials: Mapping[int, PartialResponse] | None = None,
        renewed: bool = False,
    ) -> BegunRollout:
        """Lets workers decode requests, and returns at once.

        Args:
          params: weights from `engine.load_params`; the arrays must stay as they are until a rollout with
            them is finished.
          requests: the requests.
          version: number of the weights: equal numbers are the same weights.
          partials: what is known of some responses already, by place.
          renewed: whether responses go on under newer weights (`renew`).

        Raises:
          ValueError: a request cannot fit.
        """
        for request in requests:
            check_request(request, self._scheduler.engine.buckets)
        self._publisher.publish(version, params)
        if self._finished:
            seconds = time.perf_counter() - self._finished
            for routing in self._routings:
                routing.trained(seconds)
            if self._idle_work is not None and not self.coordinator.rollouts.open:
                self._idle_work.finish(self.listen)
            self._adopt()
        lengths, first = self._scheduler.lengths, self._next_key
        self._next_key += len(requests)
        longest_first = sorted(
            range(len(requests)), key=lambda place: -lengths.expected(requests[place].prompt_ids)
        )
        by_key = {first + place: requests[place] for place in longest_first}
        known = {first + place: partial for place, partial in (partials or {}).items()}
        if renewed and self._renewed is not None:
            number = self._renewed
        else:
            self._rollout += 1
            number = self._rollout
            if renewed:
                self._renewed = number
        begin = Begin(number, version, by_key, renewed, known)
        if self._together is None:
            self._do(self.coordinator.on(begin, self._fabric.now()))
        else:
            self._together.append(begin)
        keys = tuple(range(first, first + len(requests)))
        return BegunRollout(number, keys, requests, params, time.perf_counter(), RunningRequests())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context in which `begin` adds to a rollout that is renewed. The coordinator gets all at its end, so
        that its router ranks the prompts of a step together.
        """
        begins = self._together = []
        try:
            yield
        finally:
            self._together = None
        if begins:
            requests = {key: request for begin in begins for key, request in begin.requests.items()}
            partials = {key: partial for begin in begins for key, partial in begin.partials.items()}
            whole = dataclasses.replace(begins[0], requests=requests, partials=partials)
            self._do(self.coordinator.on(whole, self._fabric.now()))

    @property
    def decoding(self) -> int:
        """Number of responses that workers decode."""
        return self.coordinator.decoding

    def renew(self, params: Params, version: int) -> None:
        """There are newer weights: what was begun as `renewed` goes on under them."""
        self._publisher.publish(version, params)
        self._do(self.coordinator.on(Renew(version), self._fabric.now()))

    def place(self, begun: BegunRollout) -> int | None:
        """Returns a number by which its end came before or after that of others of the same rollout; None
        while it is decoded.
        """
        if not self.ended(begun):
            return None
        ended = self.coordinator.rollouts.open[begun.number].ended
        return max(ended.index(key) for key in begun.keys)

    def ended(self, begun: BegunRollout) -> bool:
        """Whether all its responses have ended."""
        return all(self.coordinator.ledger[key].ending is not None for key in begun.keys)

    @property
    def parks(self) -> bool:
        """Whether groups of responses may be left to the next step."""
        return any(each.parks for each in self._routings)

    def outliers(self, begun: Sequence[BegunRollout]) -> list[int]:
        """Returns the places of those that may be left to the next step, where `parks`.

        Args:
          begun: groups of responses, a prompt each, of one step.
        """
        entries = [{key: self.coordinator.ledger[key] for key in each.keys} for each in begun]
        running = [
            {key: len(entry.tokens) for key, entry in of_group.items() if entry.ending is None}
            for of_group in entries
        ]
        prompts, sizes = [each.requests[0].prompt_ids for each in begun], [len(each.keys) for each in begun]
        routing = next(each for each in self._routings if each.parks)
        return routing.outliers(prompts, running, sizes, self.coordinator.desired)

    def finish(
        self,
        begun: BegunRollout,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Waits for a rollout's responses, and returns them as `run` does; raises as it does."""
        rollout = self.coordinator.rollouts.open[begun.number]
        self._tell(begun, on_finished)
        self._decodes = True
        while not self.ended(begun):
            self.listen()
            begun.running.add(self.decoding)
            self._tell(begun, on_finished)
            if on_progress is not None:
                on_progress(rollout.tokens, len(rollout.ended))
        self._decodes = False
        self._observe()
        self._timeline.count(self.coordinator.ledger, begun.keys)
        now = time.perf_counter()
        seconds = now - max(begun.began, self._finished)
        completions = [self._completion(key) for key in begun.keys]
        first, last = begun.keys[0], begun.keys[-1]
        places = [key - first for key in rollout.requests if first <= key <= last]
        self._timeline.handed_out(
            [begun.requests[place] for place in places], [completions[place] for place in places]
        )
        statistics = self._count(rollout, completions, seconds)
        self._finished = now
        statistics.running.append(begun.running.points())
        self._scheduler.speculator.learn_lengths(begun.requests, completions)
        trained_on = [
            (request.prompt_ids, completion.response_ids)
            for request, completion in zip(begun.requests, completions, strict=True)
            if request.training
        ]
        if trained_on:
            self._scheduler.speculator.read(begun.params, trained_on, seconds)
            self._adopt()
        for routing in self._routings:
            routing.learn(begun.requests, completions, rollout.statistics)
        self._do(self.coordinator.on(End(begun.number, begun.keys), self._fabric.now()))
        return completions, statistics

    def _adopt(self) -> None:
        """What came of workers' idle time is every worker's with its next weights."""
        if self._idle_work is not None and self._idle_work.adopt():
            self._drafters = None

    def release(self, number: int, keys: Sequence[Key]) -> None:
        """Forgets responses of a rollout, in the place of `finish`; those that have not ended are given up.

        Args:
          number: of the rollout.
          keys: of the requests.
        """
        self._do(self.coordinator.on(End(number, tuple(keys)), self._fabric.now()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which workers are listened to by another thread, while this one does something else. No
        other method may be called in it. What goes wrong meanwhile is raised by the next `finish`.
        """
        end = threading.Event()

        def listen() -> None:
            try:
                while not end.is_set():
                    self.listen(_SHORT_WAIT)
            except Exception as error:
                self._failure = error

        thread = threading.Thread(target=listen, name="listen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _tell(self, begun: BegunRollout, on_finished: OnFinished | None) -> None:
        """Hands on responses that have ended since the last call."""
        if on_finished is None:
            return
        ended = self.coordinator.rollouts.open[begun.number].ended
        for key in ended[begun.handed_on :]:
            on_finished(key - begun.keys[0], self._completion(key))
        begun.handed_on = len(ended)

    def _completion(self, key: Key) -> Completion:
        return self.coordinator.ledger[key].completion(self._scheduler.tools is not None)

    def _count(self, rollout: Rollout, completions: Sequence[Completion], seconds: float) -> DecodeStatistics:
        """Returns the counts of all workers. A token that two of them sampled is one."""
        statistics = DecodeStatistics()
        for name, (counts, busy) in rollout.statistics.items():
            before, busy_before = rollout.counted.get(name, (DecodeStatistics(), 0.0))
            accumulate(statistics, difference(counts, before))
            self._sums.busy += busy - busy_before
        rollout.counted = dict(rollout.statistics)
        statistics.tokens = sum(completion.sampled_tokens for completion in completions)
        self._sums.rollout += seconds * self.coordinator.ready
        self._sums.fetch = max(self._sums.fetch, self.coordinator.fetch_seconds)
        self._sums.prefetched = max(self._sums.prefetched, self.coordinator.prefetched)
        return statistics

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Shares rewarded responses with the drafters of all workers, which learn them with the next weights.
        The driver's own drafters, whose state checkpoints keep, must have learned them.
        """
        if not self._scheduler.speculator.drafters:
            return
        self._outcomes[self._num_outcomes] = self._fabric.put(list(outcomes))
        self._num_outcomes += 1
        self._drafters = None  # they have learned
        known = [self._taught[name] for name in self.coordinator.workers() if name in self._taught]
        for number in [number for number in self._outcomes if number < min(known, default=0)]:
            del self._outcomes[number]

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps: what decides who decodes what. `ROUTING` begins their
        names.
        """
        lengths = {} if self._scheduler.speculator.keeps_lengths else self._scheduler.lengths.state()
        arrays = {ROUTING + name: array for name, array in lengths.items()}
        for routing in self._routings:
            arrays |= routing.state()
        return arrays

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what `state` returned, before the first rollout."""
        for routing in self._routings:
            routing.load_state(state)
        if not self._scheduler.speculator.keeps_lengths:
            self._scheduler.lengths.load_state({name.removeprefix(ROUTING): state[name] for name in state})

    @property
    def doing(self) -> str:
        """A phrase on what the workers do, for the display."""
        return described(self.coordinator.states())

    def timeline(self) -> dict[str, Any]:
        """Returns what everyone has done since the last call; see `Timeline.take`."""
        self._observe()
        return self._timeline.take(self._fabric.now())

    def _observe(self) -> None:
        states = self.coordinator.states()
        if not self._decodes:  # nobody listens
            states = {name: "idle" if state == "loading" else state for name, state in states.items()}
        states[TRAINER] = "waiting" if self._decodes else "training"
        self._timeline.observe(states, self._fabric.now())

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call; see docs/cluster.md."""
        now, sums, counts = time.perf_counter(), self._sums, self.coordinator.counts
        workers = self.coordinator.ready
        metrics: dict[str, float] = {
            "cluster/workers": workers,
            "cluster/busy_share": min(sums.busy / max(sums.rollout, 1e-9), 1.0),
            "cluster/idle_share": max(1 - sums.busy / max(workers * (now - sums.began), 1e-9), 0.0),
            "cluster/publish_seconds": self._publisher.seconds,
            "cluster/fetch_seconds": sums.fetch,
            "cluster/prefetched": sums.prefetched,
            "cluster/pieces_late": counts.late - self._counted.late,
            "cluster/migrations": counts.migrations - self._counted.migrations,
            "cluster/restarts": counts.restarts - self._counted.restarts,
        }
        if not self.coordinator.strict:
            metrics["cluster/other_numerics"] = counts.other_numerics
            metrics["cluster/differences"] = self.coordinator.ledger.differences
        if self._idle_work is not None:
            metrics |= self._idle_work.metrics()
        self._sums, self._counted, self._publisher.seconds = _Sums(now), dataclasses.replace(counts), 0.0
        return metrics

    # -- weights -------------------------------------------------------------------------------------------

    def _deliver(self, load: Load) -> None:
        """Sends a worker what it needs for a version; later, where that is still being published."""
        name, version = load.worker, load.version
        sent = self._sent.get(name)
        if sent is not None and sent[0].version == version:  # the same again
            self._fabric.send(name, dataclasses.replace(sent[0], carry=load.carry))
            return
        weights = self._publisher.weights(name, version)
        if weights is None:
            self._loads[name] = load
            return
        whole = self._whole(load, weights)
        self._sent[name] = whole, self._num_outcomes
        self._fabric.send(name, whole)

    def _announce(self) -> None:
        """Lets workers that decode copy the newest weights to their hosts."""
        version = self._publisher.newest()
        if version is None:
            return
        behind = [
            name
            for name, (load, _) in self._sent.items()
            if load.version < version and self._announced.get(name) != version and name not in self._loads
        ]
        states = self.coordinator.states() if behind else {}
        for name in behind:
            if states.get(name) == "decoding":
                self._announced[name] = version
                self._fabric.send(name, Prefetch(name, self._publisher.weights(name, version)))

    def _whole(self, load: Load, weights: Weights) -> Load:
        """Returns an order to load weights, with what drafters have learned since the worker's last."""
        name = load.worker
        state, known = None, self._taught.get(name, self._num_outcomes)
        speculator = self._scheduler.speculator
        if speculator.drafters and name not in self._taught:
            state = self._fabric.put(speculator.state(to_share=True))
        if self._drafters is None:
            drafters = speculator.weights()
            self._drafters = self._fabric.put(drafters) if drafters else None
        outcomes = [self._outcomes[number] for number in range(known, self._num_outcomes)]
        return dataclasses.replace(
            load, weights=weights, state=state, outcomes=outcomes, drafters=self._drafters
        )

    # -- events and commands -------------------------------------------------------------------------------

    def listen(self, seconds: float = _WAIT) -> None:
        """Waits for events, and does what the coordinator wants done."""
        if self._failure is not None:
            raise self._failure
        loads, self._loads = self._loads, {}
        for load in loads.values():
            self._deliver(load)
        for event in self._fabric.receive(min(seconds, _SHORT_WAIT) if self._loads else seconds):
            if isinstance(event, Status) and event.worker in self._sent:
                load, outcomes = self._sent[event.worker]
                if event.version == load.version:
                    self._taught[event.worker] = outcomes
            if isinstance(event, FetchFailed):
                self._sent.pop(event.worker, None)
                self._publisher.failed(event.worker, event.version)
            if isinstance(event, Pieces):
                self._timeline.passes(event)
            self._do(self.coordinator.on(event, self._fabric.now()))
        workers = None if self._desired_file is None else self._desired_file.changed(self._fabric.now())
        if workers is not None:
            self._do(self.coordinator.on(DesiredWorkers(workers), self._fabric.now()))
        self._do(self.coordinator.on(Tick(), self._fabric.now()))
        self._announce()
        self._observe()

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Fail():
                    raise getattr(errors, command.kind, errors.UserError)(command.message)
                case Say():
                    self._say(command.message)
                case Spawn():
                    self._fabric.spawn(command.worker)
                case Stop():
                    self._fabric.stop(command.worker)
                    self._taught.pop(command.worker, None)
                    self._sent.pop(command.worker, None)
                    self._loads.pop(command.worker, None)
                    self._announced.pop(command.worker, None)
                case Build():
                    self._fabric.send(command.worker, Build(command.worker, self._blueprint))
                case Load():
                    self._deliver(command)
                case IdleOrder():
                    self._fabric.send(command.worker, self._idle_work.completed(command))
                case _:
                    self._fabric.send(command.worker, command)
