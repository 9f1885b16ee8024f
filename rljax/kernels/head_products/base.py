"""The products of heads in plain JAX: the contract, and the backend `xla`."""

import itertools

import jax.numpy as jnp
from jax import Array

from rljax.kernels.head_products import HeadWeights
from rljax.numerics import products
from rljax.numerics.rows import Numerics, apply_rope, rms_norm


def head_products(
    x: Array, angles: Array, weights: HeadWeights, with_products: bool, numerics: Numerics
) -> tuple[Array, ...]:
    """See the package."""
    rows, dim = x.reshape(-1, x.shape[-1]), 2 * angles.shape[-1]
    found, heads = [], []
    for matrix, bias, scale in itertools.zip_longest(weights.matrices, weights.biases, weights.scales):
        y = products.dot(rows, matrix).reshape(*x.shape[:-1], len(matrix))
        found.append((y if bias is None else y + bias[None, None]).astype(x.dtype))
        of_heads = found[-1].reshape(*x.shape[:-1], -1, dim)
        if scale is not None:
            of_heads = rms_norm(of_heads, scale, weights.epsilon, numerics)
        heads.append(apply_rope(of_heads, angles) if len(heads) < 2 else of_heads)
    y = jnp.concatenate(heads, axis=2)
    return (y, *found) if with_products else (y,)
