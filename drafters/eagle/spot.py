"""A head's training on a worker that has nothing to decode (TLT, section 4.2); see `rljax/cluster/spot.py`.

    states = spot.prepare(params, samples)       # features, by a forward pass of the policy
    session = spot.session(params, head)         # goes on from the arrays of another session's `saved`
    session.add(states)
    metrics = session.update()                   # stop after any of them; None without data
    copy = session.copy()                        # weights and optimizer; the copying goes on beside updates

Only trained arrays are saved: not the policy's embeddings and LM head, and no features, which the next
worker computes again or gets from those that still have them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.model import init_head, shared_params
from drafters.eagle.spot_trainer import HeadTrainer
from drafters.eagle.states import States
from drafters.training import TrainingLimits
from rljax.models.transformer import Params
from rljax.processes import to_host

if TYPE_CHECKING:
    from drafters.eagle.drafter import EagleDrafter


class HeadOnWorkers:
    """The `WorkerTraining` of a drafter's head."""

    def __init__(self, drafter: "EagleDrafter") -> None:
        self._drafter = drafter

    @property
    def limits(self) -> TrainingLimits:
        arguments = self._drafter.arguments
        updates = arguments.slices if arguments.train else 0
        tokens = arguments.slices * arguments.rows * arguments.pack_length
        return TrainingLimits(updates, tokens, self._drafter.longest, arguments.train_every)

    def delegate(self) -> None:
        self._drafter.delegated = True

    def saved(self) -> dict[str, np.ndarray]:
        trainer, restored = self._drafter.trainer, self._drafter.restored or {}
        if trainer is None:
            return {name: array for name, array in restored.items() if name.startswith("train.")}
        return {name: np.array(leaf) for name, leaf in to_host(trainer.trained_leaves()).items()}

    def adopt(self, saved: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> None:
        self._drafter.trainer.load_trained(saved)
        self._drafter.spot_metrics = dict(metrics)

    def warm_up(self, params: Params) -> None:
        drafter = self._drafter
        self.prepare(params, [((0,), (0, 0))])
        head = init_head(drafter.config, params, drafter.arguments.seed)
        drafter.make_trainer(head, drafter.engine.pool).warm_up(shared_params(params, drafter.engine.config))

    def prepare(self, params: Params, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[States]:
        return list(self._drafter.reader.read(params, samples))

    def session(self, params: Params, saved: Mapping[str, np.ndarray] | None) -> "HeadSession":
        trainer = self._drafter.make_trainer(self._drafter.trainer.params, self._drafter.engine.pool)
        return HeadSession(trainer, shared_params(params, self._drafter.engine.config), saved)


class HeadSession:
    """A head in training; see the module's docstring.

    Args:
      trainer: a new one.
      shared: the policy's embeddings and LM head.
      head: `train.*` of `HeadTrainer.state`; None begins with the trainer's weights.

    Raises:
      CheckpointError: the arrays belong to another head.
    """

    def __init__(self, trainer: HeadTrainer, shared: Params, head: Mapping[str, np.ndarray] | None) -> None:
        self._trainer, self._shared = trainer, shared
        if head is not None:
            trainer.load_trained(head)

    def add(self, states: Iterable[States]) -> None:
        """Takes samples with their features."""
        for ids, features, mask in states:
            known = len(ids) - 1  # the policy has not read the last token
            self._trainer.add(ids[:known], features[:known], mask[:known])

    def update(self) -> dict[str, float] | None:
        """Updates once, and returns the update's metrics; None without data."""
        return self._trainer.slice(self._shared)

    def copy(self) -> dict[str, jax.Array]:
        """Returns the trained arrays in copies that later updates leave alone, on their way to the host."""
        copies = {name: jnp.copy(leaf) for name, leaf in self._trainer.trained_leaves().items()}
        for leaf in copies.values():
            leaf.copy_to_host_async()
        return copies
