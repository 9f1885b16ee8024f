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
