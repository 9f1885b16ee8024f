"""Tree attention by every backend, against sums in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels.switch import Refused
from rljax.kernels.tree_attention import decode_attention, mosaic_tpu, tree_attention
from rljax.models.numerics import Numerics
from tests.kernels.compilation import HOPPER, TPUS, compile_for

_BLOCK = 64
_NATIVE = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


def _case(lengths, capacity, nodes, heads, kv_heads, dim, dtype=np.float32, seed=0):
    """Arguments of `tree_attention` before `numerics`: random trees over a cache with room for `capacity`
    positions, which is NaN from the first block on that has no committed position.
    """
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    keys, values = normal(batch, kv_heads, capacity, dim), normal(batch, kv_heads, capacity, dim)
    for slot, length in enumerate(lengths):
        values[slot, :, length:] *= 100  # finite, and behind the length
        keys[slot, :, length:] *= 100
        unread = -(-length // _BLOCK) * _BLOCK
        keys[slot, :, unread:], values[slot, :, unread:] = np.nan, np.nan
    keys = keys.reshape(batch, kv_heads, -1, _BLOCK, dim).swapaxes(-1, -2)
    ancestors = np.zeros((batch, nodes, nodes), bool)
    for slot in range(batch):
        for node in range(nodes):
            if node:
                ancestors[slot, node] = ancestors[slot, rng.integers(node)]
            ancestors[slot, node, node] = True
    depth = ancestors.sum(-1).astype(np.int32) - 1
    arrays = (normal(batch, nodes, heads, dim), keys, values)
    node_arrays = (normal(batch, nodes, kv_heads, dim), normal(batch, nodes, kv_heads, dim))
    cast = functools.partial(jnp.asarray, dtype=dtype)
    return (
        *map(cast, arrays),
        jnp.asarray(lengths, jnp.int32),
        *map(cast, node_arrays),
        jnp.asarray(ancestors),
        jnp.asarray(depth),
    )


def _expected(queries, keys, values, lengths, node_keys, node_values, ancestors, depth):
    """The sum as it is defined, one query after the other, in float64."""
    queries, keys, values, node_keys, node_values = (
        np.asarray(x, np.float64) for x in (queries, keys, values, node_keys, node_values)
    )
    lengths, ancestors = np.asarray(lengths), np.asarray(ancestors)
    batch, nodes, heads, dim = queries.shape
    group = heads // values.shape[1]
    out = np.zeros_like(queries)
    for slot in range(batch):
        length = lengths[slot]
        for node in range(nodes):
            path = np.flatnonzero(ancestors[slot, node])
            for head in range(heads):
                kv = head // group
                cached = keys[slot, kv].swapaxes(-1, -2).reshape(-1, dim)[:length]
                k = np.concatenate([cached, node_keys[slot, path, kv]])
                v = np.concatenate([values[slot, kv, :length], node_values[slot, path, kv]])
                if len(k):
                    scores = k @ queries[slot, node, head] * dim**-0.5
                    weights = np.exp(scores - scores.max())
                    out[slot, node, head] = weights @ v / weights.sum()
    return out


def _run(implementation, case):
    compute = jax.jit(lambda *args: tree_attention(*args, Numerics(), implementation))
    return np.asarray(compute(*case), np.float64)


def _relative_error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


# Slots of no position, within a block, at its end, over chunks of the TPU and splits of the GPU, and a full one.
_SHAPES = {
    "one node": ((0, 1, 63, 64, 127), 128, 1, 4, 2, 64),
    "grouped heads": ((5, 130), 256, 5, 14, 2, 64),
    "many nodes": ((70,), 128, 64, 6, 2, 64),
    "full": ((128, 64), 128, 3, 2, 2, 64),
    "several chunks": ((1024, 1025, 1200, 40), 1280, 2, 2, 1, 64),
    "wide heads": ((100,), 128, 7, 7, 1, 128),
}


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tpu(shape, dtype):
    case = _case(*_SHAPES[shape], dtype=dtype)
    error = _relative_error(_run("interpret_tpu", case), _expected(*case))
    assert error < {"float32": 1e-6, "bfloat16": 4e-3}[dtype]


def _shapes(heads, kv_heads, dim, batch, capacity, nodes, dtype=jnp.bfloat16):
    """Arguments of `tree_attention` before `numerics`, without numbers."""

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    return (
        array(batch, nodes, heads, dim),
        array(batch, kv_heads, capacity // _BLOCK, dim, _BLOCK),
        array(batch, kv_heads, capacity, dim),
        array(batch, dtype=jnp.int32),
        array(batch, nodes, kv_heads, dim),
        array(batch, nodes, kv_heads, dim),
        array(batch, nodes, nodes, dtype=jnp.bool_),
        array(batch, nodes, dtype=jnp.int32),
    )


_POLICIES = {
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
}


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("device", TPUS)
def test_compiles_for_tpus(device, policy):
    compute = functools.partial(mosaic_tpu.tree_attention, numerics=Numerics())
    for nodes in (1, 16, 64):
        program = compile_for(device, compute, *_shapes(*_POLICIES[policy], 16, 4096, nodes))
        assert "tree_attention" in program.as_text()
    compile_for(device, compute, *_shapes(*_POLICIES[policy], 2, 256, 16, jnp.float32))
