"""GSPO's ratio of whole responses in packed rows, by hand, and Dr. GRPO's constant normalisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import aggregation_weights, policy_loss
from rljax.algorithms.segments import segment_means

# Two rows with two responses each (prompts where the mask is False), and padding (segment 0).
IDS = jnp.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2, 0]])
MASK = jnp.array(
    [[False, True, True, False, True, False, False], [True, True, True, False, True, True, False]]
)
LOSS = functools.partial(policy_loss, clip_low=0.2, clip_high=0.3)


def spread(numbers, fill=0.0):
    """Numbers of masked positions, in order, as [2, 7]."""
    out = np.full(MASK.shape, fill, np.float32)
    out[np.asarray(MASK)] = numbers
    return jnp.asarray(out)


def test_means_of_segments_by_hand():
    values = spread([1, 3, 5, 6, 0, 3, -1, 2], fill=np.nan)
    expected = spread([2, 2, 5, 3, 3, 3, 0.5, 0.5])
    np.testing.assert_allclose(jax.jit(segment_means)(values, MASK, IDS), expected, rtol=1e-6)


def test_the_ratio_of_a_response_by_hand():
    """Mean log ratios log 1.2 (inside), log 2 (clipped), log 0.5 (clipped), log 1.1, of responses of 2, 1, 3
    and 2 tokens, weighted as GRPO does.
    """
    log = np.log
    ratios = spread([log(1.44), 0.0, log(2), log(0.125), 0.0, 0.0, log(1.1), log(1.1)])
    advantages = spread([2, 2, 1, -1, -1, -1, -3, -3])
    lengths = [2, 1, 3, 2]
    weights = spread(np.repeat(aggregation_weights(lengths, "sequence_mean"), lengths))
    loss = lambda x: LOSS(x, -ratios, advantages, MASK, weights, segment_ids=IDS)  # noqa: E731
    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.zeros(MASK.shape))
    # Eq. 5: the mean over the four responses of min(s A, clip(s) A).
    np.testing.assert_allclose(value, -(2.4 + 1.3 - 0.8 - 3.3) / 4, rtol=1e-5)
    # d s / d log pi(t) = s / |o|, nothing where clipped.
    expected = -spread([2.4 / 2, 2.4 / 2, 0, 0, 0, 0, -3.3 / 2, -3.3 / 2]) / 4
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_mean"], (1.2 + 2 + 0.5 + 1.1) / 4, rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction_high"], 1 / 4, rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction_low"], 1 / 4, rtol=1e-5)


def test_a_response_with_an_impossible_token_has_ratio_0_and_no_gradient():
    logprobs = spread([-jnp.inf, -1, -1, -1, -1, -1, -1, -1], fill=-jnp.inf)
    ones = spread(np.ones(8))
    loss = lambda x: LOSS(x, -ones, ones, MASK, ones / 8, segment_ids=IDS)[0]  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(loss))(logprobs)
    np.testing.assert_allclose(value, -6 / 8, rtol=1e-6)
    assert np.isfinite(gradient).all() and np.all(np.asarray(gradient)[0, 1:3] == 0)


def test_constant_aggregation_by_hand():
    np.testing.assert_allclose(aggregation_weights([1, 3, 4], "constant", 8), [1 / 24] * 3, rtol=1e-6)
    np.testing.assert_allclose(aggregation_weights([2, 0], "constant", 8), [1 / 8, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="max_length: 3, expected at least the longest, 4"):
        aggregation_weights([1, 4], "constant", 3)
    with pytest.raises(ValueError, match="max_length: None"):
        aggregation_weights([1, 4], "constant")
    with pytest.raises(ValueError, match=r"segment_ids \(7,\): expected one shape \[R, T\]"):
        segment_means(jnp.zeros((2, 7)), MASK, IDS[0])
