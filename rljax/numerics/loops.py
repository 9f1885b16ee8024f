"""Loops over parts of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def mapped(function: Callable[[Any], Any], parts: Any, behind: Array) -> Any:
    """As `lax.map(function, parts)`, into arrays that are not made before `behind` is; without gradients.

    They are filled with an entry of `behind` first. Those of `lax.map` are zeros, which depend on nothing:
    XLA makes them for all layers together, and a GPU holds the results of all layers from the start.
    """
    count = len(jax.tree.leaves(parts)[0])

    def part(number: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), parts)

    def write(number: Array, results: Any) -> Any:
        return jax.tree.map(
            lambda whole, one: lax.dynamic_update_index_in_dim(whole, one, number, 0),
            results,
            function(part(number)),
        )

    filler = behind.ravel()[0]
    shapes = jax.eval_shape(lambda: function(part(0)))
    empty = jax.tree.map(lambda y: jnp.full((count, *y.shape), filler.astype(y.dtype)), shapes)
    return lax.fori_loop(0, count, write, empty)
