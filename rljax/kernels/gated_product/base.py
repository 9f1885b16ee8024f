"""The gated product in plain JAX: the contract, and the backend `xla`."""

from collections.abc import Callable

from jax import Array

from rljax.numerics import products


def gated_product(
    x: Array, gate: Array, up: Array, activation: Callable[[Array], Array], with_products: bool
) -> tuple[Array, ...]:
    """See the package."""
    rows = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], len(gate))
    both = [products.dot(rows, weight).reshape(shape).astype(x.dtype) for weight in (gate, up)]
    y = activation(both[0]) * both[1]
    return (y, *both) if with_products else (y,)
