"""What a worker does for spot training (`spot.py`): updates and forward passes, one a turn.

Between two of them the worker looks for orders, and what it is asked to decode ends the session: so work
waits for one update, or one forward pass, at most. The head that is saved is copied on the device and comes
to the host beside further updates, or beside decoding.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from drafters.training import TrainingSession, WorkerTraining
from rljax.cluster.idle_work import WorkerParts
from rljax.cluster.messages import Event
from rljax.models.transformer import Params
from rljax.papers.tlt.messages import (
    Prepare,
    Prepared,
    SpotOrder,
    StopTraining,
    TrainDrafter,
    Trained,
    TrainingData,
)
from rljax.papers.tlt.spot_driver import spot_training


class SpotWorker:
    """See the module's docstring.

    Args:
      name: the worker's name.
      training: of the drafter that is trained.
      get: returns what a reference stands for; it may raise.
      put: stores a value and returns a reference to it.
    """

    def __init__(
        self, name: str, training: WorkerTraining, get: Callable[[Any], Any], put: Callable[[Any], Any]
    ) -> None:
        self._name, self._training, self._get, self._put = name, training, get, put
        self._prepares: collections.deque[Prepare] = collections.deque()
        self._lead: TrainDrafter | None = None  # the session that goes on
        self._newest = 0  # number of the newest session that it has heard of
        self._session: TrainingSession | None = None
        self._fed: set[int] = set()  # batches that the session has
        self._dry = False  # the session has no data
        self._updates = 0
        self._seconds = self._delay = self._joiner_delay = 0.0
        self._last = 0.0  # seconds of the update or forward pass of the last turn
        self._metrics: dict[str, float] = {}
        self._saving: tuple[Trained, Mapping[str, Any]] | None = None  # on its way to the host

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do. Behind an update or a forward pass a worker looks for orders once
        more, so that `_last` tells for what they have waited.
        """
        return not (self._prepares or self._trains or self._saving or self._last)

    @property
    def _trains(self) -> bool:
        return self._lead is not None and not self._dry

    def take(self, order: SpotOrder, params: Params | None, version: int | None) -> list[Event]:
        """Takes an order, under the policy's weights that the worker has."""
        if isinstance(order, Prepare):
            known = any(each.batch == order.batch for each in self._prepares)
            if not known and order.version == version:
                self._prepares.append(order)
            return []
        if isinstance(order, TrainingData):
            return self._feed(order)
        if self._lead is not None and self._lead.session == order.session:
            return [self._report(True)] if isinstance(order, TrainDrafter) else self._end()
        if isinstance(order, StopTraining) or order.session <= self._newest or order.version != version:
            self._newest = max(self._newest, order.session)  # if it comes late, it does not begin
            waits = self._saving is not None and self._saving[0].session == order.session
            return [] if waits else [Trained(self._name, order.session, 0, False)]
        return [*self._end(), *self._begin(order, params)]

    def stop(self) -> list[Event]:
        """Ends what goes on: the worker has something to decode, or gets other weights."""
        self._prepares.clear()
        if self._lead is None:
            self._joiner_delay += self._last
        self._delay += self._last
        self._last = 0.0
        return self._end()

    def work(self, params: Params, alone: bool) -> list[Event]:
        """Does one thing: hands over what was saved, prepares samples, or updates.

        Args:
          params: the policy's weights.
          alone: whether nothing is decoded; else only what was saved is handed over, once it is here.
        """
        events = self._saved(wait=alone and not self._prepares and not self._trains)
        self._last = 0.0
        if alone and (self._prepares or self._trains):
            start = time.perf_counter()
            done = self._prepare(params) if self._prepares else self._update()
            self._last = time.perf_counter() - start
            if isinstance(done, Prepared):
                delay, self._joiner_delay = self._joiner_delay, 0.0
                return [*events, dataclasses.replace(done, seconds=self._last, delay=delay)]
            self._seconds += self._last
            if done and self._updates >= self._lead.updates:
                events += self._end()
            elif done and self._updates % self._lead.save_every == 0:
                events += self._save(True)
        return events

    # -- a session -------------------------------------------------------------------------------------------

    def _begin(self, lead: TrainDrafter, params: Params) -> list[Event]:
        self._newest = lead.session
        try:
            saved = None if lead.head is None else self._get(lead.head)
        except Exception:  # whatever the store raises
            return [Trained(self._name, lead.session, 0, False)]
        self._lead, self._session = lead, self._training.session(params, saved)
        self._fed, self._dry, self._updates, self._metrics = set(), False, 0, {}
        self._seconds = self._delay = 0.0
        return [self._report(True)]

    def _feed(self, feed: TrainingData) -> list[Event]:
        if self._lead is None or feed.session != self._lead.session:
            return []
        for batch, reference in feed.features.items():
            if batch in self._fed:
                continue
            try:
                features = self._get(reference)
            except Exception:  # those who had them are gone
                continue
            self._add(batch, features)
        return []

    def _add(self, batch: int, features: Any) -> None:
        self._fed.add(batch)
        self._session.add(features)
        self._dry = False

    def _update(self) -> bool:
        """Updates the head; returns whether there was data."""
        metrics = self._session.update()
        self._dry = metrics is None
        if metrics is not None:
            self._updates, self._metrics = self._updates + 1, metrics
        return metrics is not None

    def _prepare(self, params: Params) -> Prepared:
        order = self._prepares.popleft()
        if self._lead is None:
            features = self._put(self._training.prepare(params, order.samples))
        else:
            features = None
            if order.batch not in self._fed:
                self._add(order.batch, self._training.prepare(params, order.samples))
        return Prepared(self._name, order.batch, features)

    def _end(self) -> list[Event]:
        """Ends the session, if there is one. Its last event comes when the head is here."""
        if self._lead is None:
            return []
        events = self._save(False)
        self._lead = self._session = None
        return events

    def _report(self, training: bool) -> Trained:
        return Trained(
            self._name,
            self._lead.session,
            self._updates,
            training,
            self._seconds,
            self._delay,
            metrics=self._metrics,
        )

    # -- saving ----------------------------------------------------------------------------------------------

    def _save(self, training: bool) -> list[Event]:
        """Begins to save the head, in place of an earlier one of the session that is still on its way."""
        earlier = self._saving is not None and self._saving[0].session == self._lead.session
        events = [] if earlier else self._saved(wait=True)
        report = self._report(training)
        if not self._updates:
            return [*events, report]
        self._saving = report, self._session.copy()
        return events

    def _saved(self, wait: bool) -> list[Event]:
        """Hands over what was saved: at once if `wait`, else if it is here."""
        if self._saving is None:
            return []
        report, head = self._saving
        if not wait and not all(leaf.is_ready() for leaf in head.values()):
            return []
        self._saving = None
        arrays = {name: np.asarray(leaf) for name, leaf in head.items()}
        return [dataclasses.replace(report, head=arrays)]


def make_worker(parts: WorkerParts) -> SpotWorker | None:
    """Returns a worker's part; None without `cluster.spot.idle`."""
    training = spot_training(parts.speculator, parts.config)
    if training is None:
        return None
    training.warm_up(parts.params)
    return SpotWorker(parts.name, training, parts.get, parts.put)
