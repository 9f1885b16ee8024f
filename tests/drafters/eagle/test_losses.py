"""Losses against numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle import losses

P = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]))
Q = jnp.log(jnp.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_by_hand(wrap):
    # 0.5 * 0.5^2 = 0.125 and 3 - 0.5 = 2.5, halved; then 0 and 0.5 * 1 (both branches meet at 1)
    predicted, target = jnp.array([[0.5, -3.0], [1.0, 1.0]]), jnp.array([[0.0, 0.0], [1.0, 2.0]])
    np.testing.assert_allclose(wrap(losses.smooth_l1)(predicted, target), [1.3125, 0.25], rtol=1e-6)
    # 0.5 ln 4 + 0.25 ln 2 + 0.25 ln 4 = 1.75 ln 2; the entropy of (0.8, 0.1, 0.1)
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.1))
    np.testing.assert_allclose(wrap(losses.cross_entropy)(P, Q), [1.75 * np.log(2), entropy], rtol=1e-6)
    # 0.25 ln(1/2) + 0.5 ln 2 = 0.25 ln 2
    np.testing.assert_allclose(wrap(losses.reverse_kl)(P, Q), [0.25 * np.log(2), 0.0], atol=1e-7)
    np.testing.assert_allclose(wrap(losses.acceptance)(P, Q), [0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(wrap(losses.lk)(P, Q), [-np.log(0.75), 0.0], atol=1e-6)


def test_reverse_kl_is_not_forward_kl():
    p, q = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.5, 0.5]))
    np.testing.assert_allclose(
        losses.reverse_kl(p, q), 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(5.0), rtol=1e-6
    )


def test_lk_has_a_gradient_without_overlap():
    p, q = jnp.array([0.0, -200.0]), jnp.array([-200.0, 0.0])
    value, gradient = jax.value_and_grad(losses.lk, argnums=1)(p, q)
    assert np.isfinite(value) and np.all(np.isfinite(gradient)) and np.any(gradient != 0)


def test_expected_accept_length_by_hand():
    # 1 + 0.5 + 0.5 * 0.4 and 1 + 1 + 0
    accepted = jnp.array([[0.5, 1.0], [0.4, 0.0]])
    np.testing.assert_allclose(losses.expected_accept_length(accepted), [1.7, 2.0], rtol=1e-6)
