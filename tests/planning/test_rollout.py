"""Times of rollouts worked out by hand."""

import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.planning.rollout import Lengths, rollout_time

BUCKETS = Buckets((2, 4), (64, 128))


def _time(batch, length):
    return batch + (10.0 if length == 128 else 0.0), 1.0


def test_equal_lengths_decode_in_lockstep():
    result = rollout_time([5, 5, 5, 5], 8, 4, BUCKETS, _time)
    assert (result.tokens, result.steps, result.seconds) == (20, 5, 20.0)


def test_the_batch_shrinks_with_its_responses():
    result = rollout_time([5, 5, 5, 9], 8, 4, BUCKETS, _time)
    assert result.seconds == 5 * 4.0 + 4 * 2.0


def test_waiting_responses_take_free_slots():
    result = rollout_time([3, 6, 3], 8, 2, BUCKETS, _time)
    assert (result.steps, result.seconds) == (6, 12.0)


def test_longer_caches_cost_more():
    result = rollout_time([10, 10], 60, 2, BUCKETS, _time)
    assert result.seconds == 4 * 2.0 + 6 * 12.0


def test_accepted_drafts_divide_the_passes():
    result = rollout_time([8, 8], 8, 2, BUCKETS, lambda batch, length: (1.0, 4.0))
    assert (result.steps, result.seconds) == (2.0, 2.0)


def test_lengths_have_the_stated_mean_and_maximum():
    lengths = Lengths(mean=1792, longest=7168, sigma=0.8, prompt=512).sample(512)
    assert lengths.mean() == pytest.approx(1792, rel=0.01)
    assert lengths.max() == 7168
    assert lengths.min() >= 1
    assert np.percentile(lengths, 50) < 1792
