"""Advantages of every algorithm against numbers worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.advantages import leave_one_out_advantages, whiten
from rljax.algorithms.estimation import estimate_advantages
from rljax.algorithms.returns import explained_variance, generalized_advantages, token_rewards

MASK = jnp.array([[True, True, True], [True, False, False], [True, True, False], [True, True, True]])
REWARDS = np.array([[1.0, 0.0], [0.5, 2.5]])  # two prompts, two responses each


def compiled(function, *static):
    return jax.jit(function, static_argnames=static)


estimate = compiled(estimate_advantages, "baseline", "normalization", "discount", "gae_lambda")
gae = compiled(generalized_advantages, "discount", "gae_lambda")


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_leave_one_out_by_hand():
    loo = compiled(leave_one_out_advantages, "normalization", "epsilon")
    # Each against the mean of the other three: 4 - 1, 1 - 2, 2 - 5/3, 0 - 7/3.
    close(loo(np.array([[4.0, 1.0, 2.0, 0.0]])), [[3.0, 1 - 2.0, 2 - 5 / 3, -7 / 3]])
    np.testing.assert_array_equal(loo(np.full((3, 7), 0.1)), np.zeros((3, 7)))
    np.testing.assert_array_equal(loo(np.array([[3.0]])), [[0.0]])


def test_whitening_by_hand():
    # Of 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, over 3.
    advantages = jnp.array([[1.0, 2.0, jnp.nan], [3.0, 6.0, jnp.inf]])
    mask = jnp.array([[True, True, False], [True, True, False]])
    std = np.sqrt(14 / 3)
    expected = np.array([[-2, -1, 0], [0, 3, 0]]) / std
    close(compiled(whiten, "epsilon")(advantages, mask, epsilon=0.0), expected)
    close(compiled(whiten, "epsilon")(advantages, mask, epsilon=1.0), expected * std / (std + 1))
    # Equal advantages give exactly 0.
    equal = jnp.full((5, 7), 0.1)
    np.testing.assert_array_equal(compiled(whiten)(equal, jnp.ones((5, 7), bool)), np.zeros((5, 7)))


def test_token_rewards_by_hand():
    penalties = jnp.array([[0.1, 0.2, 0.3], [0.4, jnp.nan, 9.0], [0.0, 0.5, 9.0], [0.0, 0.0, 0.0]])
    rewards = jnp.array([1.0, 2.0, 3.0, 4.0])
    expected = [[-0.1, -0.2, 0.7], [1.6, 0, 0], [0, 2.5, 0], [0, 0, 4]]
    close(compiled(token_rewards)(rewards, penalties, MASK), expected)
    close(compiled(token_rewards)(rewards, None, MASK), [[0, 0, 1], [2, 0, 0], [0, 3, 0], [0, 0, 4]])


def test_gae_by_hand():
    """gamma 1/2, lambda 1/2; the second response is a token shorter, and what is behind it does not count.
    The middle of the third is what a tool answered.
    """
    rewards = jnp.array([[0.0, 1.0, 4.0], [2.0, 1.0, jnp.nan], [0.0, jnp.nan, 4.0]])
    values = jnp.array([[1.0, 2.0, 3.0], [0.0, 1.0, 7.0], [1.0, jnp.nan, 3.0]])
    mask = jnp.array([[True, True, True], [True, True, False], [True, False, True]])
    # First: deltas 0 + 1 - 1 = 0, 1 + 1.5 - 2 = 0.5, 4 - 3 = 1; A = 1, 0.5 + 1/4, 0 + 0.75 / 4.
    # Second: 2 + 0.5 - 0 = 2.5, 1 - 1 = 0; A = 0, 2.5.
    # Third: 0 + 1.5 - 1 = 0.5, 4 - 3 = 1; A = 1, 0.5 + 1/4: no discount for the answer.
    expected = [[0.1875, 0.75, 1.0], [2.5, 0.0, 0.0], [0.75, 0.0, 1.0]]
    close(gae(rewards, values, mask, discount=0.5, gae_lambda=0.5), expected)


def test_gae_at_its_ends():
    """lambda 1 is the return less the value, lambda 0 the error of one step."""
    rng = np.random.default_rng(0)
    rewards, values = (jnp.asarray(rng.normal(size=MASK.shape), jnp.float32) for _ in range(2))
    inside = np.where(MASK, rewards, 0.0)
    returns = np.cumsum(inside[:, ::-1], axis=1)[:, ::-1]
    close(gae(rewards, values, MASK, discount=1.0, gae_lambda=1.0), np.where(MASK, returns - values, 0))
    following = np.pad(np.where(MASK, values, 0.0), ((0, 0), (0, 1)))[:, 1:]
    errors = np.where(MASK, inside + 0.9 * following - values, 0)
    close(gae(rewards, values, MASK, discount=0.9, gae_lambda=0.0), errors)


def test_grpo_and_dr_grpo():
    spread = np.asarray(MASK, np.float32)
    half = np.array([[0.5], [-0.5], [-1.0], [1.0]])
    actual, returns = estimate(REWARDS, MASK, "group", "none")
    close(actual, half * spread)
    assert returns is None
    # Standard deviations with G - 1 = 1: sqrt(1/2) and sqrt(2).
    actual, _ = estimate(REWARDS, MASK, "group", "std")
    np.testing.assert_allclose(actual, half / np.sqrt([[0.5], [0.5], [2], [2]]) * spread, rtol=1e-4)


def test_rloo_with_the_kl_in_the_reward_of_the_response():
    penalties = jnp.array([[0.1, 0.1, 0.3], [0.2, 9, 9], [0.1, 0.4, 9], [0.0, 0.2, 0.3]])
    # Rewards less 0.5, 0.2, 0.5, 0.5: 0.5 and -0.2, 0 and 2; against the other one.
    expected = np.array([[0.7], [-0.7], [-2.0], [2.0]]) * np.asarray(MASK)
    close(estimate(REWARDS, MASK, "leave_one_out", "none", penalties=penalties).advantages, expected)


def test_reinforce_plus_plus():
    """Returns from each token on, whitened: the penalty of a token does not reach those after it."""
    penalties = jnp.array([[0.1, 0.2, 0.3], [0.5, 9, 9], [0.0, 0.0, 9], [0.0, 1.0, 0.5]])
    to_go = np.array([[0.4, 0.5, 0.7], [-0.5, 0, 0], [0.5, 0.5, 0], [1.0, 1.0, 2.0]])
    inside = to_go[np.asarray(MASK)]
    expected = np.where(MASK, (to_go - inside.mean()) / inside.std(ddof=1), 0)
    np.testing.assert_allclose(
        estimate(REWARDS, MASK, "none", "batch", penalties=penalties).advantages, expected, rtol=1e-4
    )
    close(estimate(REWARDS, MASK, "none", "none", penalties=penalties).advantages, to_go)
    discounted = estimate(REWARDS, MASK, "none", "none", discount=0.5).advantages
    close(discounted, [[0.25, 0.5, 1], [0, 0, 0], [0.25, 0.5, 0], [0.625, 1.25, 2.5]])


def test_reinforce_plus_plus_baseline():
    centred = np.array([[0.5], [-0.5], [-1.0], [1.0]]) * np.ones(3)
    inside = centred[np.asarray(MASK)]  # long responses count more in mean and standard deviation
    expected = np.where(MASK, (centred - inside.mean()) / inside.std(ddof=1), 0)
    np.testing.assert_allclose(estimate(REWARDS, MASK, "group", "batch").advantages, expected, rtol=1e-4)


def test_a_critic():
    values = jnp.array([[0.5, 0.5, 0.5], [0.0, 9, 9], [0.0, 1.0, 9], [2.0, 2.0, 2.0]])
    actual, returns = estimate(REWARDS, MASK, "critic", "none", 1.0, 1.0, None, values)
    close(actual, [[0.5, 0.5, 0.5], [0, 0, 0], [0.5, -0.5, 0], [0.5, 0.5, 0.5]])
    close(returns, [[1, 1, 1], [0, 0, 0], [0.5, 0.5, 0], [2.5, 2.5, 2.5]])
    whitened, same = estimate(REWARDS, MASK, "critic", "batch", 1.0, 1.0, None, values)
    assert abs(float(jnp.sum(whitened))) < 1e-5
    np.testing.assert_array_equal(same, returns)  # whitening is for the policy only


def test_explained_variance_by_hand():
    returns, mask = jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])
    explained = compiled(explained_variance)
    close(explained(returns, returns, mask), 1.0)
    close(explained(jnp.full((1, 3), 5.0), returns, mask), 0.0)  # a constant
    close(explained(jnp.array([[1.5, 2.5, 0.0]]), returns, mask), 0.75)  # errors of a half, deviations of 1
    close(explained(returns, jnp.ones((1, 3)), mask), 0.0)  # nothing to explain


def test_bad_arguments_are_named():
    whole = functools.partial(estimate_advantages, REWARDS, MASK)
    with pytest.raises(ValueError, match=r"rewards \(2, 3\) and mask \(4, 3\)"):
        estimate_advantages(np.zeros((2, 3)), MASK, "group", "std")
    with pytest.raises(ValueError, match="'critic' without values"):
        whole("critic", "batch")
    with pytest.raises(ValueError, match="'group' with values"):
        whole("group", "std", values=jnp.zeros((4, 3)))
    with pytest.raises(ValueError, match='"std" needs the rewards of a group'):
        whole("none", "std")
    with pytest.raises(ValueError, match="expected one \\[N, L\\]"):
        generalized_advantages(jnp.zeros((2, 3)), jnp.zeros((2, 2)), jnp.ones((2, 3), bool), 1.0, 1.0)
    with pytest.raises(ValueError, match="differ in shape"):
        whiten(jnp.zeros((2, 3)), jnp.ones((2, 2), bool))
