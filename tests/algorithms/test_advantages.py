"""Group-relative advantages against numbers worked out by hand."""

import jax
import numpy as np
import pytest

from rljax.algorithms.advantages import group_relative_advantages, leave_one_out_advantages

advantages_of = jax.jit(group_relative_advantages, static_argnames=("normalization", "epsilon"))


def test_std_by_hand():
    # Group 0: mean 1/4, squares 9/16 + 3/16 = 3/4, over G - 1 = 3: std 1/2. Group 1: mean 2, squares 10, std
    # sqrt(10/3).
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 4.0, 3.0, 0.0]])
    advantages = advantages_of(rewards, normalization="std", epsilon=0.0)
    root = np.sqrt(10 / 3)
    expected = [[1.5, -0.5, -0.5, -0.5], [-1 / root, 2 / root, 1 / root, -2 / root]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    assert advantages.dtype == np.float32
    # Epsilon is added to the deviation, and "none" only centres.
    advantages = advantages_of(np.array([[1.0, 0.0, 0.0, 0.0]]), normalization="std", epsilon=0.5)
    np.testing.assert_allclose(advantages, [[0.75, -0.25, -0.25, -0.25]], rtol=1e-6)
    advantages = advantages_of(np.array([[1, 0, 0, 0], [1, 4, 3, 0]]), normalization="none")  # integers, too
    np.testing.assert_array_equal(advantages, [[0.75, -0.25, -0.25, -0.25], [-1, 2, 1, -2]])
    np.testing.assert_array_equal(advantages_of(np.array([[3.0]])), [[0.0]])  # a group of one


def test_equal_rewards_are_exactly_zero():
    """The mean of G equal numbers need not be that number in float32; some of these are not."""
    values = np.random.default_rng(0).uniform(-3, 3, 500).astype(np.float32)
    rewards = np.repeat(values[:, None], 7, axis=1)
    assert np.any(np.asarray(jax.numpy.mean(rewards, axis=1)) != values)
    for normalization in ("std", "none"):
        np.testing.assert_array_equal(advantages_of(rewards, normalization=normalization), np.zeros((500, 7)))


def test_a_response_that_is_left_out_is_in_no_mean_and_no_deviation():
    """The other four are those of `test_std_by_hand`; groups of one and of none are 0, not NaN."""
    rewards = np.array([[1.0, 9.0, 0.0, 0.0, 0.0], [5.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    scored = np.array([[True, False, True, True, True], [True, *[False] * 4], [False] * 5])
    nothing = np.zeros((2, 5))
    advantages = advantages_of(rewards, normalization="std", epsilon=0.0, scored=scored)
    np.testing.assert_allclose(advantages, [[1.5, 0, -0.5, -0.5, -0.5], *nothing], rtol=1e-6)
    advantages = advantages_of(rewards, normalization="none", scored=scored)
    np.testing.assert_array_equal(advantages, [[0.75, 0, -0.25, -0.25, -0.25], *nothing])
    alone = leave_one_out_advantages(rewards, scored=scored)
    np.testing.assert_allclose(alone, [[1, 0, -1 / 3, -1 / 3, -1 / 3], *nothing], rtol=1e-6)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"rewards: shape \(4,\)"):
        group_relative_advantages(np.zeros(4))
    with pytest.raises(ValueError, match="normalization: 'var'"):
        group_relative_advantages(np.zeros((1, 4)), normalization="var")
