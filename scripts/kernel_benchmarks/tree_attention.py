"""Tree attention at shapes of real policies, verifying and decoding, beside cuDNN's and Tokamax's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernel_benchmarks.case import POLICIES, TINY, Case, PolicyShape, by_implementation
from kernel_benchmarks.peers import cudnn_attention, tokamax_attention
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
        # For others, keys and values as they want them; the mask is computed from the rest.
        plain = tuple(normal(index, batch, capacity, kv_heads, dim) for index in (5, 6))
        if nodes == 1:
            return (*args, *plain)
        everywhere = jnp.broadcast_to(jnp.asarray(ancestors)[None], (batch, nodes, nodes))
        depth = jnp.broadcast_to(jnp.asarray(ancestors.sum(-1) - 1, jnp.int32)[None], (batch, nodes))
        return (*args, *plain, everywhere, depth)

    name = f"{policy.name}, {batch} slots of {'up to ' * ragged}{capacity}, "
    name += f"{nodes} nodes" if nodes > 1 else "decoding"
    functions = by_implementation(_verify if nodes > 1 else _decode) | {
        "cudnn": _by_peer(cudnn_attention),
        "tokamax": _by_peer(tokamax_attention),
    }
    cached = 2 * int(lengths.sum()) * kv_heads * dim
    written_once = 2 * batch * nodes * (heads + kv_heads) * dim  # queries and output, the nodes' entries
    seen = int(lengths.sum()) * nodes + batch * int(ancestors.sum())  # pairs of node and position
    sizes = (heads, kv_heads, dim)
    return Case(name, sizes, make, functions, 2 * (cached + written_once), 4 * seen * heads * dim)


def _verify(*args: Array, implementation: Implementation) -> Array:
    return tree_attention(*args[:6], *args[8:], _NUMERICS, implementation)


def _decode(*args: Array, implementation: Implementation) -> Array:
    return decode_attention(*args[:6], _NUMERICS, implementation)


def _by_peer(attention: Callable[..., Array]) -> Callable[..., Array]:
    """`attention` over a cache [B, S, Hk, D] that holds the new entries in their places."""

    def compute(*args: Array) -> Array:
        queries, _, _, lengths, _, _, keys, values, *tree = args
        nodes, capacity = queries.shape[1], keys.shape[1]
        mask = None
        if tree:
            place = jnp.arange(capacity)[None] - lengths[:, None]  # of a position among the nodes: [B, S]
            node = jnp.clip(place, 0, nodes - 1)[:, None, :]  # [B, 1, S]
            sees = jnp.take_along_axis(tree[0], jnp.broadcast_to(node, (len(node), nodes, capacity)), 2)
            inside = (place >= 0) & (place < nodes)
            mask = ((place < 0)[:, None] | (inside[:, None] & sees))[:, None]
        return attention(queries, keys, values, lengths + nodes, mask)

    return compute
