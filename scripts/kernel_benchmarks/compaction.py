"""Compaction of accepted paths at shapes of real policies: one layer's cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from rljax.kernels.compaction import compaction
from rljax.numerics.attention import KEY_BLOCK

_ACCEPTED = 4  # nodes of a path, the last token included


def cases(quick: bool) -> list[Case]:
    """Every policy, a token a slot (decoding) and four of 16 nodes."""
    if quick:
        return [_case(TINY, 2, 256, 5)]
    sizes = [(16, 4096), (64, 4096)]
    return [
        _case(policy, batch, length, nodes)
        for batch, length in sizes
        for policy in POLICIES
        for nodes in (16, 1)
    ]


def _case(policy: PolicyShape, batch: int, capacity: int, nodes: int) -> Case:
    kv_heads, dim = policy.kv_heads, policy.head_dim
    count = min(_ACCEPTED, nodes)
    path = np.zeros((batch, nodes), np.int32)
    path[:, :count] = np.linspace(0, nodes - 1, count).astype(np.int32)

    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        key = jax.random.key(int(rng.integers(2**31)))
        lengths = rng.integers(0, capacity - nodes, batch)

        def normal(index: int, *shape: int) -> Array:
            return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.bfloat16)

        return (
            normal(0, batch, kv_heads, capacity // KEY_BLOCK, dim, KEY_BLOCK),
            normal(1, batch, kv_heads, capacity, dim),
            normal(2, batch, nodes, kv_heads, dim),
            normal(3, batch, nodes, kv_heads, dim),
            jnp.asarray(path),
            jnp.full(batch, count, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
        )

    name = f"{policy.name}, {batch} slots of {capacity}, {count} of {nodes} nodes"
    moved = 2 * 2 * batch * count * kv_heads * dim  # keys and values, read and written
    return Case(name, (kv_heads, dim), make, by_implementation(compaction), 2 * moved, 0, donated=(0, 1))
