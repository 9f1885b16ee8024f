"""Training of drafters beside decoding, as objects that a drafter hands out.

`Training` is in the loop: small slices between passes. Where other processes decode, the one that trains the
policy trains the drafter, too (`SharedTraining`), or lets workers do so that have nothing to decode
(`WorkerTraining`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class Training:
    """Trains a drafter in small slices between passes. A subclass writes `train`; the rest has defaults.

    Attributes:
      below: the drafter is trained inside a rollout once at most this many responses are running.
      trained: False for a new drafter, whose drafts are guesses.
      shared: trains for drafters in other processes; None where it cannot.
      spot: lets workers train; None where it cannot.
    """

    below: int = 0
    trained: bool = True
    shared: "SharedTraining | None" = None
    spot: "WorkerTraining | None" = None

    def train(self) -> bool:
        """Runs one slice; returns False when nothing is left to do or the time budget is spent."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Called before the first rollout and before `Drafter.load_state`: the drafter will neither be
        trained nor saved, and does not keep what only training needs.
        """

    def warm_up(self) -> None:
        """Compiles a slice, and measures its time, after `Drafter.refresh`."""

    def compile_later(self) -> Callable[[], None]:
        """Returns what compiles a slice, for a thread to call after `Drafter.refresh`. Until it has, `train`
        does nothing.
        """
        return lambda: None


class SharedTraining(Protocol):
    """Training whose weights frozen drafters in other processes draft with: rollout workers decode, and the
    process that trains the policy trains the drafter, too.
    """

    def read(
        self, params: Any, responses: Sequence[tuple[Sequence[int], np.ndarray]], seconds: float
    ) -> None:
        """Takes responses that other processes have decoded to train on, as if they had been decoded here;
        `Drafter.learn` follows.

        Args:
          params: the policy's weights that sampled them, in the engine's form.
          responses: prompt and response ids of each.
          seconds: time that decoding them took.
        """

    def weights(self) -> dict[str, np.ndarray]:
        """Returns the arrays of `Drafter.state` that a frozen drafter needs, which takes them by
        `load_state`; none as long as nothing was trained or loaded.
        """


@dataclasses.dataclass(frozen=True)
class TrainingLimits:
    """How much a drafter is trained.

    Attributes:
      updates: most updates in a rollout; 0 never trains it.
      tokens: of the samples of a rollout, at most.
      batch_tokens: of the samples that are prepared at a time.
      every: train only every N steps.
    """

    updates: int
    tokens: int
    batch_tokens: int
    every: int = 1


class WorkerTraining(Protocol):
    """Training by workers that have nothing to decode.

    Attributes:
      limits: how much the drafter is trained.
    """

    limits: TrainingLimits

    def delegate(self) -> None:
        """Called in the process that trains the policy: others train the drafter from now on."""

    def saved(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a session goes on from; none as long as nothing was trained or loaded."""

    def adopt(self, saved: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> None:
        """Takes what a session has come to: arrays as of `saved`, and metrics of its last update."""

    def warm_up(self, params: Any) -> None:
        """Compiles what `prepare` and sessions need, on a worker.

        Args:
          params: weights of the policy's shapes, in the engine's form.
        """

    def prepare(self, params: Any, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Any:
        """Returns what training needs of samples (prompt and response ids of each); it can be pickled."""

    def session(self, params: Any, saved: Mapping[str, np.ndarray] | None) -> "TrainingSession":
        """Begins to train: from what another session has saved, or with None from what it drafts with."""


class TrainingSession(Protocol):
    """A drafter that is trained, beside the one that drafts."""

    def add(self, prepared: Any) -> None:
        """Takes what `WorkerTraining.prepare` returned, here or on another worker."""

    def update(self) -> dict[str, float] | None:
        """Updates once, and returns the update's metrics; None without data."""

    def copy(self) -> dict[str, Any]:
        """Returns the arrays of `WorkerTraining.saved` as they are now, on their way to the host."""
