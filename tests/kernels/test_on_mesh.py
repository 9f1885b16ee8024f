"""Kernels on 2, 4 and 8 devices: the numbers of one device, and of the reference.

Devices are forced on the host platform, in a process of their own, as in `tests/test_sharding.py`. Kernels of
TPUs are interpreted; JAX's interpreter of GPU kernels knows one device only (its devices share barriers), so
those are compiled for a mesh, and not run.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from drafters.quantized import QuantizedPolicy, WeightFormat, weight_layouts
from rljax.kernels import on_mesh
from rljax.kernels.linear import product
from rljax.kernels.token_logprobs import token_logprobs
from rljax.models.config import ModelConfig
from rljax.models.sharding import param_shardings
from rljax.models.transformer import param_shapes
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import named
from tests.devices import run_on_devices
from tests.kernels.compilation import HOPPER, absent_mesh

# All three ways of splitting at once; and for rollouts, two.
KERNELS, ROLLOUTS = {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}

COMMON = """
import dataclasses, functools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rljax.config import MeshConfig
from rljax.kernels import on_mesh
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics
from rljax.sharding import make_mesh, named

backend, found = "interpret_tpu", {}

def error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())

def on(mesh, **kernels):
    return KernelChoice(**kernels).on_mesh(mesh)
"""

ATTENTION = """
from tests.kernels.test_tree_attention import _case, _expected, _with_tokens
from tests.kernels.test_compaction import _case as compaction_case, _expected as compacted

dtype = "float32"
lengths = (0, 5, 63, 64, 100, 127, 3, 40)
tree, one = (_case(lengths, 128, nodes, 8, 4, 64, dtype) for nodes in (3, 1))
moved = compaction_case(lengths, (1, 3, 2, 0, 3, 1, 2, 3), 128, 5, 3, kv_heads=4, dim=128, dtype=dtype)
numerics = Numerics(kernels=on(mesh, tree_attention=backend, compaction=backend))
def attend(*args):
    return on_mesh.tree_attention(*args, numerics)
def decode(*args):
    return on_mesh.decode_attention(*args, numerics)
def compact(*args):
    return on_mesh.compaction(*args, numerics.kernels)
def place(array):
    return jax.device_put(array, named(mesh, "slots", *(None,) * (array.ndim - 1)))
program = jax.jit(attend).lower(*map(place, tree)).compile()
results["tree"] = error(program(*map(place, tree)), _expected(*tree))
out, *cache = jax.jit(decode)(*map(place, one[:6]))
results["decoding"] = error(out, _expected(*one))
results["written"] = all(
    np.array_equal(*pair, equal_nan=True) for pair in zip(cache, _with_tokens(*one[1:6]))
)
results["compaction"] = all(
    np.array_equal(ours, expected) for ours, expected in zip(jax.jit(compact)(*moved), compacted(*moved))
)

mesh = make_mesh(MeshConfig(tensor=8))
try:
    on_mesh.tree_attention(*tree, Numerics(kernels=on(mesh, tree_attention=backend)))
except Refused as refusal:
    results["refusal"] = str(refusal)
allowed = Numerics(kernels=on(mesh, tree_attention=(backend, "xla")))
finite = [jnp.nan_to_num(x) if x.dtype == dtype else x for x in tree]
results["replicated heads"] = error(on_mesh.tree_attention(*finite, allowed), _expected(*tree))
"""

LOGPROBS = """
from rljax.kernels.token_logprobs import token_logprobs
from rljax.sampling.distribution import SamplingParams
from tests.kernels.test_token_logprobs import NUMERICS, arguments, expected, padded

for vocab_size in (300, 301):  # the second is not divided by tensor
    hidden, used, targets, gradient = arguments((4, 5), vocab_size - 10)
    lm_head = padded(used, 10)
    def loss(hidden, lm_head):
        logprobs, entropies = token_logprobs(
            hidden, lm_head, targets, SamplingParams(), NUMERICS, 64, mesh, backend, used_rows=len(used)
        )
        return jnp.sum(logprobs * gradient) + jnp.sum(entropies), (logprobs, entropies)
    split = "vocab" if vocab_size == 300 else None
    hidden = jax.device_put(hidden, named(mesh, "batch", None, None))
    lm_head = jax.device_put(lm_head, named(mesh, split, "embed"))
    program = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    gradients, outputs = program(hidden, lm_head)
    *truth, d_head = expected(hidden, used, targets, gradient)
    truth += [np.pad(d_head, ((0, 10), (0, 0)))]
    results[vocab_size] = [error(*pair) for pair in zip((*outputs, *gradients), truth)]
"""

PRODUCTS = """
from drafters.quantized import QuantizedPolicy, WeightFormat, weight_layouts
from rljax.models.config import ModelConfig
from rljax.kernels.linear import product
from rljax.models.transformer import init_params
from rljax.numerics.quantized import dequantize
from rljax.models.sharding import shard_params

config = ModelConfig("qwen3", 64, 512, 1, 4, 2, 128, 512, tie_embeddings=True, qk_norm=True)
params = init_params(config, 0)
rng = np.random.default_rng(0)
cases = {"w4": (4, 128, backend), "w8": (8, 0, backend), "w4 xla": (4, 128, "xla")}
for name, (bits, group, implementation) in cases.items():
    fmt, kernels = WeightFormat(bits, group), on(mesh, quantized_product=implementation)
    whole = QuantizedPolicy(fmt).refresh(params)["layers"][0]
    split = QuantizedPolicy(fmt, "rtn", kernels, weight_layouts(config, mesh))
    split = split.refresh(shard_params(params, config, mesh, decoding=True))["layers"][0]
    for projection in {"w4": ("q", "o", "down"), "w8": ("q", "down"), "w4 xla": ("o",)}[name]:
        weight = split[projection]
        x = jnp.asarray(rng.standard_normal((8, weight.inputs)), jnp.bfloat16)
        y = jax.jit(functools.partial(product, numerics=Numerics()))(x, weight)
        matrix = np.asarray(dequantize(whole[projection]), np.float64)
        reference = np.asarray(x, np.float64) @ matrix.T
        # With whole rows to a scale, parts of a row have scales of their own.
        own_scales = name == "w8" and weight.layout.inputs
        # `xla` rounds the restored matrix to bfloat16.
        tolerance = 0.02 if own_scales or implementation == "xla" else 1e-5
        results[f"{name} {projection}"] = [error(y, reference), tolerance]
        shard, parts = weight.values.addressable_shards[0].data, mesh.shape["tensor"]
        results[f"{name} {projection}"].append(weight.values.size == parts * shard.size)
"""

ROLLOUT = """
from drafters.base import Outcome
from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import CONFIG, EOS, by_rows, make_params, make_requests

SLOTS = 4
requests = make_requests((3, 20, 8), (16, 12, 9))

def make_engine(mesh, kernels):
    buckets = Buckets((4,), (128,), (8,), 3)
    engine = DecodeEngine(
        CONFIG, Numerics(kernels=kernels), SamplingParams(), buckets, (EOS,), 16, mesh=mesh
    )
    return engine, engine.load_params(make_params())

def tokens_of(completions):
    return [completion.response_ids.tolist() for completion in completions]

engine, params = make_engine(None, KernelChoice())
expected, _ = Scheduler(engine, SLOTS).run(params, requests)
results["tokens"] = sum(map(len, tokens_of(expected)))
outcomes = [Outcome(r.prompt_ids, done.response_ids, 1.0) for r, done in zip(requests, expected)]
engine, params = make_engine(mesh, on(mesh, tree_attention=backend, compaction=backend))
plain, _ = Scheduler(engine, SLOTS).run(params, requests)
choice = by_rows(lambda candidates, *_: 8)
speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, strategies=choice)
speculator.learn(outcomes)
drafted, statistics = Scheduler(engine, SLOTS, None, speculator).run(params, requests)
results["plain"] = tokens_of(plain) == tokens_of(expected)
results["drafted"] = tokens_of(drafted) == tokens_of(expected)
results["accepted"] = statistics.accepted
"""


@pytest.fixture(scope="module")
def found():
    """What all checks found, by their names, in one process."""
    code = COMMON
    for name, checks, axes in (
        ("attention", ATTENTION, KERNELS),
        ("logprobs", LOGPROBS, KERNELS),
        ("products", PRODUCTS, KERNELS),
        ("rollout", ROLLOUT, ROLLOUTS),
    ):
        code += f"mesh = make_mesh(MeshConfig(**{axes!r}))\n"
        code += f"results = found[{name!r}] = {{}}\n{checks}"
    return run_on_devices(code + 'print("FOUND" + json.dumps(found))', 8)


def test_attention_and_compaction(found):
    found, tolerance = found["attention"], 1e-5
    assert found["tree"] < tolerance and found["decoding"] < tolerance
    assert found["written"] and found["compaction"]
    assert found["replicated heads"] < tolerance
    assert "mesh.tensor = 8 does not divide num_kv_heads 4; set xla or null" in found["refusal"]


def test_logprobs_over_the_vocabulary(found):
    for logprobs, entropy, d_hidden, d_head in found["logprobs"].values():
        assert logprobs < 1e-5 and entropy < 1e-5 and d_hidden < 1e-2 and d_head < 1e-2


def test_quantized_products(found):
    for error, tolerance, split in found["products"].values():
        assert error < tolerance
        assert split


def test_a_rollout_has_the_tokens_of_plain_decoding_on_one_device(found):
    rollout = found["rollout"]
    assert rollout["tokens"] > 50 and rollout["plain"] and rollout["drafted"] and rollout["accepted"] > 10


# -- compiled for devices that are not there: Qwen2.5-7B on 4 of them (data 2, tensor 2) --------------------

_POLICY = ModelConfig("qwen2", 152064, 3584, 1, 28, 4, 128, 18944, attention_bias=True)


def _kernel(device):
    return "mosaic_gpu" if device == HOPPER else "mosaic_tpu"


def _placed(mesh, shape, *axes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, *axes))


def _collectives(program):
    """The largest result of a collective, in entries, by its kind."""
    largest = {}
    for shapes, kind in re.findall(
        r"= (.*?) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", program
    ):
        for shape in re.findall(r"\w+\[([\d,]+)\]", shapes):
            largest[kind] = max(largest.get(kind, 0), math.prod(map(int, shape.split(","))))
    return largest


@pytest.mark.parametrize("device", ["v5e", HOPPER])
def test_attention_and_compaction_compile(device):
    batch, nodes, capacity = 16, 16, 4096
    with absent_mesh(device) as mesh:
        kernels = KernelChoice(tree_attention=_kernel(device), compaction=_kernel(device)).on_mesh(mesh)
        numerics = Numerics(compute_dtype="bfloat16", kernels=kernels)

        def verify(queries, keys, values, lengths, node_keys, node_values, ancestors, depth, path, count):
            args = (queries, keys, values, lengths, node_keys, node_values, ancestors, depth)
            out = on_mesh.tree_attention(*args, numerics)
            args = (keys, values, node_keys, node_values, path, count, lengths)
            return out, on_mesh.compaction(*args, kernels)

        def decode(queries, keys, values, positions, node_keys, node_values, *_):
            token = (x[:, :1] for x in (node_keys, node_values))
            return on_mesh.decode_attention(queries[:, :1], keys, values, positions, *token, numerics)

        cache = ("slots", "kv_heads", None, None)
        node_entries = _placed(mesh, (batch, nodes, 4, 128), "slots", None, "kv_heads", None)
        per_node = _placed(mesh, (batch, nodes), "slots", None, dtype=jnp.int32)
        per_slot = _placed(mesh, (batch,), "slots", dtype=jnp.int32)
        args = (
            _placed(mesh, (batch, nodes, 28, 128), "slots", None, "heads", None),
            _placed(mesh, (batch, 4, capacity // 64, 128, 64), *cache, None),
            _placed(mesh, (batch, 4, capacity, 128), *cache),
            per_slot,
            node_entries,
            node_entries,
            _placed(mesh, (batch, nodes, nodes), "slots", None, None, dtype=jnp.bool_),
            per_node,
            per_node,
            per_slot,
        )
        programs = [
            jax.jit(each, donate_argnums=(1, 2), keep_unused=True).lower(*args).compile()
            for each in (verify, decode)
        ]
    shard = 2 * batch * 4 * capacity * 128 // 4  # bytes of keys, or values, on a device
    for program in programs:
        assert not _collectives(program.as_text())
        assert program.memory_analysis().alias_size_in_bytes >= 2 * shard
        assert program.memory_analysis().temp_size_in_bytes < shard / 2


@pytest.mark.parametrize("device", ["v5e", HOPPER])
@pytest.mark.long
def test_logprobs_compile(device):
    rows, length = 4, 1024
    with absent_mesh(device) as mesh:

        def loss(hidden, lm_head, targets):
            args = (SamplingParams(), Numerics(compute_dtype="bfloat16"), 1024, mesh, _kernel(device))
            return token_logprobs(hidden, lm_head, targets, *args)[0].sum()

        args = (
            _placed(mesh, (rows, length, 3584), "batch", None, None),
            _placed(mesh, (_POLICY.vocab_size, 3584), "vocab", "embed"),
            _placed(mesh, (rows, length), "batch", None, dtype=jnp.int32),
        )
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*args).compile()
    # Forward, four numbers a token travel; backward, gradients of hidden states and of the part of the head.
    assert all(
        size <= 3584 * max(rows * length, _POLICY.vocab_size // 2)
        for size in _collectives(program.as_text()).values()
    )
    logits = 4 * rows * length * _POLICY.vocab_size // 4
    head = 4 * _POLICY.vocab_size // 2 * 3584
    assert program.memory_analysis().temp_size_in_bytes < head + logits


@pytest.mark.parametrize("device", ["v5e", HOPPER])
@pytest.mark.long
def test_quantized_products_compile(device):
    with absent_mesh(device) as mesh:
        kernels = KernelChoice(quantized_product=_kernel(device)).on_mesh(mesh)
        shapes = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding),
            param_shapes(_POLICY),
            param_shardings(_POLICY, mesh, decoding=True),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        policy = QuantizedPolicy(WeightFormat(4, 128), "rtn", kernels, weight_layouts(_POLICY, mesh))
        layer = policy.compile(shapes)["layers"][0]
        for name, axis in (("up", None), ("down", "mlp")):
            weight = layer[name]
            weight = jax.tree.map(
                lambda leaf, spec=weight.layout.spec: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
                ),
                weight,
            )
            x = _placed(mesh, (16, weight.inputs), "slots", axis)
            program = jax.jit(lambda x, weight: product(x, weight, Numerics())).lower(x, weight).compile()
            # No weight travels: only, where inputs are split, the sums of 8 rows of a device.
            moved = _collectives(program.as_text())
            assert set(moved) == ({"all-reduce"} if axis else set())
            assert moved.get("all-reduce", 0) <= 16 * 3584
