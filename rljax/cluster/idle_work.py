"""What workers do that have nothing to decode: a part for each process that has a say in it.

    IdleWork      in the driver: decides who does what, brings what they need, and takes what comes of it
    IdleWorker    in a worker: does it, between two looks for orders

Neither can change a token. Which there is, is a matter of keys (`rljax/config/cluster.py`); orders and
events of their own extend `IdleOrder` and `IdleEvent`.
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Protocol

from rljax.cluster.messages import Command, Event, IdleEvent, IdleOrder, Key, Sample
from rljax.cluster.rollouts import Rollout
from rljax.config.cluster import ClusterConfig
from rljax.config.wing import MECHANISMS
from rljax.models.transformer import Params
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator


@dataclasses.dataclass(frozen=True)
class ClusterSnapshot:
    """What is in progress.

    Attributes:
      workers: all that are not lost.
      idle: the version of the weights of those that have nothing to decode and wait for nothing.
      rollouts: those that are not forgotten, by number, the earliest first.
      sample: returns prompt and response of a request that has ended.
    """

    workers: Container[str]
    idle: Mapping[str, int | None]
    rollouts: Mapping[int, Rollout]
    sample: Callable[[Rollout, Key], Sample]


class IdleWork(Protocol):
    """Part of the driver: the coordinator asks it what idle workers should do, and `ClusterDecoder` does with
    it what takes more than messages.
    """

    def direct(self, snapshot: ClusterSnapshot, now: float) -> list[Command]:
        """Called after every event; returns what idle workers should do, or do no longer."""

    def on(self, event: IdleEvent, now: float) -> list[Command]:
        """Takes what a worker says about its work."""

    def trains(self, worker: str) -> bool:
        """Whether a worker is at work in idle time."""

    def completed(self, order: IdleOrder) -> IdleOrder:
        """Returns an order of `direct` or `on` with what is sent with it and is no matter of decisions."""

    def finish(self, listen: Callable[[float], None]) -> None:
        """Waits, for a moment at most, until workers have said how far they went; `listen` waits so many
        seconds for events.
        """

    def adopt(self) -> bool:
        """Takes over what came of it, for checkpoints; returns whether drafters have other weights now."""

    def metrics(self) -> dict[str, float]:
        """Returns metrics since the last call."""


class IdleWorker(Protocol):
    """Part of a worker.

    Attributes:
      idle: whether there is nothing to do.
    """

    idle: bool

    def take(self, order: Any, params: Params | None, version: int | None) -> list[Event]:
        """Takes an `IdleOrder`, under the policy's weights that the worker has."""

    def stop(self) -> list[Event]:
        """Ends what goes on: the worker has something to decode, or gets other weights."""

    def work(self, params: Params, alone: bool) -> list[Event]:
        """Does one thing; `alone` says that nothing is decoded meanwhile."""


def make_idle_work(
    config: ClusterConfig, speculator: Speculator | NoDrafts, put: Callable[[Any], Any]
) -> IdleWork | None:
    """Returns the driver's part; None where workers do nothing in idle time.

    Args:
      config: keys of the cluster.
      speculator: the driver's.
      put: stores a value, and returns a reference to it.

    Raises:
      ConfigError: keys ask for what cannot be done.
    """
    places = [each.idle_work for each in MECHANISMS.values() if each.idle_work]
    made = (pkgutil.resolve_name(place)(config, speculator, put) for place in places)
    return next((each for each in made if each is not None), None)


class WorkerParts(NamedTuple):
    """What a worker's part is made of.

    Attributes:
      config, put: as of `make_idle_work`.
      speculator: the worker's.
      params: any weights of the policy's shapes, in the engine's form.
      name: the worker's.
      get: returns what a reference stands for.
    """

    config: ClusterConfig
    speculator: Speculator | NoDrafts
    params: Params
    name: str
    get: Callable[[Any], Any]
    put: Callable[[Any], Any]


def make_idle_worker(parts: WorkerParts) -> IdleWorker | None:
    """Returns a worker's part, compiled; None where workers do nothing in idle time."""
    places = [each.idle_worker for each in MECHANISMS.values() if each.idle_worker]
    made = (pkgutil.resolve_name(place)(parts) for place in places)
    return next((each for each in made if each is not None), None)
