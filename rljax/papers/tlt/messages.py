"""What coordinator, driver and workers say to each other about training in idle time (`spot.py`).

As all messages between them (`rljax/cluster/messages.py`), they may be lost, late, doubled and out of order.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rljax.cluster.messages import IdleEvent, IdleOrder, Sample


@dataclasses.dataclass(frozen=True)
class Prepared(IdleEvent):
    """A worker has computed the policy's features of some samples.

    Attributes:
      batch: number of the `Prepare`.
      features: reference to them; None where the leader keeps its own.
      seconds: that it took.
      delay: seconds at most that work has waited for the forward pass of an earlier batch.
    """

    batch: int
    features: Any
    seconds: float = 0.0
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trained(IdleEvent):
    """What a leader has done in a session so far.

    Attributes:
      session: number of the session.
      updates: of the head in the session.
      training: whether the session goes on; the last event of a session says that it does not.
      seconds: that the updates took.
      delay: seconds at most that work waited for an update or a forward pass of the session.
      head: weights and optimizer state as they are now, by name; None if they are not new.
      metrics: of the last update.
    """

    session: int
    updates: int
    training: bool
    seconds: float = 0.0
    delay: float = 0.0
    head: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrainDrafter(IdleOrder):
    """Train the head until something else is asked for.

    Attributes:
      session: number of the session, ascending.
      version: of the policy that the worker has to have.
      updates: at most.
      save_every: updates between two `Trained` with the head.
      head: reference to weights and optimizer state to go on from, which the driver adds; None begins with
        the head that the worker drafts with.
    """

    session: int
    version: int
    updates: int
    save_every: int
    head: Any = None


@dataclasses.dataclass(frozen=True)
class Prepare(IdleOrder):
    """Compute the policy's features of samples.

    Attributes:
      batch: number of the batch, ascending.
      version: of the policy that the worker has to have.
      samples: prompt and response ids of each.
    """

    batch: int
    version: int
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True)
class TrainingData(IdleOrder):
    """Train on features that another worker has computed, by the number of their batch."""

    session: int
    features: Mapping[int, Any]


@dataclasses.dataclass(frozen=True)
class StopTraining(IdleOrder):
    """Train no longer, and say how far it went."""

    session: int


SpotOrder = TrainDrafter | Prepare | TrainingData | StopTraining
"""What a worker without requests is told to do."""
