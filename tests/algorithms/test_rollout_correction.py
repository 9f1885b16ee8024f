"""Correction for rollouts that are not quite the policy's, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import policy_loss
from rljax.algorithms.rollout_correction import rollout_correction

MASK = jnp.array([[True, True, True], [True, True, False]])
RATIOS = np.array([[1.0, 3.0, 0.25], [1.5, 0.8, 1.0]])  # pi_old / mu
ROLLOUT = jnp.array([[-1.0, -2.0, -0.5], [-1.0, -3.0, jnp.nan]])
OLD = ROLLOUT + jnp.asarray(np.log(RATIOS), jnp.float32)


correct = jax.jit(rollout_correction, static_argnames=("cap", "left_out", "low", "high"))


def inside(array):
    return np.asarray(array)[np.asarray(MASK)]


def test_a_cap_by_hand():
    factors, kept, metrics = correct(OLD, ROLLOUT, MASK, 2.0, "none", 0.5, 2.0)
    np.testing.assert_allclose(inside(factors), [1.0, 2.0, 0.25, 1.5, 0.8], rtol=1e-5)
    np.testing.assert_array_equal(kept, MASK)
    np.testing.assert_allclose(metrics["ratio_mean"], 6.55 / 5, rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_max"], 3.0, rtol=1e-5)
    np.testing.assert_allclose(metrics["truncated"], 1 / 5, rtol=1e-6)
    assert metrics["masked"] == 0
    k3 = sum(x - 1 - np.log(x) for x in (1.0, 3.0, 0.25, 1.5, 0.8)) / 5
    np.testing.assert_allclose(metrics["kl"], k3, rtol=1e-5)


def test_masks_by_hand():
    factors, kept, metrics = correct(OLD, ROLLOUT, MASK, None, "token", 0.5, 2.0)
    np.testing.assert_array_equal(kept, [[True, False, False], [True, True, False]])
    np.testing.assert_array_equal(inside(factors), np.ones(5))
    np.testing.assert_allclose(metrics["masked"], 2 / 5, rtol=1e-6)
    # Geometric means: (3 / 4)^(1/3) = 0.909 and 1.2^(1/2) = 1.095.
    bands = (0.9, 1.1, True, True), (0.95, 1.1, False, True), (0.9, 1.09, True, False)
    for low, high, first, second in bands:
        kept = correct(OLD, ROLLOUT, MASK, None, "sequence", low, high).kept
        np.testing.assert_array_equal(kept, np.asarray(MASK) & [[first], [second]])
    # No mismatch is no correction.
    factors, kept, metrics = correct(ROLLOUT, ROLLOUT, MASK, 2.0, "token", 0.5, 2.0)
    np.testing.assert_array_equal(inside(factors), np.ones(5))
    np.testing.assert_array_equal(kept, MASK)
    assert metrics["kl"] == 0 and metrics["ratio_mean"] == 1 and metrics["masked"] == 0


def test_a_token_that_the_training_pass_excludes_weighs_nothing():
    impossible = OLD.at[0, 0].set(-jnp.inf)
    factors, kept, metrics = correct(impossible, ROLLOUT, MASK, 2.0, "token", 0.5, 2.0)
    assert factors[0, 0] == 0 and not kept[0, 0] and np.isfinite(metrics["kl"])
    np.testing.assert_array_equal(
        correct(impossible, ROLLOUT, MASK, None, "sequence", 0.5, 2.0).kept[0], [False] * 3
    )


def test_a_factor_of_the_advantages_is_a_factor_of_the_loss():
    """c min(r A, clip(r) A) = min(r cA, clip(r) cA), value and gradient: what the module relies on."""
    rng = np.random.default_rng(0)
    logprobs, old, advantages = (jnp.asarray(rng.normal(0, 0.5, 200), jnp.float32) for _ in range(3))
    factors = jnp.asarray(rng.uniform(0, 2, 200), jnp.float32)
    mask, weights = jnp.ones(200, bool), jnp.full(200, 1 / 200)

    @jax.jit
    def loss(x, advantages, weights):
        return policy_loss(x, old, advantages, mask, weights, 0.2, 0.3)[0]

    inner = jax.value_and_grad(loss)(logprobs, factors * advantages, weights)
    outer = jax.value_and_grad(loss)(logprobs, advantages, factors * weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), inner, outer)


def test_truncation_recovers_the_expectation_under_the_training_policy():
    """Drawn from mu, averaged with the factors: the mean under pi_old, which without them is another."""
    mu, old = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    values = np.array([1.0, 2.0, 4.0])
    actions = np.arange(3)[None]
    logs = [jnp.log(jnp.asarray(each, jnp.float32))[actions] for each in (old, mu)]
    factors = np.asarray(correct(*logs, jnp.ones((1, 3), bool), 2.5, "none", 0.5, 2.0).factors)[0]
    np.testing.assert_allclose(np.sum(mu * factors * values), old @ values, rtol=1e-5)
    assert abs(mu @ values - old @ values) > 0.1


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="left_out: 'row'"):
        rollout_correction(OLD, ROLLOUT, MASK, None, "row", 0.5, 2.0)
    with pytest.raises(ValueError, match=r"expected one \[N, L\]"):
        rollout_correction(OLD[:1], ROLLOUT, MASK, None, "token", 0.5, 2.0)
