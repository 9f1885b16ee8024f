"""A head's training on a worker that has nothing to decode (TLT, section 4.2).

    states = reader.read(params, samples)        # features, by a forward pass of the policy
    session = HeadSession(trainer, shared, head) # goes on from the arrays of another session's `saved`
    session.add(states)
    metrics = session.update()                   # stop after any of them; None without data
    copy = session.copy()                        # weights and optimizer; the copying goes on beside updates

Only trained arrays are saved: not the policy's embeddings and LM head, and no features, which the next
worker computes again or gets from those that still have them.
"""

from collections.abc import Iterable, Mapping

import jax
import numpy as np

from drafters.eagle.spot_trainer import HeadTrainer
from drafters.eagle.states import States
from rljax.models.transformer import Params


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
        """Returns `HeadTrainer.trained_leaves` in copies."""
        return self._trainer.copy()
