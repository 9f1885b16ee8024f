"""The clipped policy loss by hand: values, gradients, and sums that do not care how a mini-batch is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import aggregation_weights, policy_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


loss_of = jax.jit(functools.partial(policy_loss, **CLIPS))
value_and_gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))


def test_by_hand():
    """Tokens inside, above and below the interval, each with either sign of the advantage; one masked."""
    ratios = np.array([1.1, 1.1, 1.5, 1.5, 0.5, 0.5, 7.0])
    advantages = jnp.array([2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 5.0])
    mask = jnp.array([True] * 6 + [False])
    weights = jnp.array([0.1, 0.1, 0.2, 0.1, 0.3, 0.2, 1.0])
    rollout_logprobs = jnp.full(7, -2.0)
    logprobs = jnp.asarray(np.log(ratios) - 2.0, jnp.float32)
    (loss, metrics), gradient = value_and_gradient(logprobs, rollout_logprobs, advantages, mask, weights)
    # min(r A, clip(r) A):  2.2, -2.2, 2 * 1.28 (clipped), -3.0, 1.0, -2 * 0.8 (clipped)
    objective = 0.1 * 2.2 - 0.1 * 2.2 + 0.2 * 2.56 - 0.1 * 3.0 + 0.3 * 1.0 - 0.2 * 1.6
    np.testing.assert_allclose(loss, -objective, rtol=1e-5)
    # d(-w r A)/d logprob = -w r A where not clipped
    np.testing.assert_allclose(gradient, [-0.22, 0.22, 0.0, 0.3, -0.3, 0.0, 0.0], rtol=1e-5)
    assert gradient[2] == 0 and gradient[5] == 0 and gradient[6] == 0  # exactly

    np.testing.assert_allclose(metrics["clip_fraction_high"], 0.2, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction_low"], 0.2, rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio_mean"], 0.2 * 1.1 + 0.3 * 1.5 + 0.5 * 0.5, rtol=1e-5)
    k3 = [0.2 * (0.1 - np.log(1.1)), 0.3 * (0.5 - np.log(1.5)), 0.5 * (-0.5 - np.log(0.5))]
    np.testing.assert_allclose(metrics["rollout_kl"], sum(k3), rtol=1e-5)


def test_on_policy_is_the_plain_policy_gradient():
    logprobs, advantages = jnp.array([[-1.0, -0.3]]), jnp.array([[2.0, -1.0]])
    weights = jnp.array([[0.25, 0.75]])
    mask = jnp.ones((1, 2), bool)
    (loss, metrics), gradient = value_and_gradient(logprobs, logprobs, advantages, mask, weights)
    assert loss == -(0.25 * 2.0 - 0.75)
    np.testing.assert_array_equal(gradient, -weights * advantages)
    assert metrics["ratio_mean"] == 1 and metrics["rollout_kl"] == 0
    assert metrics["clip_fraction_low"] == 0 and metrics["clip_fraction_high"] == 0


def test_a_token_that_a_filter_excludes_by_now_leaves_the_metrics_finite():
    arguments = (jnp.array([-jnp.inf, -1.0]), jnp.array([-1.0, -1.5]), jnp.ones(2), jnp.ones(2, bool))
    loss, metrics = loss_of(*arguments, jnp.full(2, 0.5))
    assert np.isfinite(loss)
    np.testing.assert_allclose(metrics["rollout_kl"], 0.5 * (np.exp(0.5) - 1 - 0.5), rtol=1e-5)


def test_what_is_masked_has_no_effect():
    clean, mask, ones = np.float32([-1.0, -2.0, 0.0]), np.array([True, True, False]), np.ones(3, np.float32)
    expected = value_and_gradient(clean, clean - np.float32(0.1), ones, mask, ones)
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
        dirty, more = (np.where(mask, each, np.float32(garbage)) for each in (clean, ones))
        for logprobs, advantages, weights in ((dirty, ones, more), (clean, more, ones)):
            found = value_and_gradient(logprobs, clean - np.float32(0.1), advantages, mask, weights)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("mode", "lengths", "expected"),
    [
        ("token_mean", [1, 3, 4], [1 / 8, 1 / 8, 1 / 8]),
        ("sequence_mean", [1, 3, 4], [1 / 3, 1 / 9, 1 / 12]),
        ("token_mean", [2, 0, 4], [1 / 6, 0, 1 / 6]),
        ("sequence_mean", [2, 0, 4], [1 / 4, 0, 1 / 8]),
    ],
)
def test_aggregation_weights_by_hand(mode, lengths, expected):
    np.testing.assert_allclose(aggregation_weights(lengths, mode), expected, rtol=1e-6)
    many = np.random.default_rng(1).integers(0, 500, 256)
    weights = aggregation_weights(many, mode)
    assert weights.dtype == np.float32  # and they sum to one over all tokens
    np.testing.assert_allclose(np.sum(weights.astype(np.float64) * many), 1.0, rtol=1e-6)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"weights \(3,\)"):
        policy_loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), jnp.zeros(2, bool), jnp.zeros(3), **CLIPS)
    with pytest.raises(ValueError, match="mask: float32"):
        policy_loss(*[jnp.zeros(2)] * 5, **CLIPS)
    with pytest.raises(ValueError, match="mode: 'mean'"):
        aggregation_weights([1], "mean")
    with pytest.raises(ValueError, match="nothing to average"):
        aggregation_weights([0, 0], "token_mean")
    with pytest.raises(ValueError, match="integers"):
        aggregation_weights([0.5], "token_mean")
