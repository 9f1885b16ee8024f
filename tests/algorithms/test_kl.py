"""KL estimators, checked by exact enumeration over a small vocabulary instead of by sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.kl import kl_estimate

POLICY_LOGITS = jnp.array([0.3, -1.2, 0.9, 0.1, -0.4])
REFERENCE_LOGITS = jnp.array([-0.5, 0.4, 0.7, 0.0, -1.0])


estimate = jax.jit(kl_estimate, static_argnums=2)


@jax.jit
def kl(logits, other_logits):
    logprobs, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - other))


def test_by_hand():
    logprobs, reference = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.4]))  # r = 1/2 and 2
    log2 = np.log(2)
    np.testing.assert_allclose(estimate(logprobs, reference, "k1"), [log2, -log2], rtol=1e-6)
    np.testing.assert_allclose(estimate(logprobs, reference, "k2"), [log2**2 / 2, log2**2 / 2], rtol=1e-6)
    np.testing.assert_allclose(estimate(logprobs, reference, "k3"), [log2 - 0.5, 1 - log2], rtol=1e-5)


def test_k3_keeps_its_precision_near_zero():
    """For log r = 1e-3, k3 is about log(r)^2 / 2; exp(log r) - 1 - log r is off by percents in float32."""
    np.testing.assert_allclose(estimate(jnp.zeros(1), jnp.full(1, 1e-3), "k3"), 0.5e-6, rtol=5e-3)


def test_expected_value():
    logprobs, reference = jax.nn.log_softmax(POLICY_LOGITS), jax.nn.log_softmax(REFERENCE_LOGITS)
    for estimator, unbiased in (("k1", True), ("k2", False), ("k3", True)):
        expected = np.sum(np.exp(logprobs) * estimate(logprobs, reference, estimator))
        bias = abs(expected - kl(POLICY_LOGITS, REFERENCE_LOGITS))
        assert bias < 1e-6 if unbiased else bias > 1e-3


def test_expected_gradients_are_as_documented():
    """Samples from the policy: their probabilities get no gradient, their logprobs do."""

    def expected_loss(logits, estimator):
        logprobs = jax.nn.log_softmax(logits)
        probabilities = jax.lax.stop_gradient(jnp.exp(logprobs))
        return jnp.sum(probabilities * estimate(logprobs, jax.nn.log_softmax(REFERENCE_LOGITS), estimator))

    gradient = jax.jit(jax.grad(expected_loss), static_argnums=1)
    reverse = jax.jit(jax.grad(kl))(POLICY_LOGITS, REFERENCE_LOGITS)
    forward = jax.jit(jax.grad(kl, argnums=1))(REFERENCE_LOGITS, POLICY_LOGITS)
    assert np.max(np.abs(reverse - forward)) > 1e-2  # or the next lines would not tell them apart
    np.testing.assert_allclose(gradient(POLICY_LOGITS, "k1"), np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(gradient(POLICY_LOGITS, "k2"), reverse, atol=1e-6)
    np.testing.assert_allclose(gradient(POLICY_LOGITS, "k3"), forward, atol=1e-6)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="differ in shape"):
        kl_estimate(jnp.zeros(3), jnp.zeros((1, 3)), "k1")
    with pytest.raises(ValueError, match="estimator: 'k4'"):
        kl_estimate(jnp.zeros(3), jnp.zeros(3), "k4")
