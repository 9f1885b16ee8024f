"""Updates of LoRA's factors against autodiff of base + scale B A, and what they leave alone."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.config import LoraConfig, TrainingConfig, load_config
from rljax.errors import ConfigError
from rljax.models.lora import Adapter, Lora, init_factors, matrices_of, merge, with_matrices
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.training.factor_updates import base_params
from rljax.training.objectives import gradients
from rljax.training.update import Recipe, Trainer
from tests.configs import table
from tests.engines import scaled_params, stored_pool
from tests.training.test_update import (
    ALGORITHM,
    CONFIG,
    PACK_LENGTH,
    NamingPool,
    assert_close,
    gradients_of,
    microbatches,
    optimizer,
    sequences,  # noqa: F401 (a fixture)
)

MODEL = dataclasses.replace(CONFIG, num_layers=2)
POOL = stored_pool()


@pytest.fixture(scope="module")
def params():
    return scaled_params(MODEL, 3.0, 1.1)


@functools.cache
def adapter(*targets, rank=2, alpha=3.0):
    """An adapter whose B is not 0, so that A has a gradient."""
    lora = Lora.of(LoraConfig(rank=rank, alpha=alpha, targets=targets or ("all-linear",)), MODEL)
    rng = np.random.default_rng(1)
    factors = jax.device_get(init_factors(MODEL, lora, "kaiming", 0))
    stirred = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32), factors)
    return Adapter(lora, jax.device_put(stirred))


def trainer(adapter, remat=False, dtype="float32", outline=False, pool=POOL, rows=4):
    training = TrainingConfig(pack_length=PACK_LENGTH, rows_per_microbatch=rows, remat=remat)
    numerics = Numerics(compute_dtype=dtype, outline_layers=outline)
    recipe = Recipe(SamplingParams(), ALGORITHM, training, optimizer())
    return Trainer(MODEL, numerics, recipe, pool, None, adapter)


@pytest.mark.parametrize(
    ("targets", "form"),
    [
        pytest.param(("all-linear",), {}, marks=pytest.mark.long),
        (("q_proj", "down_proj"), {"outline": True, "remat": True}),
    ],
)
def test_gradients_are_those_of_plain_autodiff(params, sequences, targets, form):  # noqa: F811
    """The reference multiplies out W + scale B A, and autodiff forms the whole gradient of W on the way."""
    chosen = adapter(*targets)
    (batch,) = microbatches(sequences, 4)
    plain = trainer(None)

    def score(factors, batch):
        matrices = merge(matrices_of(params, chosen.lora), factors, chosen.lora)
        return plain._score(with_matrices(params, matrices), batch=batch, rope=plain._rope)

    factors = jax.tree.map(jnp.asarray, chosen.factors)
    textbook = jax.jit(lambda factors: gradients(factors, batch, None, score, plain._objective)[0])
    expected = jax.device_get(textbook(factors))
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-4
    update = trainer(chosen, **form)
    state, _ = update.update(update.init(params), [batch])
    assert_close(expected, gradients_of(state), tolerance=2e-5)


@pytest.mark.default_cases("form1")
@pytest.mark.parametrize("form", [{"dtype": "bfloat16"}, {"outline": True, "remat": True}])
def test_no_gradient_of_a_matrix_is_formed(params, sequences, form):  # noqa: F811
    """What JAX hands to the compiler has no product in the shape of an MLP matrix."""
    (batch,) = microbatches(sequences, 4)

    def products(update, trained, *merged):
        args = (trained, batch, None, update._rope, *merged)
        return re.findall(
            r"dot_general.*-> tensor<(\w+)xf32>", jax.jit(update._policy_step).lower(*args).as_text()
        )

    update = trainer(adapter(), **form)
    state = update.init(params)
    shapes = {f"{MODEL.mlp_size}x{MODEL.hidden_size}", f"{MODEL.hidden_size}x{MODEL.mlp_size}"}
    assert shapes.isdisjoint(products(update, state.factors, state.params))
    assert shapes <= set(products(trainer(None, **form), params)), (
        "they are there where all weights are trained"
    )


def test_the_factors_alone_change_and_the_policy_follows_them(params, sequences):  # noqa: F811
    chosen = adapter("q_proj", "down_proj")
    update = trainer(chosen, outline=True, remat=True)
    state = update.init(params)
    count = sum(leaf.size for leaf in jax.tree.leaves(chosen.factors))
    for moment in ("mu", "nu"):
        assert (
            sum(leaf.size for leaf in jax.tree.leaves(optax.tree.get(state.optimizer_state, moment))) == count
        )
    before = state.params
    state, metrics = update.update(state, microbatches(sequences, 4))
    assert metrics["gradient_norm"] > 0 and int(state.updates) == 1
    for layer, old, start in zip(state.params["layers"], before["layers"], params["layers"], strict=True):
        assert old["q"].is_deleted() and not start["q"].is_deleted()
        assert layer["k"] is old["k"], "what is not adapted is shared"
    for index, layer in enumerate(state.params["layers"]):
        for name, pair in state.factors["layers"][index].items():
            assert not np.array_equal(pair["a"], chosen.factors["layers"][index][name]["a"])
            change = 1.5 * np.asarray(pair["b"], np.float64) @ np.asarray(pair["a"], np.float64)
            np.testing.assert_allclose(layer[name], params["layers"][index][name] + change, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, base_params(state), params)


def test_a_new_adapter_leaves_every_bit_of_the_policy(params):
    lora = Lora.of(LoraConfig(rank=2), MODEL)
    update = trainer(Adapter(lora, init_factors(MODEL, lora, "kaiming", 0)), dtype="bfloat16")
    state = update.init(params)
    for ours, start in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        assert ours.dtype == (jnp.bfloat16 if ours.ndim > 1 else jnp.float32)
        np.testing.assert_array_equal(ours, start.astype(ours.dtype))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.factors))


def test_nothing_compiles_after_warm_up(params, sequences):  # noqa: F811
    pool = NamingPool()
    update = trainer(adapter("q_proj"), pool=pool, rows=1)
    state = update.init(params)
    update.warm_up(state)
    pool.complete = True
    for _ in range(2):
        state, _ = update.update(state, microbatches(sequences, 1))


def test_a_new_adapter_is_random_by_the_seed_and_of_pefts_size():
    model = dataclasses.replace(MODEL, hidden_size=512)
    lora = Lora.of(LoraConfig(rank=16, targets=("q_proj",)), model)
    kaiming, again, other = (init_factors(model, lora, "kaiming", seed) for seed in (0, 0, 1))
    a, b = (kaiming["layers"][0]["q"][factor] for factor in "ab")
    assert (a.shape, b.shape) == ((16, 512), (16, 16)) and not b.any()
    assert 0.95 * 512**-0.5 < np.abs(a).max() <= 512**-0.5 and abs(a.mean()) < 0.1 * a.std()
    np.testing.assert_array_equal(a, again["layers"][0]["q"]["a"])
    assert not np.array_equal(a, other["layers"][0]["q"]["a"])
    assert not np.array_equal(a[:, :16], kaiming["layers"][1]["q"]["a"][:, :16])
    gaussian = init_factors(model, lora, "gaussian", 0)["layers"][0]["q"]["a"]
    assert gaussian.std() == pytest.approx(1 / 16, rel=0.05)


def test_scale_and_rank():
    assert LoraConfig(rank=16, alpha=32.0).scale == 2.0
    assert LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0


BAD = """
policy.lora={rank: 0} -> policy.lora.rank: should be greater than or equal to 1, got 0
policy.lora={targets: [q_prj]} -> 'q_prj' is unknown; the nearest is q_proj
policy.lora={targets: [down]} -> the nearest is down_proj
policy.lora={targets: []} -> policy.lora.targets: is empty
policy.lora={path: there} -> policy.lora.path: an adapter belongs to the base .* set policy.path
policy={path: here, lora: {path: there}} & warm_start={}
    -> policy.lora.path: .* but warm_start trains that further
"""


def test_bad_keys_are_one_line():
    for overrides, message in table(BAD):
        with pytest.raises(ConfigError, match=message) as error:
            load_config("quickstart", overrides.split(" & "))
        assert "\n" not in str(error.value)
