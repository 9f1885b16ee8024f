"""Spot training: workers that have nothing to decode train the head that all of them draft with.

TLT, section 4.2. A worker is BUSY (it has requests, or is being given weights), IDLE, or TRAINING. Once
enough workers are idle in a rollout, the one that has been so for the longest leads a session: it updates the
head. The others prepare features of ended responses for it, by a forward pass of the policy; or they join,
each with a session of its own on other responses, and what comes of all of them is averaged. A session is
halted at once when its worker is needed or the rollout ends; another idle worker goes on with the head that
was saved last.

The part of the coordinator that decides this is here, as pure as the rest of it:

    commands = spot.direct(snapshot, now)     # after every event
    commands = spot.on(event, now)         # Prepared, Trained

A lost message costs data or time: what is not answered is sent again, what a worker computed and lost with
it is given to another one. No decision here can change a token, since drafts cannot.
"""

import collections
import dataclasses

from rljax.cluster.idle_work import ClusterSnapshot
from rljax.cluster.messages import Command, IdleEvent, Key, Sample
from rljax.cluster.rollouts import Rollout
from rljax.papers.tlt.messages import Prepare, Prepared, StopTraining, TrainDrafter, Trained, TrainingData


@dataclasses.dataclass(frozen=True)
class SpotRule:
    """When to train, and how much.

    Attributes:
      idle: number of idle workers from which a session begins.
      save_every: updates of the head between two times that it is saved.
      updates: most updates in a rollout; where joiners train, of each worker.
      tokens: most tokens of the samples of a rollout.
      batch_tokens: tokens of the samples that a worker prepares at a time, if there are several.
      every: trains only every so many steps.
      retry: seconds after which what is not answered is sent again.
      joiners_train: whether idle workers behind the first train, too, instead of preparing features for it.
    """

    idle: int
    save_every: int
    updates: int
    tokens: int
    batch_tokens: int
    every: int = 1
    retry: float = 5.0
    joiners_train: bool = False


@dataclasses.dataclass
class SpotCounts:
    """Counts of a run.

    Attributes:
      sessions: leaders so far, and those that joined them.
      moved: of those, sessions that went on with the head of another worker's in the same rollout.
      updates: of the head.
      samples: whose features were prepared, those that were prepared twice twice.
      joined: of those, prepared by workers that did not lead, or that train on them as joiners.
      seconds: of workers without requests, spent on updates and features.
      delay: seconds at most that work waited for an update or a forward pass.
    """

    sessions: int = 0
    moved: int = 0
    updates: int = 0
    samples: int = 0
    joined: int = 0
    seconds: float = 0.0
    delay: float = 0.0


@dataclasses.dataclass
class _Session:
    """A session of a leader, or of a worker that has joined one.

    Attributes:
      leader: the worker.
      rollout: number of the rollout in which it is.
      heard: when it last said something of the session, or was told something again.
      halted: whether it has been told to end.
      joins: whether there was a leader already.
      updates, seconds, delay: that have been counted of it.
    """

    leader: str
    rollout: int
    heard: float
    halted: bool = False
    joins: bool = False
    updates: int = 0
    seconds: float = 0.0
    delay: float = 0.0


@dataclasses.dataclass
class _Batch:
    """Samples that are prepared together.

    Attributes:
      samples: the samples.
      worker: who prepares, or has prepared them.
      since: when it was told.
      done: whether they are prepared.
      features: reference to the features; None where `worker` keeps them.
    """

    samples: tuple[Sample, ...]
    worker: str
    since: float
    done: bool = False
    features: object = None


class SpotTraining:
    """See the module's docstring.

    Args:
      rule: when to train, and how much.

    Attributes:
      rule: as above; it may be set before the first rollout.
      counts: see `SpotCounts`.
    """

    def __init__(self, rule: SpotRule) -> None:
        self.rule, self.counts = rule, SpotCounts()
        self._idle: list[str] = []  # those that have been so for the longest first
        self._sessions: dict[int, _Session] = {}  # that have not ended
        self._numbers = self._batch_numbers = 0
        self._rollout: Rollout | None = None
        self._taken: set[Key] = set()  # its responses that are samples
        self._seen = 0  # of its ended responses
        self._waiting: collections.deque[Sample] = collections.deque()  # of this rollout, for somebody
        self._batches: dict[int, _Batch] = {}
        self._tokens = self._leaders = 0  # of this rollout
        self._done: collections.Counter[str] = collections.Counter()  # its updates, by worker
        self._long: list[Sample] = []  # the longest of the last rollout that nobody has trained on

    # -- what others ask -------------------------------------------------------------------------------------

    @property
    def sessions_ended(self) -> bool:
        """Whether no session is in progress, or ends and has not said how far it went."""
        return not self._sessions

    @property
    def _live(self) -> dict[int, _Session]:
        """The sessions that have not been halted, by number."""
        return {number: each for number, each in self._sessions.items() if not each.halted}

    @property
    def leader(self) -> str | None:
        """The worker that trains the head; None for none."""
        return next((each.leader for each in self._live.values()), None)

    def trains(self, worker: str) -> bool:
        """Whether a worker leads, has joined, or prepares features."""
        leads = any(each.leader == worker for each in self._live.values())
        return leads or (self._rollout is not None and not self._free(worker))

    def takes(self, event: Trained) -> bool:
        """Whether an event is of a session that has not ended, and not older than what is known of it."""
        session = self._sessions.get(event.session)
        return session is not None and session.leader == event.worker and event.updates >= session.updates

    # -- events ----------------------------------------------------------------------------------------------

    def on(self, event: IdleEvent, now: float) -> list[Command]:
        """Takes what a worker says about its training."""
        if isinstance(event, Prepared):
            return self._prepared(event)
        assert isinstance(event, Trained)
        self._trained(event, now)
        return []

    def _prepared(self, event: Prepared) -> list[Command]:
        batch = self._batches.get(event.batch)
        if batch is None or batch.done or batch.worker != event.worker:
            return []
        batch.done, batch.features = True, event.features
        self.counts.samples += len(batch.samples)
        self.counts.seconds += event.seconds
        self.counts.delay += event.delay
        number, session = next(iter(self._live.items()), (0, None))
        own = next((each for each in self._sessions.values() if each.leader == event.worker), None)
        if own is not None:  # it keeps them
            self.counts.joined += len(batch.samples) * own.joins
            return []
        if session is None:
            return []
        self.counts.joined += len(batch.samples)
        return [TrainingData(session.leader, number, {event.batch: event.features})]

    def _trained(self, event: Trained, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.leader != event.worker:
            return
        session.heard = now
        new = max(event.updates - session.updates, 0)
        session.updates += new
        self._done[event.worker] += new
        self.counts.updates += new
        self.counts.seconds += max(event.seconds - session.seconds, 0.0)
        self.counts.delay += max(event.delay - session.delay, 0.0)
        session.seconds = max(event.seconds, session.seconds)
        session.delay = max(event.delay, session.delay)
        if not event.training:
            del self._sessions[event.session]

    # -- decisions -------------------------------------------------------------------------------------------

    def direct(self, snapshot: ClusterSnapshot, now: float) -> list[Command]:
        """Begins, feeds and halts sessions as the snapshot asks for."""
        self._idle = [name for name in self._idle if name in snapshot.idle]
        self._idle += [name for name in snapshot.idle if name not in self._idle]
        self._follow(snapshot)
        commands = self._halt(snapshot, now)
        if self._rollout is None:
            return commands
        self._collect(snapshot)
        able = [name for name in self._idle if snapshot.idle[name] == self._rollout.version]
        lasting = [name for name in able if self._left(name) > 0]
        has_data = bool(self._waiting or self._batches)
        if self.sessions_ended and lasting and has_data and len(able) >= self.rule.idle:
            commands += self._lead(lasting[0], now)
        live = self._live
        if not live:
            return commands
        for number, session in live.items():
            if now - session.heard >= self.rule.retry:
                session.heard = now
                commands += self._orders(number, session)
        leaders = [session.leader for session in live.values()]
        at_it = {session.leader for session in self._sessions.values()}
        others = [name for name in able if name not in at_it]
        if self.rule.joiners_train:
            commands += self._share(leaders, now)
            for name in others:
                if self._waiting and name in lasting:
                    commands += [*self._lead(name, now, joins=True), *self._share([name], now)]
        else:
            commands += self._share(others or leaders, now)
        return commands

    def _follow(self, snapshot: ClusterSnapshot) -> None:
        """Turns to the earliest rollout that has not ended, and keeps what was too late in the last one."""
        rollout = next((each for each in snapshot.rollouts.values() if not each.done), None)
        if rollout is not None and not self._trains_in(rollout):
            rollout = None
        if rollout is self._rollout:
            return
        if self._rollout is not None and snapshot.rollouts.get(self._rollout.number) is self._rollout:
            self._keep_long(self._rollout, snapshot)
        self._rollout = rollout
        if rollout is not None:
            self._taken, self._seen, self._batches = set(), 0, {}
            self._tokens = self._leaders = 0
            self._done.clear()
            self._waiting.clear()
            for sample in self._long:
                self._queue(sample)
            self._long = []

    def _trains_in(self, rollout: Rollout) -> bool:
        first = next((request for request in rollout.requests.values() if request.training), None)
        return first is not None and first.step % self.rule.every == 0

    def _keep_long(self, rollout: Rollout, snapshot: ClusterSnapshot) -> None:
        """A session sees the short responses of its rollout, which end first. So the next one begins with
        long responses of this one (TLT's one-step offset), for half of its tokens at most.
        """
        keys = [key for key in rollout.ended if key not in self._taken and rollout.requests[key].training]
        tokens = 0
        for sample in sorted((snapshot.sample(rollout, key) for key in keys), key=_length, reverse=True):
            tokens += _length(sample)
            if tokens > self.rule.tokens // 2:
                return
            self._long.append(sample)

    def _queue(self, sample: Sample) -> None:
        self._tokens += _length(sample)
        self._waiting.append(sample)

    def _collect(self, snapshot: ClusterSnapshot) -> None:
        """Takes responses that have ended, as far as there is room."""
        rollout = self._rollout
        while self._seen < len(rollout.ended) and self._tokens < self.rule.tokens:
            key = rollout.ended[self._seen]
            self._seen += 1
            if rollout.requests[key].training:
                self._taken.add(key)
                self._queue(snapshot.sample(rollout, key))

    def _halt(self, snapshot: ClusterSnapshot, now: float) -> list[Command]:
        """Halts sessions whose rollout has ended or whose leader is needed, asks those again that do not say
        how far they went, and forgets those of workers that are gone.
        """
        commands: list[Command] = []
        for number, session in list(self._sessions.items()):
            if session.leader not in snapshot.workers:
                del self._sessions[number]
                continue
            if session.halted:
                due = now - session.heard >= self.rule.retry
            else:
                due = self._rollout is None or session.rollout != self._rollout.number
                due = due or session.leader not in snapshot.idle
            if due:
                session.halted, session.heard = True, now
                commands.append(StopTraining(session.leader, number))
        return commands

    def _left(self, name: str) -> int:
        """Updates that a worker may still do in this rollout."""
        return self.rule.updates - (self._done[name] if self.rule.joiners_train else self._done.total())

    def _lead(self, name: str, now: float, joins: bool = False) -> list[Command]:
        self._numbers += 1
        self.counts.sessions += 1
        if not joins:
            self._leaders += 1
            self.counts.moved += self._leaders > 1
        session = _Session(name, self._rollout.number, now, joins=joins)
        self._sessions[self._numbers] = session
        keep = {each.leader for each in self._live.values() if each is not session}
        for batch in self._batches.values():  # what the last leader kept for itself is prepared again
            if batch.done and batch.features is None and batch.worker not in keep:
                batch.done, batch.worker = False, ""
        return self._orders(self._numbers, session)

    def _orders(self, number: int, session: _Session) -> list[Command]:
        """What a leader has to know. What of it comes again changes nothing."""
        left = self._left(session.leader) + session.updates
        lead = TrainDrafter(session.leader, number, self._rollout.version, left, self.rule.save_every)
        features = {
            batch_number: batch.features
            for batch_number, batch in self._batches.items()
            if batch.features is not None
        }
        return [lead, TrainingData(session.leader, number, features)] if features else [lead]

    def _share(self, members: list[str], now: float) -> list[Command]:
        """Gives samples to those who prepare: for the leader, or each for itself."""
        commands: list[Command] = []
        preparing = {*members, *(each.leader for each in self._live.values())}
        for number, batch in self._batches.items():
            if batch.done or (batch.worker in preparing and now - batch.since < self.rule.retry):
                continue
            free = next(filter(self._free, members), batch.worker if batch.worker in members else None)
            if free is not None:
                batch.worker, batch.since = free, now
                commands.append(Prepare(free, number, self._rollout.version, batch.samples))
        for name in filter(self._free, members):
            if self._waiting:
                self._batch_numbers += 1
                batch = _Batch(self._next_samples(), name, now)
                self._batches[self._batch_numbers] = batch
                commands.append(Prepare(name, self._batch_numbers, self._rollout.version, batch.samples))
        return commands

    def _free(self, name: str) -> bool:
        return not any(batch.worker == name and not batch.done for batch in self._batches.values())

    def _next_samples(self) -> tuple[Sample, ...]:
        samples = [self._waiting.popleft()]
        tokens = _length(samples[0])
        while self._waiting and tokens + _length(self._waiting[0]) <= self.rule.batch_tokens:
            samples.append(self._waiting.popleft())
            tokens += _length(samples[-1])
        return tuple(samples)


def _length(sample: Sample) -> int:
    prompt, response = sample
    return len(prompt) + len(response)
