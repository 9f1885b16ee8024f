"""Programs of drafters: all that a run would compile are noted, and the largest of each kind is compiled.

A drafter's own method for compiling behind a rollout asks a `Recording` for its programs, so a plan knows of
every one of them.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.engine.executables import ExecutablePool
from rljax.planning.programs import PlanningPool


class Recording(ExecutablePool):
    """A pool that only notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[Hashable, tuple[Callable[..., Any], tuple, tuple[int, ...]]] = {}

    def get(
        self,
        key: Hashable,
        function: Callable[..., Any],
        args: tuple,
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        self._asked.setdefault(key, (function, args, donate_argnums))

    def compile_largest(self, pool: PlanningPool) -> None:
        """Compiles in `pool` the program of every kind that has the largest arguments; the others are counted
        there.
        """
        kinds: dict[str, list[Hashable]] = {}
        for key in self._asked:
            kinds.setdefault(key[0], []).append(key)
        for kind, keys in kinds.items():
            sizes = {key: sum(map(_size, jax.tree.leaves(self._asked[key][1]))) for key in keys}
            largest = max(reversed(keys), key=sizes.__getitem__)  # of equals the last: the deepest tree
            pool.get(largest, *self._asked[largest])
            pool.skip(kind, len(keys) - 1)


def _size(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf))) * jnp.result_type(leaf).itemsize
