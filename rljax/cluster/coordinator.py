"""The coordinator: which worker decodes what, and what happens when one is lost.

    commands = coordinator.on(event, now)

A pure state machine: no Ray, JAX, thread, clock or randomness of its own, so that tests and simulations drive
it by hand. A worker's life:

    Spawn -> Arrived -> Build -> Status -> Load -> Status with the version -> Decode -> Pieces

Nothing that it decides can change a token (`ledger.py`). What a worker does not confirm is sent again; a
worker that is silent for longer than its lease is given up, and its requests go on elsewhere from the tokens
in the ledger. A lost worker's name is never used again.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from rljax.cluster.ledger import Ledger
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Begin,
    Build,
    Command,
    Decode,
    Died,
    Event,
    Facts,
    Fail,
    Failed,
    FetchFailed,
    Heard,
    Key,
    Load,
    Missing,
    Pieces,
    Say,
    Spawn,
    Status,
    Stop,
    Tick,
    Wish,
)
from rljax.errors import NumericsError
from rljax.requests import DecodeStatistics, Request

_BACKLOG_SHARE = 4  # a worker holds a quarter more requests than slots, so that none waits for a message
_REFILL_SHARE = 8  # and is sent new ones when an eighth of its slots has come free
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
      told: when it was last told to build or to load.
      holds: its requests, with the time of the last progress or question.
      more: whether it believes that further requests may follow.
      useful: whether it has ever sent a token.
    """

    heard: float
    told: float
    arrived: bool = False
    slots: int = 0
    version: int | None = None
    holds: dict[Key, float] = dataclasses.field(default_factory=dict)
    more: bool = False
    useful: bool = False
    fetch_failures: int = 0
    fetch_seconds: float = 0.0


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
      wish: number of workers to keep running.
      facts: the driver's, which a worker's must equal.
      limits: see `Limits`.
      fingerprint: of the driver's numerics; None where it is not measured. It may be set until the first
        `Build` is answered.
      strict: refuses workers with another fingerprint; False admits them and counts differing tokens.

    Attributes:
      ledger: what has been sampled.
      counts: see `Counts`.
      statistics: of the present rollout, by worker: counts of decoding, and seconds it was busy.
      building: whether workers that arrive are told to build.
      ready: number of workers that have their engine.
      ended: requests of the rollout that have ended, in the order in which they did.
      only_holders: takes tokens only from workers that hold the request. Set it where tools may be called: a
        tool that is asked again, elsewhere, may answer something else.
    """

    def __init__(
        self,
        wish: int,
        facts: Facts,
        limits: Limits = Limits(),
        fingerprint: str | None = None,
        strict: bool = True,
    ) -> None:
        self.wish, self.facts, self.limits = wish, facts, limits
        self.fingerprint, self.strict = fingerprint, strict
        self.ledger, self.counts = Ledger(strict), Counts()
        self.statistics: dict[str, tuple[DecodeStatistics, float]] = {}
        self.building = self.only_holders = False
        self.ready = 0
        self.ended: list[Key] = []
        self._workers: dict[str, _Worker] = {}
        self._started = 0
        self._next_start = 0.0
        self._useless = 0  # workers lost in a row without a token
        self._last_reason = ""
        self._life: float | None = None  # when any worker was last heard
        self._rollout, self._version = 0, None
        self._requests: dict[Key, Request] = {}
        self._queue: collections.deque[list[Key]] = collections.deque()  # groups that nobody decodes
        self._holder: dict[Key, str] = {}
        self._moved: set[Key] = set()
        self._unfinished = 0

    # -- what the driver asks ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every request of the rollout has ended."""
        return not self._unfinished

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

    def workers(self) -> list[str]:
        """Names of the workers that are not lost."""
        return list(self._workers)

    def states(self) -> dict[str, str]:
        """What each of them does: a state of `timeline.py`."""
        states = {}
        for name, worker in self._workers.items():
            if not worker.slots:
                states[name] = "starting"
            elif self._version is not None and worker.version != self._version:
                states[name] = "loading"
            else:
                states[name] = "decoding" if worker.holds else "idle"
        return states

    # -- the machine ---------------------------------------------------------------------------------------

    def on(self, event: Event, now: float) -> list[Command]:
        """Takes an event at a time in seconds, and returns what is to be done."""
        if self._life is None:
            self._life = now
        if isinstance(event, Begin):
            return self._begin(event, now)
        if isinstance(event, Tick):
            return self._tick(now)
        if isinstance(event, Wish):
            return self._wish(event.workers, now)
        worker = self._workers.get(event.worker)
        if isinstance(event, Pieces):
            return self._pieces(event, worker, now)
        if worker is None:
            return []
        if isinstance(event, Died):
            return self._lose(event.worker, event.reason, now)
        worker.heard = self._life = now
        if isinstance(event, Arrived):
            return self._arrived(event, worker, now)
        if isinstance(event, Status):
            return self._status(event, worker, now)
        if isinstance(event, Missing):
            return self._missing(event, worker, now)
        if isinstance(event, FetchFailed):
            return self._fetch_failed(event, worker, now)
        if isinstance(event, Failed):
            return [Fail(event.kind, event.message)]
        assert isinstance(event, Heard)
        return []

    def build(self, now: float) -> list[Command]:
        """Workers may build: what they are built from is known."""
        self.building = True
        arrived = [(name, worker) for name, worker in self._workers.items() if worker.arrived]
        for _, worker in arrived:
            worker.told = now
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
        worker.arrived, worker.told = True, now
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
        if event.version is not None and event.version >= (worker.version or 0):
            worker.version, worker.fetch_seconds = event.version, event.fetch_seconds
        if self._version is None:
            return []
        if worker.version != self._version:
            return self._load(event.worker, worker, now)
        return self._fill([event.worker], now)

    def _refuse(self, event: Status) -> list[Command]:
        """A worker computes other bits: it is not used, nor another one in its place."""
        del self._workers[event.worker]
        self.wish -= 1
        line = (
            f"cluster: {event.worker} is refused: its numerics have the fingerprint {event.fingerprint}, here"
            f" it is {self.fingerprint}; use one kind of processor, or set cluster.numerics=warn"
        )
        if not self.wish:
            return [Stop(event.worker), Fail("NumericsError", line)]
        return [Stop(event.worker), Say(line)]

    def _load(self, name: str, worker: _Worker, now: float) -> list[Command]:
        worker.told = now
        return [Load(name, self._version)]

    def _fetch_failed(self, event: FetchFailed, worker: _Worker, now: float) -> list[Command]:
        if event.version != self._version or worker.version == self._version:
            return []
        worker.fetch_failures += 1
        if worker.fetch_failures >= _MOST_FETCHES:
            return self._lose(event.worker, event.reason, now)
        return self._load(event.worker, worker, now)

    def _lose(self, name: str, reason: str, now: float) -> list[Command]:
        """Gives a worker up; its requests wait first."""
        worker = self._workers.pop(name)
        self.ready -= worker.slots > 0
        self.counts.restarts += 1
        self._last_reason = reason
        self._useless = 0 if worker.useful else self._useless + 1
        if self._useless > 2 * self.wish + 2:
            return [
                Stop(name),
                Fail(
                    "ClusterError",
                    f"cluster: {self._useless} workers in a row ended before they decoded anything, the last"
                    f" because {reason}",
                ),
            ]
        if self._useless:
            self._next_start = max(self._next_start, now + min(2.0**self._useless, _MOST_BACKOFF))
        commands: list[Command] = [Stop(name), Say(f"cluster: {name} is lost: {reason}")]
        self._take_back(worker)
        return commands + self._start(now) + self._fill(list(self._workers), now)

    def _take_back(self, worker: _Worker) -> None:
        """The requests of a worker that is gone wait first."""
        keys = [key for key in worker.holds if self.ledger[key].ending is None]
        self._moved.update(keys)
        for key in keys:
            self._holder.pop(key, None)
        self._queue.extendleft(reversed(self._groups(keys)))

    def _wish(self, workers: int, now: float) -> list[Command]:
        """Keeps another number of workers: starts some, or lets go of those that have done least, the newest
        first.
        """
        self.wish, commands = workers, []
        newest_first = list(self._workers)[::-1]
        least = sorted(newest_first, key=lambda name: bool(self._workers[name].slots))
        for name in least[: max(len(self._workers) - workers, 0)]:
            worker = self._workers.pop(name)
            self.ready -= worker.slots > 0
            self._take_back(worker)
            commands += [Stop(name), Say(f"cluster: {name} is let go")]
        return commands + self._start(now) + self._fill(list(self._workers), now)

    def _start(self, now: float) -> list[Command]:
        """Starts workers as far as some are wished for."""
        commands: list[Command] = []
        while len(self._workers) < self.wish and now >= self._next_start:
            name = f"worker-{self._started}"
            self._started += 1
            self._workers[name] = _Worker(now, now)
            commands.append(Spawn(name))
        return commands

    # -- a rollout -----------------------------------------------------------------------------------------

    def _begin(self, event: Begin, now: float) -> list[Command]:
        self._rollout, self._version = event.rollout, event.version
        self._requests, self._unfinished = dict(event.requests), len(event.requests)
        self.ledger.open(event.requests, event.version)
        self.statistics, self.ended, self._holder, self._moved = {}, [], {}, set()
        self._queue = collections.deque(self._groups(event.requests))
        self._life = now
        commands: list[Command] = []
        current = []
        for name, worker in self._workers.items():
            worker.holds, worker.more, worker.fetch_failures = {}, False, 0
            worker.heard = now  # nobody has listened since the last rollout
            if worker.slots and worker.version != event.version:
                commands += self._load(name, worker, now)
            elif worker.slots:
                current.append(name)
        return commands + self._fill(current, now)

    def _pieces(self, event: Pieces, worker: _Worker | None, now: float) -> list[Command]:
        if worker is not None:
            worker.heard = self._life = now
            if event.rollout == self._rollout and event.statistics is not None:
                known = self.statistics.get(event.worker)
                if known is None or event.statistics.host_syncs >= known[0].host_syncs:
                    self.statistics[event.worker] = event.statistics, event.busy_seconds
        commands: list[Command] = []
        gaps, ended = [], False
        for piece in event.pieces:
            entry = self.ledger.entries.get(piece.key)
            holds = worker is not None and piece.key in worker.holds
            if entry is None or (self.only_holders and not holds):
                self.counts.late += 1
                continue
            begun = entry.ending is None
            try:
                grown = self.ledger.add(event.worker, piece)
            except NumericsError as error:
                return [Fail("NumericsError", str(error))]
            if not grown and not self.ledger.has_gap(piece.key) and begun == (entry.ending is None):
                self.counts.late += bool(piece.tokens)
            if grown and worker is not None:
                worker.useful, self._useless = True, 0
            if holds:
                worker.holds[piece.key] = now
                if self.ledger.has_gap(piece.key):
                    gaps.append((piece.key, len(entry.tokens)))
            if begun and entry.ending is not None:
                self._finish(piece.key)
                ended = True
        if gaps:
            commands.append(Ask(event.worker, self._rollout, tuple(gaps), bool(self._queue)))
        if ended and worker is not None:
            commands += self._fill([event.worker], now)
        return commands

    def _finish(self, key: Key) -> None:
        self._unfinished -= 1
        self.ended.append(key)
        holder = self._workers.get(self._holder.pop(key, ""))
        if holder is not None:
            del holder.holds[key]
            return
        for group in self._queue:  # a lost worker's last piece came late
            if key in group:
                group.remove(key)
        self._queue = collections.deque(group for group in self._queue if group)

    def _missing(self, event: Missing, worker: _Worker, now: float) -> list[Command]:
        if event.rollout != self._rollout or worker.version != self._version:
            return []
        keys = [key for key in event.keys if key in worker.holds]
        return [self._decode(event.worker, worker, keys, now)] if keys else []

    # -- who decodes what ----------------------------------------------------------------------------------

    def _groups(self, keys: Iterable[Key]) -> list[list[Key]]:
        """Keys by prompt, in order: those of one prompt share a prefill where one worker has them."""
        groups: dict[tuple[int, ...], list[Key]] = {}
        for key in keys:
            groups.setdefault(self._requests[key].prompt_ids, []).append(key)
        return list(groups.values())

    def _fill(self, names: Sequence[str], now: float) -> list[Command]:
        """Gives waiting requests to these workers, as far as they have the weights and room: no more than
        slots and a backlog, and no more than their share of what is left.
        """
        if not self._queue:
            return []
        commands: list[Command] = []
        for name in names:
            worker = self._workers.get(name)
            if worker is None or not worker.slots or worker.version != self._version:
                continue
            share = -(-self._unfinished // self.ready)
            limit = min(worker.slots + worker.slots // _BACKLOG_SHARE, share)
            room = limit - len(worker.holds)
            if room <= 0 or (worker.holds and room < worker.slots // _REFILL_SHARE):
                continue
            keys: list[Key] = []
            while self._queue and room > len(keys):
                group = self._queue[0]
                taken = group[: room - len(keys)]
                keys += taken
                del group[: len(taken)]
                if not group:
                    self._queue.popleft()
            for key in keys:
                self._holder[key] = name
            moved = self._moved.intersection(keys)
            self.counts.migrations += len(moved)
            self._moved -= moved
            commands.append(self._decode(name, worker, keys, now))
        if not self._queue:
            told = {command.worker for command in commands}
            for name, worker in self._workers.items():
                if worker.more and name not in told:
                    commands.append(self._decode(name, worker, [], now))
        return commands

    def _decode(self, name: str, worker: _Worker, keys: Sequence[Key], now: float) -> Decode:
        worker.holds.update(dict.fromkeys(keys, now))
        worker.more = bool(self._queue)
        work = tuple((key, self._requests[key], self.ledger[key].partial()) for key in keys)
        return Decode(name, self._rollout, self._version, work, worker.more)

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
        if now - self._life > limits.patience:
            last = f" (the last was lost because {self._last_reason})" if self._last_reason else ""
            message = (
                f"cluster.patience_seconds: no worker has been there for {limits.patience:g} seconds{last};"
                " the same command goes on once there is room for one"
            )
            return [*commands, Fail("ClusterError", message)]
        for name, worker in self._workers.items():
            overdue = now - worker.told >= limits.retry
            if worker.arrived and not worker.slots and self.building and overdue:
                worker.told = now
                commands.append(Build(name))
            elif worker.slots and self._version is not None and worker.version != self._version and overdue:
                commands += self._load(name, worker, now)
            quiet = [key for key, since in worker.holds.items() if now - since >= limits.retry]
            if quiet:
                worker.holds.update(dict.fromkeys(quiet, now))
                positions = tuple((key, len(self.ledger[key].tokens)) for key in quiet)
                commands.append(Ask(name, self._rollout, positions, worker.more))
        return commands + self._fill(list(self._workers), now)
