"""What the collector calls instead of a `Scheduler` where workers decode: the driver's side of a cluster.

    cluster = ClusterDecoder(fabric, config.cluster, say)   # starts processes, and compares versions
    cluster.build(scheduler, config, policy, invariance)    # workers build and compile meanwhile
    completions, statistics = cluster.run(params, requests) # as `Scheduler.run`
    cluster.learn(outcomes)                                 # drafters of all workers learn what came of it

It carries out the coordinator's commands over a fabric, and publishes weights. The tokens are those that
`Scheduler.run` returns, bit for bit.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from drafters.base import Outcome
from rljax import errors
from rljax.cluster.blueprint import check_shared, make_blueprint
from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.fabric import Fabric
from rljax.cluster.facts import facts
from rljax.cluster.messages import (
    Begin,
    Build,
    Command,
    Delivery,
    Fail,
    Key,
    Load,
    Plan,
    Say,
    Spawn,
    Status,
    Stop,
    Tick,
    Weights,
    Wish,
)
from rljax.cluster.timeline import TRAINER, Timeline, described
from rljax.cluster.weights import digest_of, parts_of, publish
from rljax.cluster.wish import WishFile
from rljax.config import ExperimentConfig
from rljax.config.cluster import ClusterConfig
from rljax.engine.invariance import Invariance
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, Request, accumulate
from rljax.rollout.decode_loop import check_request
from rljax.rollout.running import RunningRequests
from rljax.rollout.scheduler import OnFinished, OnProgress, Scheduler
from rljax.training.policy import Policy

_WAIT = 0.2  # seconds for an event, at most
_VERSIONS = 2  # of the weights that are kept


@dataclasses.dataclass
class _Sums:
    """Sums since the last metrics."""

    began: float
    busy: float = 0.0  # seconds of all workers
    rollout: float = 0.0  # seconds of rollouts times workers
    publish: float = 0.0
    fetch: float = 0.0


class ClusterDecoder:
    """See the module's docstring.

    Args:
      fabric: carries messages; `close` closes it.
      config: keys of the cluster.
      say: shows a line to the user.
      wish: says that another number of workers is wished for than `cluster.workers`; None for never.

    Raises:
      ClusterError: of what is known at once.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: ClusterConfig,
        say: Callable[[str], None],
        wish: WishFile | None = None,
    ) -> None:
        self._fabric, self._say = fabric, say
        limits = Limits(config.lease_seconds, config.patience_seconds)
        strict = config.numerics == "refuse"
        self.coordinator = Coordinator(config.workers, facts(), limits, strict=strict)
        self._scheduler: Scheduler | None = None
        self._blueprint: Any = None
        self._versions: dict[int, Weights] = {}
        self._rollout = self._next_key = 0
        self._drafters: Any = None  # reference to the newest weights of those that are trained here
        self._lessons: dict[int, Any] = {}  # references, by number
        self._num_lessons = 0
        self._taught: dict[str, int] = {}  # number of lessons that each worker has
        self._sent: dict[str, tuple[Delivery, int]] = {}  # and those with what was sent last
        self._wish, self._timeline, self._decodes = wish, Timeline(fabric.now()), False
        self._sums = _Sums(time.perf_counter())
        self._counted = dataclasses.replace(self.coordinator.counts)

    # -- start and end -------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts the workers' processes, and waits until those that there is room for have come.

        Raises:
          ClusterError: one has another code or JAX, or none comes within `cluster.patience_seconds`.
        """
        while self.coordinator.arrived < min(self.coordinator.wish, max(self._fabric.room(), 1)):
            self._listen()

    def build(
        self, scheduler: Scheduler, config: ExperimentConfig, policy: Policy, invariance: Invariance | None
    ) -> None:
        """Lets workers build their engines, which they do meanwhile.

        Args:
          scheduler: the driver's own, of which buckets, drafters and lengths are used.
          config: the experiment.
          policy: the policy; workers get its weights later.
          invariance: of the driver's numerics; None where it is not measured.

        Raises:
          ConfigError: a drafter cannot be trained for workers.
        """
        check_shared(scheduler.speculator)
        self.coordinator.only_holders = scheduler.tools is not None
        self._scheduler, self._blueprint = scheduler, self._fabric.put(make_blueprint(config, policy))
        self.coordinator.fingerprint = None if invariance is None else invariance.fingerprint
        self._do(self.coordinator.build(self._fabric.now()))

    def wait(self) -> None:
        """Waits until every worker that there is has built its engine."""
        while not self.coordinator.ready or self.coordinator.ready < self.coordinator.arrived:
            self._listen()

    def close(self) -> None:
        """Ends all workers."""
        self._fabric.close()

    # -- a rollout -----------------------------------------------------------------------------------------

    def run(
        self,
        params: Params,
        requests: Sequence[Request],
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Returns completions in the order of `requests`, and counts of the work; see `Scheduler.run`.

        Raises:
          ValueError: a request cannot fit.
          ClusterError: there has been no worker for `cluster.patience_seconds`.
          NumericsError: workers disagree about a token.
          UserError: what a worker raised.
        """
        for request in requests:
            check_request(request, self._scheduler.engine.buckets)
        coordinator, lengths = self.coordinator, self._scheduler.lengths
        version = self._publish(params)
        start = time.perf_counter()
        first, self._next_key = self._next_key, self._next_key + len(requests)
        longest_first = sorted(
            range(len(requests)), key=lambda place: -lengths.expected(requests[place].prompt_ids)
        )
        by_key = {first + place: requests[place] for place in longest_first}
        self._rollout += 1
        self._decodes = True
        running, told = RunningRequests(), 0
        self._do(coordinator.on(Begin(self._rollout, version, by_key), self._fabric.now()))
        while not coordinator.done:
            self._listen()
            running.add(coordinator.decoding)
            told = self._tell(told, first, on_finished)
            if on_progress is not None:
                on_progress(coordinator.ledger.tokens, len(coordinator.ended))
        self._decodes = False
        self._observe()
        self._timeline.count(coordinator.ledger)
        seconds = time.perf_counter() - start
        completions = [self._completion(first + place) for place in range(len(requests))]
        statistics = self._count(completions, seconds)
        statistics.running.append(running.points())
        self._scheduler.learn_lengths(requests, completions)
        trained_on = [
            (request.prompt_ids, completion.response_ids)
            for request, completion in zip(requests, completions, strict=True)
            if request.training
        ]
        if self._scheduler.speculator is not None and trained_on:
            self._scheduler.speculator.read(params, trained_on, seconds)
        return completions, statistics

    def _tell(self, told: int, first: Key, on_finished: OnFinished | None) -> int:
        """Hands on responses that have ended since the first `told`."""
        ended = self.coordinator.ended[told:]
        for key in ended:
            if on_finished is not None:
                on_finished(key - first, self._completion(key))
        return told + len(ended)

    def _completion(self, key: Key) -> Completion:
        return self.coordinator.ledger[key].completion(self._scheduler.tools is not None)

    def _count(self, completions: Sequence[Completion], seconds: float) -> DecodeStatistics:
        """Returns the counts of all workers. A token that two of them sampled is one."""
        statistics = DecodeStatistics()
        for counts, busy in self.coordinator.statistics.values():
            accumulate(statistics, counts)
            self._sums.busy += busy
        statistics.tokens = sum(completion.sampled_tokens for completion in completions)
        self._sums.rollout += seconds * self.coordinator.ready
        self._sums.fetch = max(self._sums.fetch, self.coordinator.fetch_seconds)
        return statistics

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Shares rewarded responses with the drafters of all workers, which learn them with the next weights.
        The driver's own drafters, whose state checkpoints keep, must have learned them.
        """
        if self._scheduler.speculator is None:
            return
        self._lessons[self._num_lessons] = self._fabric.put(list(outcomes))
        self._num_lessons += 1
        self._drafters = None  # they have learned
        known = [self._taught[name] for name in self.coordinator.workers() if name in self._taught]
        for number in [number for number in self._lessons if number < min(known, default=0)]:
            del self._lessons[number]

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
            "cluster/publish_seconds": sums.publish,
            "cluster/fetch_seconds": sums.fetch,
            "cluster/pieces_late": counts.late - self._counted.late,
            "cluster/migrations": counts.migrations - self._counted.migrations,
            "cluster/restarts": counts.restarts - self._counted.restarts,
        }
        if not self.coordinator.strict:
            metrics["cluster/other_numerics"] = counts.other_numerics
            metrics["cluster/differences"] = self.coordinator.ledger.differences
        self._sums, self._counted = _Sums(now), dataclasses.replace(counts)
        return metrics

    # -- weights -------------------------------------------------------------------------------------------

    def _publish(self, params: Params) -> int:
        """Returns the version of these weights, published now unless they are the last ones."""
        start = time.perf_counter()
        parts = parts_of(params)
        digest = digest_of(parts)
        last = max(self._versions, default=-1)
        if not self._versions or self._versions[last].digest != digest:
            last += 1
            self._versions[last] = publish(last, parts, digest, self._fabric.put)
            for version in [version for version in self._versions if version <= last - _VERSIONS]:
                del self._versions[version]
            self._sums.publish += time.perf_counter() - start
        return last

    def _delivery(self, name: str, version: int) -> Delivery:
        """Returns what a worker needs for a version; the same again if it is sent again."""
        sent = self._sent.get(name)
        if sent is not None and sent[0].weights.version == version:
            return sent[0]
        state, known = None, self._taught.get(name, self._num_lessons)
        if self._scheduler.speculator is not None and name not in self._taught:
            state = self._fabric.put(self._scheduler.speculator.state(to_share=True))
        if self._scheduler.speculator is not None and self._drafters is None:
            drafters = self._scheduler.speculator.weights()
            self._drafters = self._fabric.put(drafters) if drafters else None
        lessons = [self._lessons[number] for number in range(known, self._num_lessons)]
        delivery = Delivery(self._versions[version], state, lessons, self._drafters)
        self._sent[name] = delivery, self._num_lessons
        return delivery

    # -- events and commands -------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Waits for events, and does what the coordinator wants done."""
        for event in self._fabric.receive(_WAIT):
            if isinstance(event, Status) and event.worker in self._sent:
                delivery, lessons = self._sent[event.worker]
                if event.version == delivery.weights.version:
                    self._taught[event.worker] = lessons
            self._do(self.coordinator.on(event, self._fabric.now()))
        wished = None if self._wish is None else self._wish.changed(self._fabric.now())
        if wished is not None:
            self._do(self.coordinator.on(Wish(wished), self._fabric.now()))
        self._do(self.coordinator.on(Tick(), self._fabric.now()))
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
                case Build():
                    self._fabric.send(command.worker, Plan(self._blueprint))
                case Load():
                    self._fabric.send(command.worker, self._delivery(command.worker, command.version))
                case _:
                    self._fabric.send(command.worker, command)
