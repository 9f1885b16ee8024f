"""Tree attention by every backend, against sums in float64."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine import kv_cache
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.kernels import switch
from rljax.kernels.tree_attention import decode_attention, mosaic_gpu, mosaic_tpu, tree_attention
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from tests.engines import CONFIGS, SAMPLING, ask, decode, lively_params, speculate, tangled
from tests.exactness import check_same
from tests.kernels.compilation import HOPPER, compile_for

_BLOCK = 64
NATIVE = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
_INTERPRETED = ("interpret_gpu", "interpret_tpu")
_KERNELS = [*_INTERPRETED, pytest.param("native", marks=pytest.mark.accelerator)]


def _case(lengths, capacity, nodes, heads, kv_heads, dim, dtype="float32", unread=np.nan, seed=0):
    """Arguments of `tree_attention` before `numerics`, as NumPy's arrays: random trees over a cache with room
    for `capacity` positions, which is `unread` from the first block on that has no committed position.
    """
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    keys, values = normal(batch, kv_heads, capacity, dim), normal(batch, kv_heads, capacity, dim)
    for slot, length in enumerate(lengths):
        values[slot, :, length:] *= 100  # finite, and behind the length
        keys[slot, :, length:] *= 100
        end = -(-length // _BLOCK) * _BLOCK
        keys[slot, :, end:], values[slot, :, end:] = unread, unread
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
    arrays, node_arrays = ([x.astype(jnp.dtype(dtype)) for x in each] for each in (arrays, node_arrays))
    return (*arrays, np.asarray(lengths, np.int32), *node_arrays, ancestors, depth)


def _expected(queries, keys, values, lengths, node_keys, node_values, ancestors, depth):
    """The sum as it is defined, one query after the other, in float64."""
    queries, keys, values, node_keys, node_values = (
        np.asarray(x, np.float64) for x in (queries, keys, values, node_keys, node_values)
    )
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


def _named(implementation):
    return NATIVE[jax.default_backend()] if implementation == "native" else implementation


@functools.cache
def _program(implementation):
    return jax.jit(lambda *args: tree_attention(*args, Numerics(), implementation))


def _run(implementation, case):
    return np.asarray(_program(_named(implementation))(*case), np.float64)


def _relative_error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


# Lengths, capacity, nodes, heads, key heads, head size: slots of no position, within a block, at its end,
# beyond a chunk (TPU) and a split (GPU), and full ones; one tile of rows, several, and groups of them.
_SHAPES = {
    "one node": ((0, 1, 63, 64, 127), 128, 1, 4, 2, 64),
    "grouped heads": ((5, 130), 256, 5, 9, 3, 64),
    "many nodes": ((70,), 128, 64, 3, 1, 64),
    "several chunks": ((1024, 1025, 1280, 40), 1280, 2, 2, 1, 64),
    "wide heads": ((100,), 128, 7, 7, 1, 128),
}
_TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


def _cases():
    """GPUs' kernels take bfloat16 alone."""
    for shape in _SHAPES:
        dtype = "bfloat16" if shape == "several chunks" else "float32"
        yield from ((implementation, dtype, shape) for implementation in ("xla", "interpret_tpu"))
        if shape != "grouped heads":
            yield "interpret_gpu", "bfloat16", shape


@pytest.mark.default_cases("xla-*", "*-several chunks")
@pytest.mark.parametrize(("implementation", "dtype", "shape"), [*_cases()])
def test_against_float64(implementation, dtype, shape):
    unread = 0.0 if implementation == "xla" else np.nan  # its contract: finite numbers everywhere
    case = _case(*_SHAPES[shape], dtype, unread)
    assert _relative_error(_run(implementation, case), _expected(*case)) < _TOLERANCE[dtype]


@pytest.mark.accelerator
@pytest.mark.parametrize("policy", ["Qwen2.5-0.5B", "Qwen2.5-7B"])
@pytest.mark.parametrize("nodes", [1, 16, 64])
def test_on_the_device(policy, nodes):
    case = _case((0, 700, 1024, 3000), 4096, nodes, *POLICIES[policy], dtype="bfloat16")
    assert _relative_error(_run("native", case), _expected(*case)) < _TOLERANCE["bfloat16"]


@pytest.mark.parametrize("implementation", ["xla", *_KERNELS])
def test_nothing_to_see_is_zero(implementation):
    case = _case((0, 3), 64, 3, 2, 1, 64, "bfloat16", unread=0.0)
    case[6][0, 1] = False
    got = _run(implementation, case)
    assert not got[0, 1].any()
    assert got[0, 0].all() and got[1, 1].all()


# Lengths, capacity, heads, key heads, head size: every end of a block, full slots, a cache of one block, and
# more than a stretch.
_DECODED = {
    "blocks": ((0, 1, 63, 64, 127, 128), 128, 4, 2, 64),
    "one block": ((0, 63, 64), 64, 7, 1, 128),
    "stretches": ((5, 1023, 1024, 1087, 1088), 1088, 3, 1, 64),
}


@pytest.mark.default_cases("interpret_tpu-stretches")
@pytest.mark.parametrize("shape", _DECODED)
@pytest.mark.parametrize("implementation", _KERNELS)
def test_decoding_is_one_node_and_writes_it(implementation, shape):
    """A verifying pass has its key and value from outside the cache, where decoding writes them."""
    lengths, capacity, *heads = _DECODED[shape]
    case = _case(lengths, capacity, 1, *heads, "bfloat16", unread=0.0)

    @jax.jit
    def both(*args):
        there = Numerics(), _named(implementation)
        return decode_attention(*args[:6], *there), tree_attention(*args, *there)

    (out, *cache), verified = both(*case)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(verified))
    for ours, expected in zip(cache, _with_tokens(*case[1:6]), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), expected)


def _with_tokens(keys, values, positions, node_keys, node_values):
    """The cache with a token of each slot at its position, where there is one."""
    keys, values, node_keys, node_values = (np.array(x) for x in (keys, values, node_keys, node_values))
    for slot, position in enumerate(np.asarray(positions)):
        if position < values.shape[2]:
            keys[slot, :, position // _BLOCK, :, position % _BLOCK] = node_keys[slot, 0]
            values[slot, :, position] = node_values[slot, 0]
    return keys, values


def test_every_depth_of_a_chain_has_the_bits_of_decoding():
    """Across the border of a block and of a split, with more rows than one tile has; decoded in a loop."""
    capacity, nodes = 1088, 6
    case = _case((60, 1021), capacity, nodes, 12, 1, 64, "bfloat16", unread=0.0)
    queries, keys, values, lengths, node_keys, node_values = case[:6]
    ancestors = np.broadcast_to(np.tri(nodes, dtype=bool), case[6].shape)
    depth = np.broadcast_to(np.arange(nodes, dtype=np.int32), case[7].shape)
    verified = _run("interpret_gpu", (*case[:6], ancestors, depth))

    @jax.jit
    def decoded(keys, values):
        def step(cache, node):
            query, key, value, count = node
            attention = kv_cache.CachedAttention(lengths + count, numerics)
            out, cache = attention(cache, query[:, None], key[:, None], value[:, None])
            return cache, out[:, 0]

        numerics = Numerics(kernels=KernelChoice(tree_attention="interpret_gpu"))
        inputs = (x.swapaxes(0, 1) for x in (queries, node_keys, node_values))
        counts = jnp.arange(nodes, dtype=jnp.int32)
        return jax.lax.scan(step, (keys, values), (*inputs, counts))

    cache, out = decoded(keys, values)
    np.testing.assert_array_equal(np.asarray(out, np.float64).swapaxes(0, 1), verified)
    for node in range(nodes):
        one = slice(node, node + 1)
        keys, values = _with_tokens(keys, values, lengths + node, node_keys[:, one], node_values[:, one])
    for ours, expected in zip(cache, (keys, values), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), expected)


@pytest.mark.default_cases("interpret_gpu-3")
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("implementation", [_KERNELS[0], _KERNELS[-1]])
def test_stretches_merged_in_registers_have_the_bits_of_a_second_kernel(implementation, nodes, monkeypatch):
    """Many slots fill a device, few do not."""
    case = _case((70, 1030), 1088, nodes, 3, 1, 64, "bfloat16", unread=0.0)

    def results():
        if nodes > 1:
            return jax.jit(lambda *case: tree_attention(*case, Numerics(), _named(implementation)))(*case)
        return jax.jit(lambda *case: decode_attention(*case, Numerics(), _named(implementation)))(*case[:6])

    few = results()
    monkeypatch.setattr(mosaic_gpu, "_FILLED", 2)
    jax.tree.map(np.testing.assert_array_equal, results(), few)


@pytest.mark.parametrize("implementation", _KERNELS)
def test_neither_batch_nor_bucket_changes_a_bit(implementation):
    case = _case(*_SHAPES["several chunks"], dtype="bfloat16")
    together = _run(implementation, case)
    alone = tuple(x[3:] for x in case)
    np.testing.assert_array_equal(_run(implementation, alone)[0], together[3])
    shorter = (alone[0], alone[1][:, :, :2], alone[2][:, :, :128], *alone[3:])
    np.testing.assert_array_equal(_run(implementation, shorter)[0], together[3])


@pytest.mark.parametrize(
    ("implementation", "heads", "dim", "dtype", "why"),
    [
        ("interpret_gpu", 2, 64, "float32", "keys and values are bfloat16, not float32 and float32"),
        ("interpret_gpu", 2, 32, "bfloat16", "heads are 64 or 128 wide, not 32"),
        ("interpret_gpu", 65, 64, "bfloat16", "at most 64 query heads share a key head, not 65"),
        ("interpret_tpu", 2, 32, "float16", "keys and values are float32 or bfloat16, not float16"),
    ],
)
def test_refusals(implementation, heads, dim, dtype, why):
    """Of verifying and of decoding: one must not take what the other refuses."""
    case = _case((5,), 64, 1, heads, 1, dim, dtype=dtype)
    with pytest.raises(Refused, match=why):
        _run(implementation, case)
    with pytest.raises(Refused, match=why):
        jax.eval_shape(lambda *case: decode_attention(*case, Numerics(), implementation), *case[:6])


@functools.lru_cache
def _decoded(implementation, dtype):
    """Tokens and log-probabilities of two requests: decoded plainly, and by trees full of the true tokens."""
    config = CONFIGS["three"]
    kernels = KernelChoice(
        tree_attention=implementation, compaction=implementation, noisy_argmax=implementation
    )
    numerics = Numerics(True, dtype, kernels)
    engine = DecodeEngine(config, numerics, SAMPLING, Buckets((2,), (128,)), [], 64)
    params = engine.load_params(lively_params(config))
    asked = ask([5, 60], [7, 6])
    plain = decode(engine, params, asked, capacity=128)
    truth = plain if implementation == "xla" else _decoded("xla", dtype)[0]
    drafts = tangled([tokens for tokens, _ in truth])
    return plain, speculate(engine, params, asked, drafts, 7, capacity=128).outputs


@pytest.mark.default_cases("interpret_gpu-*")  # test_on_mesh.py has an engine with a TPU's
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("interpret_tpu", "float32", 1e-4),
        # Where the sums are rounded: more tokens would sooner or later bring a near tie.
        ("interpret_gpu", "bfloat16", 0.1),
        pytest.param("native", "bfloat16", 0.1, marks=pytest.mark.accelerator),
    ],
)
def test_the_engine_with_kernels(implementation, dtype, tolerance, monkeypatch):
    """Of attention, compaction and sampling: the tokens without them, decoded plainly and drafted."""
    if implementation == "interpret_gpu":
        monkeypatch.setattr(kv_cache, "cache_dtype", lambda numerics: numerics.dtype)
    expected = _decoded("xla", dtype)[0]
    for outputs in _decoded(_named(implementation), dtype):
        check_same(outputs, expected, tolerance)


def shapes(heads, kv_heads, dim, batch, capacity, nodes, dtype=jnp.bfloat16):
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


POLICIES = {
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
}


def check_no_copy(program, heads, kv_heads, dim, aliased=0):
    """Nothing near the cache's size is made on the way, and so many caches come out where they went in."""
    cache, memory = 2 * 2 * 16 * kv_heads * 4096 * dim, program.memory_analysis()
    assert memory.temp_size_in_bytes < cache / 8
    assert memory.alias_size_in_bytes >= aliased * cache


@pytest.mark.parametrize(
    ("device", "policy"), [("v5e", "SmolLM2-135M"), ("v6e", "Qwen2.5-0.5B"), ("v5e", "Qwen2.5-7B")]
)
@pytest.mark.long
def test_compiles_for_tpus(device, policy):
    compute = functools.partial(mosaic_tpu.tree_attention, numerics=Numerics())
    for nodes in (1, 16, 64):
        program = compile_for(device, compute, *shapes(*POLICIES[policy], 16, 4096, nodes))
        if nodes <= 16:  # with more, there are as many rows as bytes
            check_no_copy(program, *POLICIES[policy])
    compile_for(device, compute, *shapes(*POLICIES[policy], 2, 256, 16, jnp.float32))


@pytest.mark.parametrize("policy", ["SmolLM2-135M", "Qwen2.5-7B", "Llama-3.1-8B"])
@pytest.mark.long
def test_compiles_for_hopper(policy):
    compute = functools.partial(mosaic_gpu.tree_attention, numerics=Numerics())
    for nodes in (1, 16, 64):
        compile_for(HOPPER, compute, *shapes(*POLICIES[policy], 16, 4096, nodes))
    decode = functools.partial(mosaic_gpu.decode_attention, numerics=Numerics())
    program = compile_for(HOPPER, decode, *shapes(*POLICIES[policy], 16, 4096, 1)[:6], donate=(1, 2))
    check_no_copy(program, *POLICIES[policy], aliased=1)


@pytest.mark.parametrize(("device", "policy"), [("v5e", "SmolLM2-135M"), (HOPPER, "Qwen2.5-7B")])
def test_decoding_copies_no_cache(device, policy, monkeypatch):
    """Steps in a loop: writing a token and attending agree about how the cache lies in memory."""
    kernel = "mosaic_gpu" if device == HOPPER else "mosaic_tpu"

    def backend(op, name, function=None):
        assert name == kernel
        return getattr(importlib.import_module(f"rljax.kernels.{op}.{name}"), function or op)

    monkeypatch.setattr(switch, "backend", backend)
    numerics = Numerics(True, "bfloat16", KernelChoice(tree_attention=kernel))
    queries, *cache, slots, token, _, _, _ = shapes(*POLICIES[policy], 16, 4096, 1)

    def decode(keys, values, queries, token, lengths):
        def step(carry):
            count, keys, values, lengths, queries = carry
            attention = kv_cache.CachedAttention(lengths, numerics)
            out, (keys, values) = attention((keys, values), queries, token, token)
            return count + 1, keys, values, lengths + 1, out

        start = (0, keys, values, lengths, queries)
        return jax.lax.while_loop(lambda carry: carry[0] < 8, step, start)[1:3]

    program = compile_for(device, decode, *cache, queries, token, slots, donate=(0, 1))
    check_no_copy(program, *POLICIES[policy], aliased=1)
