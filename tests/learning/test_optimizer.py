"""The optimiser: its schedule number by number, what decays, and what is clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.config import OptimizerConfig
from rljax.errors import ConfigError
from rljax.learning.accumulation import TrainState, apply_gradients
from rljax.learning.optimizer import learning_rate_schedule, make_optimizer

DEFAULTS = {"learning_rate": 0.1, "clip_norm": 1e9}


def test_schedule():
    for schedule, warmup_steps, total_updates, expected in (
        ("constant", 0, 3, [0.8, 0.8, 0.8, 0.8]),
        ("constant", 3, 5, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
        ("linear", 0, 4, [0.8, 0.6, 0.4, 0.2, 0.0]),
        ("linear", 1, 5, [0.4, 0.8, 0.6, 0.4, 0.2, 0.0]),
        ("cosine", 0, 4, [0.8, 0.4 * (1 + 0.5**0.5), 0.4, 0.4 * (1 - 0.5**0.5), 0.0]),
        ("cosine", 1, 3, [0.4, 0.8, 0.4, 0.0]),
    ):
        settings = OptimizerConfig(learning_rate=0.8, schedule=schedule, warmup_steps=warmup_steps)
        rate = learning_rate_schedule(settings, total_updates)
        np.testing.assert_allclose(jax.jit(rate)(jnp.arange(total_updates + 1)), expected, atol=1e-6)


def update(gradients, params, **settings):
    optimizer = make_optimizer(OptimizerConfig(**DEFAULTS | settings), 10)

    @jax.jit
    def moved(gradients, params):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return moved(gradients, params)


def test_only_matrices_decay():
    params = {"matrix": jnp.full((2, 3), 2.0), "norm": jnp.full((3,), 2.0), "layers": [{"bias": jnp.ones(2)}]}
    zeros = {"matrix": jnp.zeros((2, 3)), "norm": jnp.zeros(3), "layers": [{"bias": jnp.zeros(2)}]}
    moved = update(zeros, params, weight_decay=0.5)
    np.testing.assert_allclose(moved["matrix"], 2.0 - 0.1 * 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(moved["norm"], params["norm"])
    np.testing.assert_array_equal(moved["layers"][0]["bias"], params["layers"][0]["bias"])


def test_adam_by_hand():
    """Gradients 1 and 3, beta1 = beta2 = 0.5: bias-corrected mean 7/3, mean square 19/3."""
    optimizer = make_optimizer(OptimizerConfig(**DEFAULTS, beta1=0.5, beta2=0.5, epsilon=1.0), 10)
    params = {"w": jnp.zeros(1)}
    state = optimizer.init(params)
    steps = []
    for gradient in (1.0, 3.0):
        updates, state = optimizer.update({"w": jnp.array([gradient])}, state, params)
        steps.append(float(updates["w"][0]))
    np.testing.assert_allclose(steps[0], -0.1 * 1 / (1 + 1), rtol=1e-6)
    np.testing.assert_allclose(steps[1], -0.1 * (7 / 3) / ((19 / 3) ** 0.5 + 1), rtol=1e-6)


def test_clipping_is_by_global_norm():
    """Norm 5 over both leaves, clipped to 1: as if the gradients had been a fifth.

    A large epsilon makes Adam's step show the size of the gradient.
    """
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    large = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    fifth = {"a": jnp.array([0.6]), "b": jnp.array([0.8])}
    clipped = update(large, params, clip_norm=1.0, epsilon=1.0)
    expected = update(fifth, params, epsilon=1.0)
    np.testing.assert_allclose(clipped["a"], expected["a"], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], expected["b"], rtol=1e-6)
    small = update(fifth, params, clip_norm=1.01, epsilon=1.0)
    np.testing.assert_array_equal(small["a"], expected["a"])


def test_warm_up_reaches_the_updates_and_ends_before_them():
    moved = update({"w": jnp.ones(1)}, {"w": jnp.zeros(1)}, warmup_steps=3)
    np.testing.assert_allclose(moved["w"], -0.1 / 4, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps: 10 must be less than the 10 updates"):
        make_optimizer(OptimizerConfig(**DEFAULTS, schedule="linear", warmup_steps=10), 10)


def test_an_optimizer_is_told_by_its_settings():
    """Stored programs are found by it: no address of this process, and only what they depend on."""
    optimizer = make_optimizer(OptimizerConfig(**DEFAULTS), 10)
    assert optimizer == make_optimizer(OptimizerConfig(**DEFAULTS), 20) and " at 0x" not in repr(optimizer)
    assert optimizer != make_optimizer(OptimizerConfig(**DEFAULTS | {"weight_decay": 0.5}), 10)
    falling = OptimizerConfig(**DEFAULTS | {"schedule": "linear"})
    assert make_optimizer(falling, 10) == make_optimizer(falling, 10) != make_optimizer(falling, 20)


def test_an_update_needs_no_memory_for_the_weights_once_more():
    """Beside weights, moments and gradients. Clipping that divides every entry once keeps the quotients."""
    params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "abcdefgh"}
    optimizer = make_optimizer(OptimizerConfig(**DEFAULTS | {"clip_norm": 1.0}), 10)

    def update(state, gradients):
        return apply_gradients(state, gradients, optimizer)

    state = jax.eval_shape(
        lambda each: TrainState(each, optimizer.init(each), jnp.zeros((), jnp.int32)), params
    )
    compiled = jax.jit(update, donate_argnums=(0,)).lower(state, params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 8 * 256 * 256 * 4
