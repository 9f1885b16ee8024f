"""The state of a head in checkpoints: its arrays by name, their check, and a head that is not trained."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.errors import CheckpointError
from rljax.learning.accumulation import TrainState
from rljax.models.transformer import Params


class TrainerState:
    """Weights in training, with what their optimizer keeps: a part of every trainer of a drafter.

    Attributes:
      saved_with: for an error's message, what arrays of a checkpoint are of.
    """

    saved_with: str
    _state: TrainState

    @property
    def params(self) -> Params:
        """A copy of the present weights, which later updates do not change. (Updates consume the trainer's
        arrays, so that training needs no memory for a second state.)
        """
        return jax.tree.map(jnp.copy, self._state.params)

    @property
    def updates(self) -> int:
        """Number of updates so far, without skipped ones."""
        return int(self._state.updates)

    def trained_leaves(self) -> dict[str, Array]:
        """Returns weights and optimizer state by name. The next update consumes these arrays."""
        return {f"train.{name}": leaf for name, leaf in named_leaves(self._state).items()}

    def copy(self) -> dict[str, Array]:
        """Returns `trained_leaves` in copies that later updates leave alone, on their way to the host."""
        copies = {name: jnp.copy(leaf) for name, leaf in self.trained_leaves().items()}
        for leaf in copies.values():
            leaf.copy_to_host_async()
        return copies

    def load_trained(self, saved: Mapping[str, np.ndarray]) -> None:
        """Restores `trained_leaves`; raises a CheckpointError where they belong to another trainer."""
        expected = self.trained_leaves()
        check_same(expected, saved, "train.", self.saved_with)
        # Copies, since updates consume these arrays.
        leaves = [jnp.array(saved[name], copy=True) for name in expected]
        self._state = self._placed(jax.tree.unflatten(jax.tree.structure(self._state), leaves))

    def _placed(self, state: TrainState) -> TrainState:
        return state


class FrozenHead:
    """A head that only drafts, in the place of its trainer.

    Args:
      params: its weights, until `load_state`.

    Attributes:
      params: its weights.
      updates: the number of updates behind the weights; 0 where it is unknown.
    """

    def __init__(self, params: Params) -> None:
        self.params, self.updates = params, 0

    def begin_step(self, step: int) -> None:
        """Does nothing: it is not trained."""

    def reserve(self, size: int) -> None:
        """Does nothing: it has no buffer."""

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the weights from the arrays that `HeadTrainer.state` returned.

        Raises:
          CheckpointError: they belong to another head.
        """
        expected = {f"train.params.{name}": leaf for name, leaf in named_leaves(self.params).items()}
        check_same(expected, state, "train.params.", "the policy and head")
        leaves = [jnp.asarray(state[name]) for name in expected]
        self.params = jax.tree.unflatten(jax.tree.structure(self.params), leaves)
        self.updates = int(state["train.updates"])


def check_same(expected: Mapping[str, Any], state: Mapping[str, Any], prefix: str, what: str) -> None:
    """Raises a CheckpointError unless the entries of `state` under `prefix` have the shapes of `expected`."""
    surplus = [name for name in state if name.startswith(prefix) and name not in expected]
    for name in [*expected, *surplus]:
        here, there = _shape(expected.get(name)), _shape(state.get(name))
        if here != there:
            raise CheckpointError(
                f"{name} is {there} in the checkpoint of the drafter, but {here} in this run; give the run"
                f" {what} it was saved with"
            )


def named_leaves(state: TrainState | Params) -> dict[str, Array]:
    """Returns the leaves by path, such as `params.layer.q`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _shape(leaf: Array | np.ndarray | None) -> str:
    return "absent" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"


def nested_leaves(leaves: Mapping[str, Any]) -> Params:
    """Converts arrays named `layer.q` and the like to a params pytree."""
    params: Params = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return params
