"""What carries messages between driver and workers; and a fabric inside one process, for tests.

`ray_fabric.py` is the one that runs use.
"""

import heapq
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rljax.cluster.messages import Died, Event, Heard, Order


class Fabric(Protocol):
    """Processes, messages, a store and a clock. All calls come from one thread."""

    def spawn(self, worker: str) -> None:
        """Starts a worker; its events come from `receive`."""

    def stop(self, worker: str) -> None:
        """Ends a worker's process, if it still runs. Nothing comes from it afterwards, or little."""

    def send(self, worker: str, order: Order) -> None:
        """Sends an order to a worker; to a lost one it does nothing."""

    def receive(self, seconds: float) -> list[Event]:
        """Returns the events that have come, waiting so long for the first one."""

    def put(self, value: Any) -> Any:
        """Stores a copy of a value, and returns a reference that can be part of an order."""

    def room(self) -> int:
        """Returns the number of workers that there is room for now, those that run included."""

    def now(self) -> float:
        """Returns the time in seconds since some moment."""

    def close(self) -> None:
        """Ends all workers."""


class LocalWorker(Protocol):
    """A worker as the local fabric runs it: `RolloutWorker`, or a test's stand-in."""

    def receive(self, order: Order) -> None:
        """Takes an order."""

    def turn(self) -> list[Event]:
        """Works a little, and returns what is new."""


Network = Callable[[Any], Sequence[int]]
"""The delays, in turns, with which the copies of a message arrive: (0,) at once, () never, (0, 3) twice."""


class LocalFabric:
    """Workers in this process, which take turns; time is counted in turns.

    Args:
      make: makes a worker from its name and a function that returns what a reference stands for.
      network: see `Network`; by default every message arrives once, at once.
      turn_seconds: the clock's step per turn.

    Attributes:
      workers: those that run, by name.
      most: number of workers that there is room for; others wait until it is raised.
      before_turn: called with this fabric before every turn; tests lose workers in it.
      turns: turns so far.
    """

    def __init__(
        self,
        make: Callable[[str, Callable[[Any], Any]], LocalWorker],
        network: Network = lambda message: (0,),
        turn_seconds: float = 0.1,
    ) -> None:
        self._make, self._network, self._turn_seconds = make, network, turn_seconds
        self.workers: dict[str, LocalWorker] = {}
        self.most = 1_000_000
        self._pending: list[str] = []
        self.before_turn: Callable[[LocalFabric], None] | None = None
        self.turns = 0
        self._silent: set[str] = set()
        self._in_flight: list[tuple[int, int, str | None, Any]] = []  # due turn, number, recipient, message
        self._numbers = itertools.count()

    def spawn(self, worker: str) -> None:
        self._pending.append(worker)
        self._place()

    def _place(self) -> None:
        while self._pending and len(self.workers) < self.most:
            name = self._pending.pop(0)
            self.workers[name] = self._make(name, pickle.loads)

    def stop(self, worker: str) -> None:
        self.workers.pop(worker, None)
        self._pending = [name for name in self._pending if name != worker]
        self._silent.discard(worker)

    def kill(self, worker: str) -> None:
        """Ends a worker as a crash would."""
        if self.workers.pop(worker, None) is not None:
            self._silent.discard(worker)
            died = Died(worker, "it was killed")
            heapq.heappush(self._in_flight, (self.turns, next(self._numbers), None, died))

    def silence(self, worker: str) -> None:
        """Lets a worker neither work nor answer."""
        if worker in self.workers:
            self._silent.add(worker)

    def send(self, worker: str, order: Order) -> None:
        # As between processes: nothing is shared.
        self._send_over(worker, pickle.dumps(order))

    def receive(self, seconds: float) -> list[Event]:
        if self.before_turn is not None:
            self.before_turn(self)
        self.turns += 1
        self._place()
        for name, worker in list(self.workers.items()):
            if name not in self._silent:
                for event in worker.turn() or [Heard(name)]:
                    self._send_over(None, pickle.dumps(event))
        events = []
        while self._in_flight and self._in_flight[0][0] <= self.turns:
            _, _, recipient, data = heapq.heappop(self._in_flight)
            message = pickle.loads(data) if isinstance(data, bytes) else data
            if recipient is None:
                events.append(message)
            elif recipient in self.workers and recipient not in self._silent:
                self.workers[recipient].receive(message)
        return events

    def put(self, value: Any) -> Any:
        return pickle.dumps(value)

    def room(self) -> int:
        return self.most

    def now(self) -> float:
        return self.turns * self._turn_seconds

    def close(self) -> None:
        self.workers.clear()

    def _send_over(self, recipient: str | None, data: bytes) -> None:
        for delay in self._network(data):
            heapq.heappush(self._in_flight, (self.turns + delay, next(self._numbers), recipient, data))
