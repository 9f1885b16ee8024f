"""The critic's clipped loss by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.value_loss import value_loss


def test_by_hand():
    """Inside the clip range; beyond it towards the return (no gradient), and away from it; masked."""
    old = jnp.array([1.0, 1.0, 1.0, 1.0])
    values = jnp.array([1.2, 2.0, 0.0, jnp.nan])
    returns = jnp.array([2.0, 3.0, 3.0, jnp.inf])
    mask = jnp.array([True, True, True, False])
    weights = jnp.array([0.5, 0.3, 0.2, 1.0])
    value_and_gradient = jax.jit(jax.value_and_grad(functools.partial(value_loss, clip=0.5), has_aux=True))
    (loss, metrics), gradient = value_and_gradient(values, old, returns, mask, weights)
    # 0.8^2; clipped to 1.5: 1.5^2 > 1^2; clipped to 0.5: 2.5^2 < 3^2.
    np.testing.assert_allclose(loss, 0.5 * (0.5 * 0.64 + 0.3 * 2.25 + 0.2 * 9.0), rtol=1e-5)
    np.testing.assert_allclose(gradient, [0.5 * -0.8, 0.0, 0.2 * -3.0, 0.0], rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], 0.3, rtol=1e-6)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"returns \(3,\)"):
        value_loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(3), jnp.ones(2, bool), jnp.ones(2), 0.2)
