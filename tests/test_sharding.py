"""The same numbers on 1 and on 8 devices, for trainer and engine; and arrays that are really split.

Eight devices are forced on the host platform, which must happen before JAX starts: the checks run in one
separate process, and the tests here read its results.
"""

import jax
import pytest

from rljax.config import MeshConfig
from rljax.errors import ConfigError
from rljax.sharding import make_mesh
from tests.devices import run_on_devices

SETUP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from rljax.config import AlgorithmConfig, LoraConfig, MeshConfig, OptimizerConfig, TrainingConfig
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.shapes import warm_up_plain
from rljax.engine.executables import ExecutablePool
from rljax.sampling.noise import request_key
from rljax.sampling.distribution import SamplingParams
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.lora import Adapter, Lora, init_factors
from rljax.numerics.rows import Numerics
from rljax.models.sharding import param_shardings
from rljax.sharding import make_mesh, row_multiple
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.training.update import Recipe, Trainer
from rljax.training.weight_copies import weight_copies
from tests.engines import Asked, decode, scaled_params

results, pool = {"devices": jax.device_count()}, ExecutablePool()
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
config = ModelConfig("qwen2", 30, 32, 1, 4, 2, 16, 48, attention_bias=True, max_positions=512)
params = scaled_params(config, 3)
rng = np.random.default_rng(0)
lengths = [20, 34, 14, 29, 37, 26, 30, 31]
sequences = [
    TrainingSequence(
        rng.integers(0, 30, 4), rng.integers(0, 30, n - 4), -3 + 0.2 * rng.standard_normal(n - 4),
        float(a), 1 / (sum(lengths) - 32),
    )
    for n, a in zip(lengths, rng.standard_normal(8))
]
packing = pack_sequences(lengths, 64)
training = TrainingConfig(pack_length=64, rows_per_microbatch=4, logprob_chunk=128)
# Adam divides by the gradient's size: without an epsilon above rounding, that would be blown up.
rule = OptimizerConfig(learning_rate=1e-3, clip_norm=0.5, epsilon=1e-5)
# Its state has the gradients of the last update.
optimizer = optax.chain(optax.trace(decay=0.0), make_optimizer(rule, 9))

def shapes(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.addressable_shards[0].data.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

def largest_difference(tree, other):
    # Relative to the largest entry of all, and which leaf has it.
    flat = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    scale = max(np.abs(leaf).max() for _, leaf in flat)
    pairs = zip(flat, jax.tree.leaves(jax.device_get(other)))
    return max((float(np.abs(a - b).max() / scale), jax.tree_util.keystr(path)) for (path, a), b in pairs)

def train(mesh, adapter=None, numerics=Numerics(), training=training):
    recipe = Recipe(SamplingParams(), AlgorithmConfig(), training, optimizer)
    trainer = Trainer(config, numerics, recipe, pool, mesh, adapter)
    cut = packing.microbatches(4, trainer.row_multiple)
    batches = [build_batch(sequences, packing, rows) for rows in cut]
    state = trainer.init(params)
    if mesh is not None:
        trainer.warm_up(state, reference=True)
        trainer.warm_up_score(state.params, unfiltered=True)
    compiled = trainer.pool.compilations
    logprobs = trainer.score(state.params, batches)
    metrics, gradients = [], []
    for _ in range(2):
        state, each = trainer.update(state, batches, logprobs)
        metrics.append(each)
        gradients.append(jax.device_get(optax.tree.get(state.optimizer_state, "trace")))
    if mesh is not None:
        results["compiled_late"] = max(results.get("compiled_late", 0), trainer.pool.compilations - compiled)
    return logprobs, gradients, metrics, state
"""

CHECKS = """
logprobs, gradients, metrics, state = train(None)
sharded_logprobs, sharded_gradients, sharded_metrics, sharded = train(mesh)
results["logprobs"] = largest_difference(logprobs, sharded_logprobs)
results["gradients"] = largest_difference(gradients, sharded_gradients)
results["params"] = largest_difference(state.params, sharded.params)
results["metrics"] = [metrics, sharded_metrics]
results["shapes"] = shapes(sharded.params)
results["moment_shapes"] = [
    shapes(optax.tree.get(sharded.optimizer_state, moment)) for moment in ("mu", "nu")
]

def decode_on(mesh, batches, lengths):
    buckets = make_buckets(8, 128, True, batches, lengths, row_multiple(mesh))
    engine = DecodeEngine(config, Numerics(), SamplingParams(), buckets, [0], pool=pool, mesh=mesh)
    weights = engine.load_params(params)
    if mesh is not None:
        warm_up_plain(engine, weights, 8, 16)
    compiled, generate, caches = engine.pool.compilations, engine.generate, []

    def noted(weights, state, steps):
        state, result = generate(weights, state, max_steps=steps)
        caches.append(state.cache.keys[0].addressable_shards[0].data.shape)
        return engine.free_resource(state, []), result

    engine.generate = noted
    asked = [Asked([1 + i, 2, 3 + i], request_key(15, i), 30 if i < 4 else 70) for i in range(5)]
    outputs = decode(engine, weights, asked, [6, 5, 4, 3, 2], capacity=64, visit_steps=16)
    results["decoding_shapes"], results["cache_shapes"] = shapes(weights), caches
    results["compiled_late_decoding"] = engine.pool.compilations - compiled
    tokens, logprobs = zip(*outputs)
    return tokens, np.concatenate(logprobs)

tokens, token_logprobs = decode_on(None, (8,), (128,))
sharded_tokens, sharded_token_logprobs = decode_on(mesh, (4, 8), (64, 128))
results["num_tokens"] = len(token_logprobs)
results["tokens_equal"] = tokens == sharded_tokens
results["token_logprobs"] = largest_difference([token_logprobs], [sharded_token_logprobs])

def refused(mesh_config, **changes):
    changed = ModelConfig(**{**vars(config), **changes})
    try:
        shardings = param_shardings(changed, make_mesh(mesh_config))
        return {name: tuple(sharding.spec) for name, sharding in shardings["layers"][0].items()}
    except ConfigError as error:
        return str(error)

results["wide_tensor"] = refused(MeshConfig(tensor=4))
odd_vocab = ModelConfig(**{**vars(config), "vocab_size": 31})
results["odd_vocab"] = tuple(param_shardings(odd_vocab, mesh)["embed"].spec)
results["heads"] = refused(MeshConfig(tensor=8))
results["fsdp"] = refused(MeshConfig(fsdp=8), hidden_size=36)
results["mlp"] = refused(MeshConfig(tensor=4), mlp_size=50)
try:
    six = TrainingConfig(rows_per_microbatch=6)
    recipe = Recipe(SamplingParams(), AlgorithmConfig(), six, optimizer)
    Trainer(config, Numerics(), recipe, pool, mesh)
except ConfigError as error:
    results["rows"] = str(error)
try:
    make_buckets(8, 64, True, (2, 8), None, row_multiple(mesh))
except ConfigError as error:
    results["slots"] = str(error)
print("FOUND" + json.dumps(results))
"""


OTHERS = """
half, anew = Numerics(compute_dtype="bfloat16"), training.model_copy(update={"cast_once": False})
_, copied_gradients, _, copied = train(mesh, numerics=half)
_, cast_gradients, _, _ = train(mesh, numerics=half, training=anew)
results["copies"] = largest_difference(copied_gradients, cast_gradients)
(copies,) = jax.jit(lambda params: weight_copies(params, half, training))(copied.params)
results["copies_shapes"] = shapes(copies)
results["shapes"] = shapes(copied.params)

lora = Lora.of(LoraConfig(rank=3), config)
factors = init_factors(config, lora, "kaiming", 0)
factors = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32), factors)
_, adapted_gradients, _, adapted = train(None, Adapter(lora, factors))
_, sharded_gradients, _, sharded = train(mesh, Adapter(lora, factors))
results["factor_gradients"] = largest_difference(adapted_gradients, sharded_gradients)
results["merged"] = largest_difference(adapted.params, sharded.params)
results["merged_shapes"] = shapes(sharded.params)
results["factor_shapes"] = shapes(sharded.factors)
print("FOUND" + json.dumps(results))
"""


@pytest.fixture(scope="module")
def results():
    return run_on_devices(SETUP + CHECKS, 8)


@pytest.fixture(scope="module")
def others():
    return run_on_devices(SETUP + OTHERS, 8)


def test_training_does_not_depend_on_the_mesh(results):
    assert results["devices"] == 8
    assert results["logprobs"][0] < 1e-5, results["logprobs"]
    assert results["gradients"][0] < 1e-5, results["gradients"]
    assert results["params"][0] < 1e-5, results["params"]
    one, eight = results["metrics"]
    assert len(one) == 2
    for step, sharded_step in zip(one, eight, strict=True):
        assert step == pytest.approx(sharded_step, rel=1e-4, abs=1e-5)
    assert results["compiled_late"] == 0


def test_weights_and_moments_are_really_split(results):
    shapes = results["shapes"]
    assert shapes["embed"] == [15, 16] and shapes["lm_head"] == [15, 16]
    assert shapes["layers.0.q"] == [32, 16] and shapes["layers.0.k"] == [16, 16]
    assert shapes["layers.0.o"] == [16, 32] and shapes["layers.0.q_bias"] == [32]
    assert shapes["layers.0.gate"] == [24, 16] and shapes["layers.0.down"] == [16, 24]
    assert shapes["final_norm"] == [32]
    assert results["moment_shapes"] == [shapes, shapes]


@pytest.mark.long  # above, whole gradients on a mesh; tests/training has copies on one device
def test_copies_are_split_as_their_matrices_and_change_no_gradient(others):
    assert others["copies"][0] < 1e-6, others["copies"]
    assert len(others["copies_shapes"]) == 7
    for name, shape in others["copies_shapes"].items():
        assert shape == others["shapes"][name]


@pytest.mark.long  # above, whole gradients on a mesh; tests/training has adapters on one device
def test_an_adapter_does_not_depend_on_the_mesh_and_is_split_as_its_matrices(others):
    for name in ("factor_gradients", "merged"):
        difference, leaf = others[name]
        assert difference < 1e-4, f"{name}: {leaf}"
    assert others["merged_shapes"] == others["shapes"]
    assert others["factor_shapes"]["layers.0.gate.a"] == [3, 16]  # along fsdp, as the residual stream
    assert others["factor_shapes"]["layers.0.gate.b"] == [24, 3]  # along tensor, as MLP columns


def test_decoding_does_not_depend_on_the_mesh(results):
    assert results["num_tokens"] > 50
    assert results["tokens_equal"]
    assert results["token_logprobs"][0] < 1e-5
    shapes = results["decoding_shapes"]
    assert shapes["embed"] == [15, 32] and shapes["lm_head"] == [15, 32]
    assert shapes["layers.0.q"] == [32, 32] and shapes["layers.0.down"] == [32, 24]
    cache_shapes = [tuple(shape[:3]) for shape in results["cache_shapes"]]
    assert cache_shapes[0] == (2, 1, 1), "slots over data and fsdp, key/value heads over tensor"
    assert cache_shapes[-1] == (1, 1, 2), "still so in fewer slots and a longer cache"
    assert results["compiled_late_decoding"] == 0


def test_what_does_not_divide(results):
    assert results["wide_tensor"]["k"] == [None, "fsdp"]
    assert results["wide_tensor"]["q"] == ["tensor", "fsdp"]
    assert results["odd_vocab"] == [None, "fsdp"]
    assert results["heads"].startswith("mesh.tensor: 8 devices cannot split the policy's num_heads 4")
    assert results["fsdp"].startswith("mesh.fsdp: 8 devices cannot split the policy's hidden_size 36")
    assert results["mlp"].startswith("mesh.tensor: 4 devices cannot split the policy's mlp_size 50")
    assert results["rows"].startswith("training.rows_per_microbatch: 6 rows")
    assert results["slots"].startswith("engine.batch_buckets: 2 slots cannot be split evenly")


def test_one_device_has_no_mesh_and_more_than_there_are_are_refused():
    assert make_mesh(MeshConfig()) is None
    with pytest.raises(ConfigError, match=r"data 4096 \* fsdp 1 \* tensor 2 = 8192 devices") as error:
        make_mesh(MeshConfig(data=4096, tensor=2))
    assert str(jax.device_count()) in str(error.value)
