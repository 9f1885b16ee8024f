"""Compaction by every backend: exactly the positions of a path change, and nothing is copied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.kernels.compaction import compaction, mosaic_gpu, mosaic_tpu
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from tests.engines import CONFIGS, SAMPLING, ask, decode, lively_params, speculate, stored_pool, tangled
from tests.kernels.compilation import HOPPER, compile_for
from tests.kernels.test_tree_attention import NATIVE, POLICIES, check_no_copy, shapes

_BLOCK = 64
_WIDE = 128  # the heads that a TPU's kernel takes


def _case(lengths, counts, capacity, nodes, most, kv_heads=2, dim=64, dtype="float32", seed=0):
    """Arguments of `compaction`: nodes that are on no path are NaN."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    cached = rng.standard_normal((2, batch, kv_heads, capacity, dim), np.float32)
    new = np.full((2, batch, nodes, kv_heads, dim), np.nan, np.float32)
    path = np.zeros((batch, most), np.int32)
    for slot, count in enumerate(counts):
        on_it = np.sort(rng.choice(nodes, count, replace=False))
        path[slot, :count] = on_it
        new[:, slot, on_it] = rng.standard_normal((2, count, kv_heads, dim), np.float32)
    keys = cached[0].reshape(batch, kv_heads, -1, _BLOCK, dim).swapaxes(-1, -2)
    arrays = (jnp.asarray(x, dtype) for x in (keys, cached[1], new[0], new[1]))
    return (*arrays, *(jnp.asarray(x, jnp.int32) for x in (path, counts, lengths)))


def _expected(keys, values, node_keys, node_values, path, count, lengths):
    keys, values, node_keys, node_values = (np.array(x) for x in (keys, values, node_keys, node_values))
    for slot in range(len(path)):
        for depth in range(int(count[slot])):
            position, node = int(lengths[slot]) + depth, int(path[slot, depth])
            if position < values.shape[2]:
                keys[slot, :, position // _BLOCK, :, position % _BLOCK] = node_keys[slot, node]
                values[slot, :, position] = node_values[slot, node]
    return keys, values


@functools.cache
def _program(implementation):
    return jax.jit(lambda *args: compaction(*args, implementation), donate_argnums=(0, 1))


def _check(implementation, case):
    expected = _expected(*case)
    got = _program(implementation)(*(jnp.array(x) for x in case))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


# Lengths, counts, capacity, nodes, most. The first two share a program.
_SHAPES = {
    "across blocks": ((0, 60, 63, 64, 100), (1, 5, 7, 0, 3), 128, 9, 8),
    "no room": ((128, 200, 120, 127, 64), (3, 4, 8, 2, 0), 128, 9, 8),
    "many": ((1, 63), (64, 64), 128, 64, 64),
    "more than a block": ((70,), (100,), 192, 100, 100),
}


@pytest.mark.default_cases("xla-*", "interpret_gpu-64-across blocks", "interpret_tpu-128-across blocks")
@pytest.mark.parametrize("shape", (*_SHAPES, "bfloat16"))
@pytest.mark.parametrize(
    ("implementation", "dim"),
    [("xla", 64), ("interpret_gpu", 64), ("interpret_tpu", _WIDE), ("interpret_tpu", 64)],
)
def test_writes_the_path_and_nothing_else(implementation, dim, shape):
    if shape == "bfloat16":
        wide = _WIDE if implementation != "interpret_tpu" else dim
        case = _case((62, 10), (4, 3), 128, 5, 4, kv_heads=1, dim=wide, dtype="bfloat16")
    else:
        lengths, counts, capacity, *nodes = _SHAPES[shape]
        whole = capacity if (implementation, dim) != ("interpret_tpu", 64) else -(-capacity // 128) * 128
        case = _case(lengths, counts, whole, *nodes, dim=dim)
    _check(implementation, case)


@pytest.mark.parametrize(("mode", "dim"), [("on_wait", 64), ("eager", _WIDE)])
def test_a_tpu_waits_for_its_copies(mode, dim):
    """Where a copy moves nothing before it is waited for, and where it does as soon as it begins."""
    case = _case((0, 62, 63, 100, 124), (1, 5, 3, 0, 7), 256, 8, 7, kv_heads=1, dim=dim)
    params = pltpu.InterpretParams(dma_execution_mode=mode)
    got = jax.jit(functools.partial(mosaic_tpu.compaction, interpret=params))(*case)
    for one, other in zip(got, _expected(*case), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.accelerator
@pytest.mark.parametrize("policy", POLICIES)
def test_on_the_device(policy):
    _, kv_heads, dim = POLICIES[policy]
    case = _case((0, 60, 4090, 4096), (3, 16, 16, 2), 4096, 16, 16, kv_heads, dim, "bfloat16")
    _check(NATIVE[jax.default_backend()], case)


@pytest.mark.parametrize(
    ("implementation", "dim", "dtype", "why"),
    [
        ("interpret_gpu", 32, "float32", "heads are 64 or 128 wide, not 32"),
        ("interpret_gpu", 64, "float16", "keys and values are float32 or bfloat16, not float16"),
        ("interpret_tpu", 64, "float16", "keys and values are float32 or bfloat16, not float16"),
        ("interpret_tpu", 32, "float32", "heads are 64 or a multiple of 128 wide, not 32"),
        ("interpret_tpu", 64, "float32", "a cache of heads of 64 has a multiple of 128 positions, not 64"),
    ],
)
def test_refusals(implementation, dim, dtype, why):
    with pytest.raises(Refused, match=why):
        compaction(*_case((5,), (1,), 64, 2, 2, dim=dim, dtype=dtype), implementation)


def _shapes(policy, batch=16, capacity=4096, nodes=16, dtype=jnp.bfloat16):
    _, *cache, slots, node_keys, node_values, _, path = shapes(
        *POLICIES[policy], batch, capacity, nodes, dtype
    )
    return *cache, node_keys, node_values, path, slots, slots


@pytest.mark.parametrize(
    ("device", "policy"),
    [
        ("v5e", "SmolLM2-135M"),
        (HOPPER, "Qwen2.5-7B"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("v6e", "Qwen2.5-1.5B"), (HOPPER, "Llama-3.1-8B")]
        ),
    ],
)
def test_compiles_in_place(device, policy):
    kernel = (mosaic_gpu if device == HOPPER else mosaic_tpu).compaction
    program = compile_for(device, kernel, *_shapes(policy), donate=(0, 1))
    check_no_copy(program, *POLICIES[policy], aliased=1)
    compile_for(device, kernel, *_shapes(policy, 2, 256, 64, jnp.float32))


@functools.lru_cache
def _speculated(implementation):
    config = dataclasses.replace(CONFIGS["three"], head_dim=_WIDE)
    numerics = Numerics(kernels=KernelChoice(compaction=implementation))
    engine = DecodeEngine(config, numerics, SAMPLING, Buckets((2,), (128,)), [], 64, stored_pool())
    params = engine.load_params(lively_params(config))
    asked = ask([5, 60], [12, 9])
    plain = decode(engine, params, asked, capacity=128)
    drafts = tangled([tokens for tokens, _ in plain])
    return plain, speculate(engine, params, asked, drafts, 7, capacity=128).outputs


@pytest.mark.default_cases("interpret_tpu")
@pytest.mark.parametrize("implementation", ["interpret_gpu", "interpret_tpu"])
def test_the_engine_with_kernels_gives_the_same_bits(implementation):
    plain, speculated = _speculated(implementation)
    assert speculated == plain == _speculated("xla")[1]
