"""A grown policy computes what it computed before, at another size, and all of it learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.assembly.policy import Policy, grown_policy
from rljax.config import GrowthConfig
from rljax.engine.executables import row_invariant_compiler_options
from rljax.errors import ConfigError
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from tests.training.tiny_run import train

CONFIGS = {
    "tied, with norms": ModelConfig("qwen3", 64, 64, 2, 4, 2, 32, 128, tie_embeddings=True, qk_norm=True),
    "untied, with bias": ModelConfig("qwen2", 64, 64, 2, 4, 2, 32, 128, attention_bias=True),
}
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 24)).astype(np.int32)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def policy(request):
    params = transformer.init_params(request.param, 0)
    # Norms and biases that are not what a new layer has.
    rng = np.random.default_rng(1)
    stir = lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32)  # noqa: E731
    return Policy(request.param, jax.device_put(jax.tree.map(stir, jax.device_get(params))), None, None, ())


def logits_of(params, config, tokens=TOKENS):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    attention = PackedAttention(jnp.ones(tokens.shape, jnp.int32), Numerics())
    rope = jnp.asarray(rope_table(config, tokens.shape[1]))
    hidden, _ = transformer.forward(params, config, tokens, positions, attention, rope, Numerics())
    return transformer.logits(params, config, hidden, Numerics())


def compute(policy):
    function = functools.partial(logits_of, config=policy.config)
    return np.asarray(jax.jit(function, compiler_options=row_invariant_compiler_options())(policy.params))


def grown(policy, mlp_size, num_layers, seed=3, hidden_size=64):
    growth = GrowthConfig(hidden_size=hidden_size, mlp_size=mlp_size, num_layers=num_layers)
    return grown_policy(policy, growth, seed)


@pytest.mark.default_cases("tied, with norms")
def test_new_layers_change_no_bit(policy):
    """What they add to the residual stream is 0."""
    np.testing.assert_array_equal(compute(grown(policy, 128, 5)), compute(policy))
    same = grown(policy, 128, 2)  # by nothing
    assert same.config == policy.config
    jax.tree.map(np.testing.assert_array_equal, same.params, policy.params)


@pytest.mark.default_cases("tied, with norms-64-129")
@pytest.mark.parametrize(("hidden_size", "mlp_size"), [(64, 129), (100, 150)])
def test_greater_width_changes_rounding_at_most(policy, hidden_size, mlp_size):
    """Zeros are added to every sum, but a longer sum may be taken in another order."""
    before = compute(policy)
    larger = grown(policy, mlp_size, 3, hidden_size=hidden_size)
    np.testing.assert_allclose(compute(larger), before, atol=2e-5, rtol=2e-5)
    assert np.abs(before).max() > 1


def test_a_grown_policy_has_the_size_it_says(policy):
    larger = grown(policy, 200, 3, hidden_size=128)
    epsilon = policy.config.norm_epsilon / 2
    sizes = {"hidden_size": 128, "mlp_size": 200, "num_layers": 3, "norm_epsilon": epsilon}
    assert larger.config == dataclasses.replace(policy.config, **sizes)
    shapes = jax.tree.map(lambda leaf: leaf.shape, larger.params)
    assert shapes == transformer.param_shapes(larger.config)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(each.params)) for each in (policy, larger)]
    assert sizes[1] == transformer.num_params(larger.config) > sizes[0]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(larger.params))
    # Everything but the weights is the policy's own.
    assert dataclasses.replace(larger, params=policy.params, config=policy.config) == policy


@pytest.mark.default_cases("tied, with norms")
def test_gradients_reach_what_is_new(policy):
    """At first only what writes zeros; after one update of that, everything."""
    larger = grown(policy, 200, 3, hidden_size=96)

    def gradient(params):
        def loss(params):
            logprobs = jax.nn.log_softmax(logits_of(params, larger.config))
            return -jnp.mean(jnp.take_along_axis(logprobs[:, :-1], TOKENS[:, 1:, None], axis=-1))

        return jax.device_get(jax.jit(jax.grad(loss))(params))

    def new_parts(gradients):
        old, fresh = gradients["layers"][0], gradients["layers"][2]
        inner = {f"layers.0.{name}": old[name][128:] for name in ("gate", "up")}
        inner |= {f"layers.2.{name}": fresh[name] for name in ("gate", "up", "q", "k", "v")}
        inner |= {
            f"layers.0.{name} of new channels": old[name][:, 64:] for name in ("q", "k", "v", "gate", "up")
        }
        outer = {"layers.0.down": old["down"][:, 128:], "layers.0.o of new channels": old["o"][64:]}
        outer["embed"] = gradients["embed"][:, 64:]
        return inner, outer | {f"layers.2.{name}": fresh[name] for name in ("o", "down")}

    first = gradient(larger.params)
    inner, outer = new_parts(first)
    assert not any(np.any(leaf) for leaf in inner.values())
    assert all(np.any(leaf) for leaf in outer.values())
    step = lambda leaf, change: leaf - np.float32(0.1) * change  # noqa: E731
    updated = jax.tree.map(step, jax.device_get(larger.params), first)
    inner, outer = new_parts(gradient(updated))
    for name, leaf in (inner | outer).items():
        assert np.any(leaf), name


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((63, 128, 2), "hidden_size 63 from 64"),
        ((64, 127, 2), "mlp_size 127 from 128"),
        ((128, 256, 1), "num_layers 1 from 2"),
    ],
)
def test_a_policy_does_not_shrink(policy, size, message):
    hidden_size, mlp_size, num_layers = size
    with pytest.raises(ConfigError, match=rf"^policy\.growth: cannot grow to {message}$"):
        grown(policy, mlp_size, num_layers, hidden_size=hidden_size)


def test_a_run_starts_from_the_grown_policy(tmp_path, capsys):
    """Grown to the tiny run's policy, which has one layer and an MLP of 64."""
    growth = "policy.growth={hidden_size: 64, mlp_size: 64, num_layers: 1}"
    options = ("warm_start=null", "training.steps=1", "evaluation.problems=0", "policy.shape.mlp_size=32")
    train(tmp_path, *options, growth)
    assert "grown to" in capsys.readouterr().out
