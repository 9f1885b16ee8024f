"""Tree attention at shapes of real policies, verifying and decoding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from rljax.kernels.tree_attention import decode_attention, tree_attention
from rljax.numerics.attention import KEY_BLOCK
from rljax.numerics.kernel_choice import Implementation
from rljax.numerics.rows import Numerics

_NUMERICS = Numerics(row_invariant=False, compute_dtype="bfloat16")


def cases(quick: bool) -> list[Case]:
    """Every policy, decoding and verifying: slots all as long as the cache, and of any length up to it."""
    if quick:
        return [_case(TINY, 2, 128, 5, ragged=False)]
    sizes = [(16, 4096), (64, 4096), (16, 16_384)]
    some = [
        _case(policy, batch, length, nodes, ragged=False)
        for batch, length in sizes
        for policy in POLICIES
        for nodes in (16, 1)
    ]
    wide = [_case(policy, 16, 4096, 64, ragged=False) for policy in POLICIES]
    ragged = [_case(policy, 64, 4096, nodes, ragged=True) for policy in POLICIES for nodes in (16, 1)]
    return [*some, *wide, *ragged]


def _case(policy: PolicyShape, batch: int, capacity: int, nodes: int, ragged: bool) -> Case:
    heads, kv_heads, dim = policy.heads, policy.kv_heads, policy.head_dim
    room = capacity - nodes  # what a slot may hold before this pass
    lengths = np.random.default_rng(0).integers(0, room + 1, batch) if ragged else np.full(batch, room)
    parents = np.maximum(np.arange(nodes) - 1, 0) // 2  # a binary tree below the last token
    ancestors = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]

    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        key = jax.random.key(int(rng.integers(2**31)))

        def normal(index: int, *shape: int) -> Array:
            return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.bfloat16)

        args = (
            normal(0, batch, nodes, heads, dim),
            normal(1, batch, kv_heads, capacity // KEY_BLOCK, dim, KEY_BLOCK),
            normal(2, batch, kv_heads, capacity, dim),
            jnp.asarray(lengths, jnp.int32),
            normal(3, batch, nodes, kv_heads, dim),
            normal(4, batch, nodes, kv_heads, dim),
        )
        if nodes == 1:
            return args
        everywhere = jnp.broadcast_to(jnp.asarray(ancestors)[None], (batch, nodes, nodes))
        depth = jnp.broadcast_to(jnp.asarray(ancestors.sum(-1) - 1, jnp.int32)[None], (batch, nodes))
        return (*args, everywhere, depth)

    name = f"{policy.name}, {batch} slots of {'up to ' * ragged}{capacity}, "
    name += f"{nodes} nodes" if nodes > 1 else "decoding"
    functions = by_implementation(_verify if nodes > 1 else _decode)
    cached = 2 * int(lengths.sum()) * kv_heads * dim
    written_once = 2 * batch * nodes * (heads + kv_heads) * dim  # queries and output, the nodes' entries
    seen = int(lengths.sum()) * nodes + batch * int(ancestors.sum())  # pairs of node and position
    sizes = (heads, kv_heads, dim)
    return Case(name, sizes, make, functions, 2 * (cached + written_once), 4 * seen * heads * dim)


def _verify(*args: Array, implementation: Implementation) -> Array:
    return tree_attention(*args, _NUMERICS, implementation)


def _decode(*args: Array, implementation: Implementation) -> Array:
    return decode_attention(*args, _NUMERICS, implementation)
