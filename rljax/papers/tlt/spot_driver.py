"""The driver's part of training in idle time: what `spot.py` decides, and the head, which goes to who leads
and comes back.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drafters.training import WorkerTraining
from rljax.cluster.messages import Command, IdleEvent, IdleOrder
from rljax.errors import ConfigError
from rljax.papers.tlt import SpotKeys
from rljax.papers.tlt.messages import TrainDrafter, Trained
from rljax.papers.tlt.spot import SpotCounts, SpotRule, SpotTraining
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator

_MOST_WAIT = 1.0  # seconds that a rollout waits for the head of a session that was halted, at most
_WAIT = 0.02  # seconds between two looks, meanwhile


def spot_training(speculator: Speculator | NoDrafts, config: SpotKeys) -> WorkerTraining | None:
    """Returns the training of the drafter that workers train (`cluster.spot`); None for none."""
    if not config.spot.idle:
        return None
    offered = (training.spot for training in speculator.training.values())
    return next((spot for spot in offered if spot is not None), None)


def make_driver(
    config: SpotKeys, speculator: Speculator | NoDrafts, put: Callable[[Any], Any]
) -> "SpotDriver | None":
    """Returns the driver's part; None without `cluster.spot.idle`. See `make_idle_work`.

    Raises:
      ConfigError: workers are to train a drafter and there is none, or it is not trained.
    """
    if not config.spot.idle:
        return None
    training = spot_training(speculator, config)
    if training is None or not training.limits.updates:
        raise ConfigError(
            "cluster.spot.idle: no drafter is trained; set speculation.drafter=eagle or small_model, with"
            " slices and without train: false, or 0"
        )
    training.delegate()
    return SpotDriver(config, training, put)


class SpotDriver(SpotTraining):
    """`SpotTraining` with the head: see the module's docstring.

    Args:
      config: keys of the cluster.
      training: of the drafter that workers train.
      put: stores a value, and returns a reference to it.
    """

    def __init__(self, config: SpotKeys, training: WorkerTraining, put: Callable[[Any], Any]) -> None:
        limits = dataclasses.astuple(training.limits)
        joiners_train = config.spot.joiners == "train"
        super().__init__(
            SpotRule(config.spot.idle, config.spot.save_every, *limits, joiners_train=joiners_train)
        )
        self._training, self._put = training, put
        self._saved: dict[int, Trained] = {}  # with heads that have not been taken over, by session
        self._head: Any = None  # reference to what the next session goes on from
        self._counted, self._waited_seconds = SpotCounts(), 0.0

    def on(self, event: IdleEvent, now: float) -> list[Command]:
        """Keeps the head that a session has saved, unless it is older than what is known: where joiners
        train, beside those of the other sessions.
        """
        if isinstance(event, Trained) and event.head is not None and self.takes(event):
            others = self._saved if self.rule.joiners_train else {}
            self._saved = others | {event.session: event}
            self._head = self._put(averaged(list(self._saved.values())))
        return super().on(event, now)

    def completed(self, order: IdleOrder) -> IdleOrder:
        """Returns an order; one to lead with the head that the session goes on from."""
        if not isinstance(order, TrainDrafter):
            return order
        if self._head is None:
            saved = self._training.saved()
            self._head = self._put(saved) if saved else None
        return dataclasses.replace(order, head=self._head)

    def finish(self, listen: Callable[[float], None]) -> None:
        """Waits until a session that was halted has said how far it went, so that all workers draft with the
        newest head. The policy's update has mostly taken longer.
        """
        start = time.perf_counter()
        while not self.sessions_ended and time.perf_counter() - start < _MOST_WAIT:
            listen(_WAIT)
        self._waited_seconds += time.perf_counter() - start

    def adopt(self) -> bool:
        """Takes over the head that workers have saved last: for checkpoints, and for all workers with their
        next weights. Returns whether there is one.
        """
        trained, self._saved = list(self._saved.values()), {}
        if not trained:
            return False
        self._training.adopt(averaged(trained), trained[-1].metrics)
        return True

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call."""
        before, self._counted = self._counted, dataclasses.replace(self.counts)
        metrics = {
            f"cluster/spot_{name}": value - getattr(before, name)
            for name, value in dataclasses.asdict(self._counted).items()
        }
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return metrics | {"cluster/spot_settle_seconds": seconds}


def averaged(trained: Sequence[Trained]) -> dict[str, np.ndarray]:
    """Returns the mean of heads and moments that sessions have come to, each weighing as much as its updates
    (local SGD, Stich, arXiv 1805.09767, with a single average at the end); of counts the largest.
    """
    if len(trained) == 1:
        return dict(trained[0].head)
    weights = np.asarray([each.updates for each in trained], np.float64)
    weights /= weights.sum()
    mean = {}
    for name, leaf in trained[0].head.items():
        leaves = [np.asarray(each.head[name]) for each in trained]
        if np.issubdtype(leaf.dtype, np.integer):
            mean[name] = np.max(leaves, axis=0)
        else:
            total = sum(weight * each for weight, each in zip(weights, leaves, strict=True))
            mean[name] = np.asarray(total, leaf.dtype)
    return mean
