"""Times of rollouts worked out by hand."""

import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.planning.rollout import Lengths, rollout_time

BUCKETS = Buckets((2, 4), (64, 128))


def _time(batch, length):
    return batch + (10.0 if length == 128 else 0.0), 1.0


@pytest.mark.parametrize(
    ("lengths", "prompt", "slots", "steps", "seconds"),
    [
        ([5, 5, 5, 5], 8, 4, 5, 20.0),  # in lockstep
        ([5, 5, 5, 9], 8, 4, 9, 5 * 4.0 + 4 * 2.0),  # the batch shrinks with its responses
        ([3, 6, 3], 8, 2, 6, 12.0),  # waiting ones take free slots
        ([10, 10], 60, 2, 10, 4 * 2.0 + 6 * 12.0),  # longer caches cost more
    ],
)
def test_decodes_in_lockstep_through_the_buckets(lengths, prompt, slots, steps, seconds):
    result = rollout_time(lengths, prompt, slots, BUCKETS, _time)
    assert (result.tokens, result.steps, result.seconds) == (sum(lengths), steps, seconds)


def test_accepted_drafts_divide_the_passes():
    result = rollout_time([8, 8], 8, 2, BUCKETS, lambda batch, length: (1.0, 4.0))
    assert (result.steps, result.seconds) == (2.0, 2.0)


def test_lengths_have_the_stated_mean_and_maximum():
    lengths = Lengths(mean=1792, longest=7168, sigma=0.8, prompt=512).sample(512)
    assert lengths.mean() == pytest.approx(1792, rel=0.01)
    assert lengths.max() == 7168
    assert lengths.min() >= 1
    assert np.percentile(lengths, 50) < 1792
