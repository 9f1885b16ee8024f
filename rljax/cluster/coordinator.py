"""The coordinator: which worker decodes what, and what happens when one is lost.

    commands = coordinator.on(event, now)

A pure state machine: no Ray, JAX, thread, clock or randomness of its own, so that tests and simulations drive
it by hand. A worker's life:

    Spawn -> Arrived -> Build -> Status -> Load -> Status with the version -> Decode -> Pieces

Nothing that it decides can change a token (`ledger.py`), except of rollouts that are `renewed`. What a worker
does not confirm is sent again; a worker that is silent for longer than its lease is given up, and its
requests go on elsewhere from the tokens in the ledger. A lost worker's name is never used again. Several
rollouts may be in progress (`rollouts.py`).
"""

import dataclasses
from collections.abc import Sequence

from rljax.cluster.idle_work import ClusterSnapshot, IdleWork
from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Begin,
    Build,
    Command,
    Decode,
    DesiredWorkers,
    Died,
    End,
    Event,
    Facts,
    Fail,
    Failed,
    FetchFailed,
    Heard,
    IdleEvent,
    Key,
    Load,
    Piece,
    Pieces,
    Renew,
    Sample,
    Say,
    Spawn,
    Status,
    Stop,
    Tick,
    UnknownRequests,
    Withdraw,
)
from rljax.cluster.rollouts import Rollout, Rollouts
from rljax.cluster.router import QueueState, Router, SharedQueue, WorkerLoad
from rljax.errors import NumericsError

_MOST_BACKOFF = 30.0  # seconds between two starts of workers that end at once
_MOST_FETCHES = 3  # failed fetches of one version, after which a worker is given up


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds.

    Attributes:
      lease: of silence after which a worker counts as lost.
      patience: without a sign of life from any worker after which the run ends.
      retry: after which what is not confirmed is sent again.
    """

    lease: float = 10.0
    patience: float = 120.0
    retry: float = 5.0


@dataclasses.dataclass
class _Worker:
    """A worker that is not lost.

    Attributes:
      heard: when it last gave a sign of life, or was started.
      ordered: when it was last asked to build or to load.
      wants: the version that it was last asked to load.
      rollout: number of the rollout that it works on; that of all its requests.
      holds: its requests, with the time of the last progress or question.
      more: whether it believes that further requests may follow.
      useful: whether it has ever sent a token.
    """

    heard: float
    ordered: float
    arrived: bool = False
    slots: int = 0
    version: int | None = None
    wants: int | None = None
    rollout: int = 0
    holds: dict[Key, float] = dataclasses.field(default_factory=dict)
    more: bool = False
    useful: bool = False
    fetch_failures: int = 0
    fetch_seconds: float = 0.0
    prefetched: bool = False


@dataclasses.dataclass
class Counts:
    """Counts of a session.

    Attributes:
      late: pieces that brought nothing new: doubled, of a lost worker, or of an earlier rollout.
      migrations: requests that went on on another worker.
      restarts: workers that were lost.
      other_numerics: workers that were admitted although their numerics differ.
    """

    late: int = 0
    migrations: int = 0
    restarts: int = 0
    other_numerics: int = 0


class Coordinator:
    """See the module's docstring.

    Args:
      desired: number of workers to keep running.
      facts: the driver's, which a worker's must equal.
      limits: see `Limits`.
      fingerprint: of the driver's numerics; None where it is not measured. It may be set until the first
        `Build` is answered.
      strict: refuses workers with another fingerprint; False admits them and counts differing tokens.
      router: decides which worker decodes what.
      ledger: keeps what has been sampled; a simulation's only counts it.

    Attributes:
      ledger: what has been sampled.
      counts: see `Counts`.
      rollouts: those in progress.
      building: whether workers that arrive are asked to build.
      ready: number of workers that have their engine.
      next_start: time before which no further worker is started, since several have ended at once.
      idle_work: lets workers without requests do something else; None for never.
      only_holders: takes tokens only from workers that hold the request. Set it where tools may be called: a
        tool that is asked again, elsewhere, may answer something else.
    """

    def __init__(
        self,
        desired: int,
        facts: Facts,
        limits: Limits = Limits(),
        fingerprint: str | None = None,
        strict: bool = True,
        router: Router | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.desired, self.facts, self.limits = desired, facts, limits
        self.fingerprint, self.strict = fingerprint, strict
        self.ledger, self.counts = Ledger(strict) if ledger is None else ledger, Counts()
        self.rollouts = Rollouts(SharedQueue() if router is None else router)
        self.building = self.only_holders = False
        self.ready, self.next_start = 0, 0.0
        self.idle_work: IdleWork | None = None
        self._workers: dict[str, _Worker] = {}
        self._started = self._orders = 0
        self._losses_in_a_row = 0  # of workers, without a token between them
        self._last_reason = ""
        self._last_heard: float | None = None  # when any worker was
        self._holders: dict[Key, list[str]] = {}  # workers that decode a request, the first one first
        self._reached: dict[tuple[Key, str], int] = {}  # tokens that each has, of requests with several
        self._drafts: dict[Key, dict[str, tuple[int, int]]] = {}  # drafted and accepted ones, by worker
        self._moved: set[Key] = set()

    # -- what the driver asks ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every request of every rollout has ended."""
        return all(rollout.done for rollout in self.rollouts.open.values())

    @property
    def arrived(self) -> int:
        """Workers whose process runs."""
        return sum(worker.arrived for worker in self._workers.values())

    @property
    def decoding(self) -> int:
        """Requests that are in a worker's slots."""
        return sum(min(len(worker.holds), worker.slots) for worker in self._workers.values())

    @property
    def fetch_seconds(self) -> float:
        """Time that the slowest worker took to fetch the weights that it has."""
        return max((worker.fetch_seconds for worker in self._workers.values()), default=0.0)

    @property
    def prefetched(self) -> int:
        """Number of workers that began to copy their weights to the host while older ones decoded."""
        return sum(worker.prefetched for worker in self._workers.values())

    def workers(self) -> list[str]:
        """Names of the workers that are not lost."""
        return list(self._workers)

    def states(self) -> dict[str, str]:
        """What each of them does: a state of `timeline.py`."""
        states = {}
        for name, worker in self._workers.items():
            if not worker.slots:
                states[name] = "starting"
            elif worker.wants is not None and worker.version != worker.wants:
                states[name] = "loading"
            elif worker.holds:
                states[name] = "decoding"
            else:
                trains = self.idle_work is not None and self.idle_work.trains(name)
                states[name] = "training" if trains else "idle"
        return states

    # -- the machine ---------------------------------------------------------------------------------------

    def on(self, event: Event, now: float) -> list[Command]:
        """Takes an event at a time in seconds, and returns what is to be done."""
        commands = self._take(event, now)
        if self.idle_work is None or isinstance(event, Heard):
            return commands
        return commands + self.idle_work.direct(self._snapshot(), now)

    def _take(self, event: Event, now: float) -> list[Command]:
        if self._last_heard is None:
            self._last_heard = now
        if isinstance(event, Begin):
            return self._begin(event, now)
        if isinstance(event, End):
            return self._end(event)
        if isinstance(event, Renew):
            self.rollouts.renew(event.version)
            return self._direct(list(self._workers), now)
        if isinstance(event, Tick):
            return self._tick(now)
        if isinstance(event, DesiredWorkers):
            return self._keep(event.workers, now)
        worker = self._workers.get(event.worker)
        if isinstance(event, Pieces):
            return self._pieces(event, worker, now)
        if worker is None:
            return []
        if isinstance(event, Died):
            return self._lose(event.worker, event.reason, now)
        worker.heard = self._last_heard = now
        if isinstance(event, Arrived):
            return self._arrived(event, worker, now)
        if isinstance(event, Status):
            return self._status(event, worker, now)
        if isinstance(event, UnknownRequests):
            return self._unknown(event, worker, now)
        if isinstance(event, FetchFailed):
            return self._fetch_failed(event, worker, now)
        if isinstance(event, Failed):
            return [Fail(event.kind, event.message)]
        if isinstance(event, IdleEvent):
            return [] if self.idle_work is None else self.idle_work.on(event, now)
        assert isinstance(event, Heard)
        return []

    def build(self, now: float) -> list[Command]:
        """Workers may build: what they are built from is known."""
        self.building = True
        arrived = [(name, worker) for name, worker in self._workers.items() if worker.arrived]
        for _, worker in arrived:
            worker.ordered = now
        return [Build(name) for name, _ in arrived]

    # -- a worker's life -----------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, worker: _Worker, now: float) -> list[Command]:
        for what, theirs, ours in (
            ("JAX", event.facts.jax, self.facts.jax),
            ("code of rljax", event.facts.code, self.facts.code),
        ):
            if theirs != ours:
                message = (
                    f"cluster: the worker on {event.facts.host} has another {what} ({theirs}) than this"
                    f" process ({ours}); install the same on all machines"
                )
                return [Fail("ClusterError", message)]
        if worker.arrived or not self.building:
            worker.arrived = True
            return []
        worker.arrived, worker.ordered = True, now
        return [Build(event.worker)]

    def _status(self, event: Status, worker: _Worker, now: float) -> list[Command]:
        worker.arrived = True
        measured = None not in (event.fingerprint, self.fingerprint)  # on a mesh they are not
        if not worker.slots and measured and event.fingerprint != self.fingerprint:
            if self.strict:
                return self._refuse(event)
            self.counts.other_numerics += 1
        self.ready += not worker.slots
        worker.slots = event.slots
        if event.version is not None:  # one that comes late is set right by the next
            worker.version, worker.fetch_seconds = event.version, event.fetch_seconds
            worker.prefetched = event.prefetched
        return self._direct([event.worker], now)

    def _refuse(self, event: Status) -> list[Command]:
        """A worker computes other bits: it is not used, nor another one in its place."""
        del self._workers[event.worker]
        self.desired -= 1
        line = (
            f"cluster: {event.worker} is refused: its numerics have the fingerprint {event.fingerprint}, here"
            f" it is {self.fingerprint}; use one kind of processor, or set cluster.numerics=warn"
        )
        if not self.desired:
            return [Stop(event.worker), Fail("NumericsError", line)]
        return [Stop(event.worker), Say(line)]

    def _load(self, name: str, worker: _Worker, version: int, now: float) -> Load:
        if worker.wants != version:
            worker.fetch_failures = 0
        worker.ordered, worker.wants = now, version
        carry = bool(worker.holds) and self.rollouts.open[worker.rollout].renewed
        return Load(name, version, carry)

    def _fetch_failed(self, event: FetchFailed, worker: _Worker, now: float) -> list[Command]:
        if event.version != worker.wants or worker.version == worker.wants:
            return []
        worker.fetch_failures += 1
        if worker.fetch_failures >= _MOST_FETCHES:
            return self._lose(event.worker, event.reason, now)
        return [self._load(event.worker, worker, worker.wants, now)]

    def _lose(self, name: str, reason: str, now: float) -> list[Command]:
        """Gives a worker up; its requests wait first."""
        worker = self._workers.pop(name)
        self.ready -= worker.slots > 0
        self.counts.restarts += 1
        self._last_reason = reason
        self._losses_in_a_row = 0 if worker.useful else self._losses_in_a_row + 1
        if self._losses_in_a_row > 2 * self.desired + 2:
            return [
                Stop(name),
                Fail(
                    "ClusterError",
                    f"cluster: {self._losses_in_a_row} workers in a row ended before they decoded anything,"
                    f" the last because {reason}",
                ),
            ]
        if self._losses_in_a_row:
            self.next_start = max(self.next_start, now + min(2.0**self._losses_in_a_row, _MOST_BACKOFF))
        commands: list[Command] = [Stop(name), Say(f"cluster: {name} is lost: {reason}")]
        self._take_back(name, worker)
        return commands + self._start(now) + self._direct(list(self._workers), now)

    def _take_back(self, name: str, worker: _Worker) -> None:
        """The requests of a worker that is gone wait first."""
        keys = []
        for key in worker.holds:
            holders = self._holders[key]
            holders.remove(name)
            if not holders:
                del self._holders[key]
                keys.append(key)
        self._moved.update(keys)
        self.rollouts.leave(name)
        for number, lost in self.rollouts.by_rollout(keys).items():
            self.rollouts.open[number].router.put_back(lost)

    def _keep(self, workers: int, now: float) -> list[Command]:
        """Keeps another number of workers: starts some, or lets go of those that have done least, the newest
        first.
        """
        self.desired, commands = workers, []
        newest_first = list(self._workers)[::-1]
        least = sorted(newest_first, key=lambda name: bool(self._workers[name].slots))
        for name in least[: max(len(self._workers) - workers, 0)]:
            worker = self._workers.pop(name)
            self.ready -= worker.slots > 0
            self._take_back(name, worker)
            commands += [Stop(name), Say(f"cluster: {name} is let go")]
        return commands + self._start(now) + self._direct(list(self._workers), now)

    def _start(self, now: float) -> list[Command]:
        """Starts workers as far as some are missing."""
        commands: list[Command] = []
        while len(self._workers) < self.desired and now >= self.next_start:
            name = f"worker-{self._started}"
            self._started += 1
            self._workers[name] = _Worker(now, now)
            commands.append(Spawn(name))
        return commands

    # -- rollouts ------------------------------------------------------------------------------------------

    def _begin(self, event: Begin, now: float) -> list[Command]:
        self.ledger.open(event.requests, event.version, event.renewed, event.partials)
        self.rollouts.begin(event)
        self._last_heard = now
        for worker in self._workers.values():
            worker.heard = now  # nobody may have listened for a while
        return self._direct(list(self._workers), now)

    def _end(self, event: End) -> list[Command]:
        rollout, unwanted = self.rollouts.open[event.rollout], {}
        commands: list[Command] = []
        for key in event.keys:
            entry = self.ledger[key]
            if entry.ending is None:  # nobody waits for it any more
                commands += self._finish(key, "")
            elif rollout.renewed:  # in a rollout without end its worker would keep it
                unwanted.setdefault(entry.ended_by, []).append(key)
        commands += [
            Withdraw(name, rollout.number, tuple(keys))
            for name, keys in unwanted.items()
            if name in self._workers
        ]
        self.rollouts.forget(event.rollout, event.keys)
        self.ledger.close(event.keys)
        self._moved.difference_update(event.keys)
        for key in event.keys:
            self._drafts.pop(key, None)
        return commands

    def _pieces(self, event: Pieces, worker: _Worker | None, now: float) -> list[Command]:
        if worker is not None:
            worker.heard = self._last_heard = now
        rollout = self.rollouts.open.get(event.rollout)
        if rollout is not None and event.statistics is not None:
            known = rollout.statistics.get(event.worker)
            if known is None or event.statistics.host_syncs >= known[0].host_syncs:
                rollout.statistics[event.worker] = event.statistics, event.busy_seconds
        commands: list[Command] = []
        gaps, ended = [], False
        for piece in event.pieces:
            entry = self.ledger.entries.get(piece.key)
            holds = worker is not None and piece.key in worker.holds
            if entry is None or not entry.takes(piece) or (self.only_holders and not holds):
                self.counts.late += 1
                continue
            begun = entry.ending is None
            try:
                grown = self.ledger.add(event.worker, piece)
            except NumericsError as error:
                return [Fail("NumericsError", str(error))]
            self.rollouts.of(piece.key).tokens += grown
            if not grown and not self.ledger.has_gap(piece.key) and begun == (entry.ending is None):
                self.counts.late += bool(piece.tokens)
            if grown and worker is not None:
                worker.useful, self._losses_in_a_row = True, 0
            if holds:
                worker.holds[piece.key] = now
                if self.ledger.has_gap(piece.key):
                    gaps.append((piece.key, len(entry.tokens)))
            if holds:
                self._drafts.setdefault(piece.key, {})[event.worker] = piece.drafted, piece.accepted
            if begun and entry.ending is not None:
                commands += self._finish(piece.key, event.worker)
                ended = True
            elif holds and len(self._holders[piece.key]) > 1:
                commands += self._catch_up(event.worker, piece, now)
        if gaps:
            commands.append(self._ask(event.worker, worker, tuple(gaps)))
        if ended and worker is not None:
            commands += self._direct([event.worker], now)
            if not worker.holds:
                commands += self._rearrange(now)
        return commands

    def _finish(self, key: Key, by: str) -> list[Command]:
        """A request has ended: copies of it are of no more use."""
        rollout = self.rollouts.of(key)
        rollout.unfinished -= 1
        rollout.ended.append(key)
        holders = self._holders.pop(key, [])
        if not holders:  # a lost worker's last piece came late
            rollout.router.discard(key)
        for name in holders:
            del self._workers[name].holds[key]
            self._reached.pop((key, name), None)
        return [Withdraw(name, rollout.number, (key,)) for name in holders if name != by]

    def _unknown(self, event: UnknownRequests, worker: _Worker, now: float) -> list[Command]:
        rollout = self.rollouts.open.get(event.rollout)
        if rollout is None or worker.rollout != event.rollout or worker.version != rollout.version:
            return []
        keys = [key for key in event.keys if key in worker.holds]
        return [self._decode(event.worker, worker, keys, now)] if keys else []

    # -- who decodes what ----------------------------------------------------------------------------------

    def _direct(self, names: Sequence[str], now: float) -> list[Command]:
        """Gives waiting requests to these workers, or first the weights that it takes."""
        commands: list[Command] = []
        for name in names:
            worker = self._workers.get(name)
            if worker is None or not worker.slots:
                continue
            if worker.holds:
                # It gets no more while an earlier rollout waits for a worker.
                candidates = [] if self._must_stay(name, worker) else [self.rollouts.open[worker.rollout]]
            else:
                candidates = self.rollouts.for_free(name)
            for rollout in candidates:
                if rollout.version != worker.version:
                    worker.rollout = rollout.number
                    if worker.wants != rollout.version or now - worker.ordered >= self.limits.retry:
                        commands.append(self._load(name, worker, rollout.version, now))
                    break
                share = -(-rollout.unfinished // self.ready)
                keys = rollout.router.take(WorkerLoad(name, worker.slots, len(worker.holds)), share)
                if keys:
                    worker.rollout = rollout.number
                    moved = self._moved.intersection(keys)
                    self.counts.migrations += len(moved)
                    self._moved -= moved
                    commands.append(self._decode(name, worker, keys, now))
                    break
        if self.rollouts.ran_empty():
            told = {command.worker for command in commands if isinstance(command, Decode)}
            for name, worker in self._workers.items():
                if worker.more and name not in told and not self._more(name, worker):
                    commands.append(self._decode(name, worker, [], now))
        return commands

    def _ask(self, name: str, worker: _Worker, positions: tuple[tuple[Key, int], ...]) -> Ask:
        entries = {key: self.ledger[key] for key, _ in positions}
        orders = {key: entry.order for key, entry in entries.items() if entry.renewed}
        return Ask(name, worker.rollout, positions, worker.more, orders)

    def _must_stay(self, name: str, worker: _Worker) -> bool:
        """Whether an earlier rollout than a worker's has requests for it, and nobody works on that."""
        if next(iter(self.rollouts.open), worker.rollout) >= worker.rollout:
            return False
        tended = {each.rollout for each in self._workers.values() if each.slots}
        return any(
            rollout.number < worker.rollout and rollout.number not in tended
            for rollout in self.rollouts.for_free(name)
        )

    def _more(self, name: str, worker: _Worker) -> bool:
        """Whether further requests may follow in the rollout that a worker works on."""
        rollout = self.rollouts.open.get(worker.rollout)
        return rollout is not None and rollout.router.waiting(name)

    def _decode(
        self, name: str, worker: _Worker, keys: Sequence[Key], now: float, drafter: str | None = None
    ) -> Decode:
        worker.holds.update(dict.fromkeys(keys, now))
        for key in keys:
            holders = self._holders.setdefault(key, [])
            if name not in holders:
                holders.append(name)
        worker.more = self._more(name, worker)
        self._orders += 1
        for key in keys:
            self.ledger[key].ordered(self._orders)
        work = tuple((key, self.rollouts.of(key).requests[key], self.ledger[key].partial()) for key in keys)
        return Decode(name, worker.rollout, worker.version, work, worker.more, drafter, self._orders)

    def _rearrange(self, now: float) -> list[Command]:
        """Lets routers move requests to other workers, and copy them."""
        commands: list[Command] = []
        for rollout in self.rollouts.open.values():
            if rollout.router.mobile and not rollout.renewed:  # a renewed response has one writer
                commands += self._rearrange_one(rollout, now)
        return commands

    def _rearrange_one(self, rollout: Rollout, now: float) -> list[Command]:
        loads = [
            WorkerLoad(name, worker.slots, len(worker.holds))
            for name, worker in self._workers.items()
            if worker.slots and worker.version == rollout.version and worker.rollout == rollout.number
        ]
        holders_of = {key: names for key, names in self._holders.items() if key in rollout.requests}
        state = QueueState(loads, holders_of, lambda key: len(self.ledger[key].tokens), self._acceptance)
        taken: dict[str, list[Key]] = {}
        given: dict[tuple[str, str | None], list[Key]] = {}
        for move in rollout.router.moves(state):
            holders = self._holders.get(move.key)
            if holders is None or move.worker in holders or move.worker not in self._workers:
                continue
            if not move.copies:
                self.counts.migrations += 1
                for name in holders:
                    taken.setdefault(name, []).append(move.key)
                    del self._workers[name].holds[move.key]
                holders.clear()
            alone = holders if len(holders) == 1 else []
            for name in (*alone, move.worker):
                self._reached[move.key, name] = len(self.ledger[move.key].tokens)
            given.setdefault((move.worker, move.drafter), []).append(move.key)
        commands: list[Command] = [
            Withdraw(name, rollout.number, tuple(keys)) for name, keys in taken.items()
        ]
        for (name, drafter), keys in given.items():
            commands.append(self._decode(name, self._workers[name], keys, now, drafter))
        return commands

    def _acceptance(self, key: Key) -> float:
        """See `QueueState`."""
        known, holders = self._drafts.get(key, {}), self._holders[key]
        counts = [counts for name, counts in known.items() if name in holders]
        return max((accepted / max(drafted, 1) for drafted, accepted in counts), default=1.0)

    def _catch_up(self, name: str, piece: Piece, now: float) -> list[Command]:
        """A worker's copy that is far behind the longest one goes on from there.

        Only the copy that this piece is of is judged: where the others are now, nobody knows. On a worker
        that has more requests than that of the longest copy it goes on as it is, since all of them would wait
        for its prefill. None is given up: a drafter that is ahead now may be the worse one later.
        """
        key, known = piece.key, len(self.ledger[piece.key].tokens)
        rollout, reached = self.rollouts.of(key), self._reached
        reached[key, name] = max(reached[key, name], piece.begin + len(piece.tokens))
        longest = max(self._holders[key], key=lambda holder: reached[key, holder])
        worker = self._workers[name]
        far = known - reached[key, name] >= rollout.router.catch_up
        if not far or len(worker.holds) > len(self._workers[longest].holds):
            return []
        reached[key, name] = known
        return [self._decode(name, worker, [key], now)]

    def _snapshot(self) -> ClusterSnapshot:
        """What the plan for idle workers goes by."""
        idle = {
            name: worker.version
            for name, worker in self._workers.items()
            if worker.slots and not worker.holds and worker.version == worker.wants
        }

        def sample(rollout: Rollout, key: Key) -> Sample:
            return tuple(rollout.requests[key].prompt_ids), tuple(self.ledger[key].tokens)

        return ClusterSnapshot(self._workers, idle, self.rollouts.open, sample)

    # -- time ----------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Command]:
        limits, commands = self.limits, []
        for name, worker in list(self._workers.items()):
            if not worker.arrived and now - worker.heard > limits.patience / 2:  # it hangs as it starts
                del self._workers[name]
                commands.append(Stop(name))
            elif worker.arrived and now - worker.heard > limits.lease:
                commands += self._lose(name, f"it was silent for {now - worker.heard:.0f} seconds", now)
        if any(isinstance(command, Fail) for command in commands):
            return commands
        commands += self._start(now)
        if now - self._last_heard > limits.patience:
            last = f" (the last was lost because {self._last_reason})" if self._last_reason else ""
            message = (
                f"cluster.patience_seconds: no worker has been there for {limits.patience:g} seconds{last};"
                " the same command goes on once there is room for one"
            )
            return [*commands, Fail("ClusterError", message)]
        for name, worker in self._workers.items():
            overdue = now - worker.ordered >= limits.retry
            if worker.arrived and not worker.slots and self.building and overdue:
                worker.ordered = now
                commands.append(Build(name))
            quiet = [key for key, since in worker.holds.items() if now - since >= limits.retry]
            if quiet:
                worker.holds.update(dict.fromkeys(quiet, now))
                positions = tuple((key, len(self.ledger[key].tokens)) for key in quiet)
                commands.append(self._ask(name, worker, positions))
        commands += self._direct(list(self._workers), now)
        return commands + self._rearrange(now)
