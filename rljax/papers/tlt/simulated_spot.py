"""Spot training on a virtual clock: what the coordinator's `SpotTraining` asks for, in seconds.

A worker does one thing at a time, an update or a forward pass over samples, and looks for orders in between;
what it is given to decode waits for the end of that. The head itself is not there: acceptance is an input.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from rljax.papers.tlt.messages import (
    Prepare,
    Prepared,
    SpotOrder,
    StopTraining,
    TrainDrafter,
    Trained,
    TrainingData,
)
from rljax.papers.tlt.spot import SpotRule


@dataclasses.dataclass(frozen=True)
class SpotTimes:
    """Spot training of a simulation.

    Attributes:
      rule: when to train, and how much.
      update_seconds: of the head.
      read_seconds: of a forward pass over so many tokens.
    """

    rule: SpotRule
    update_seconds: float
    read_seconds: Callable[[int], float]


@dataclasses.dataclass
class _Trainee:
    """A worker, as far as it trains.

    Attributes:
      lead: the session that it leads.
      fed: whether that has features.
      updates, seconds: of the session.
      prepares: what it has been told to prepare.
      until: end of the update or the forward pass in progress.
      doing: number of that; 0 for none.
    """

    lead: TrainDrafter | None = None
    fed: bool = False
    updates: int = 0
    seconds: float = 0.0
    prepares: list[Prepare] = dataclasses.field(default_factory=list)
    until: float = -math.inf
    doing: int = 0


class SimulatedSpot:
    """See the module's docstring.

    Args:
      times: see `SpotTimes`.
      at: calls a function with arguments at a time.
      tell: hands an event to the coordinator.
    """

    def __init__(
        self, times: SpotTimes, at: Callable[..., None], tell: Callable[[Prepared | Trained], None]
    ) -> None:
        self._times, self._at, self._tell = times, at, tell
        self._trainees: dict[str, _Trainee] = {}
        self._numbers = 0

    def take(self, order: SpotOrder, now: float) -> None:
        """Takes an order."""
        trainee = self._trainees.setdefault(order.worker, _Trainee())
        match order:
            case Prepare():
                trainee.prepares.append(order)
            case TrainingData():
                trainee.fed = True
            case TrainDrafter():
                trainee.lead, trainee.fed = order, False
                trainee.updates, trainee.seconds = 0, 0.0
            case StopTraining():
                self._end(order.worker, trainee, now)
        self._go_on(order.worker, trainee, now)

    def stop(self, worker: str, now: float) -> float:
        """A worker is needed: returns the time from which on it is free."""
        trainee = self._trainees.get(worker)
        if trainee is None:
            return now
        trainee.prepares.clear()
        until, trainee.doing = max(trainee.until if trainee.doing else now, now), 0
        self._end(worker, trainee, now, until - now)
        return until

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._trainees.pop(worker, None)

    def _end(self, worker: str, trainee: _Trainee, now: float, delay: float = 0.0) -> None:
        if trainee.lead is not None:
            ended = self._report(worker, trainee, training=False, delay=delay)
            trainee.lead = None
            self._at(now, self._tell, ended)

    def _report(self, worker: str, trainee: _Trainee, training: bool, delay: float = 0.0) -> Trained:
        return Trained(worker, trainee.lead.session, trainee.updates, training, trainee.seconds, delay)

    def _go_on(self, worker: str, trainee: _Trainee, now: float) -> None:
        """Begins with the next update or forward pass, unless one is in progress."""
        if trainee.doing:
            return
        if trainee.prepares:
            order = trainee.prepares[0]
            seconds = self._times.read_seconds(sum(len(ids) for sample in order.samples for ids in sample))
        elif trainee.lead is not None and trainee.fed:
            order, seconds = None, self._times.update_seconds
        else:
            return
        self._numbers += 1
        trainee.doing, trainee.until = self._numbers, now + seconds
        self._at(trainee.until, self._done, worker, self._numbers, order, seconds)

    def _done(self, worker: str, number: int, order: Prepare | None, seconds: float) -> None:
        trainee = self._trainees.get(worker)
        if trainee is None or trainee.doing != number:
            return
        trainee.doing, now = 0, trainee.until
        if order is not None:
            trainee.prepares.remove(order)
            trainee.fed = True
            features: Any = None if trainee.lead is not None else order.batch
            self._tell(Prepared(worker, order.batch, features, seconds))
        elif trainee.lead is not None:
            trainee.updates += 1
            trainee.seconds += seconds
            if trainee.updates >= trainee.lead.updates:
                self._end(worker, trainee, now)
            elif trainee.updates % trainee.lead.save_every == 0:
                self._tell(self._report(worker, trainee, training=True))
        self._go_on(worker, trainee, now)
