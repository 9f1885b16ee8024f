"""Measured limits of the device: copying memory, and a large product of matrices."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def copy_bandwidth(megabytes: int) -> float:
    """Returns the bytes per second of a copy; reads and writes both count."""
    x = jax.random.normal(jax.random.key(0), (megabytes * 2**20 // 4,))
    copied = jax.jit(lambda x: x + 1.0)
    return 2 * x.nbytes / median_seconds(copied, x)


def matrix_rate(size: int) -> float:
    """Returns the floating-point operations per second of a product of bfloat16 matrices, summed in
    float32.
    """
    a, b = jax.random.normal(jax.random.key(1), (2, size, size), jnp.bfloat16)

    def product(a: Array, b: Array) -> Array:
        return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    return 2 * size**3 / median_seconds(jax.jit(product), a, b)


def median_seconds(function: Callable[..., Any], *args: Any, calls: int = 10, repeats: int = 7) -> float:
    """Returns the seconds of a call among so many that are started one after another, after one for warming
    up: the median of the repeats.
    """
    jax.block_until_ready(function(*args))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)
