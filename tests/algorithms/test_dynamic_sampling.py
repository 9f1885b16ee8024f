"""Dynamic sampling fills a batch with informative groups, or says why it cannot."""

import numpy as np
import pytest

from rljax.algorithms.dynamic_sampling import DynamicSampler, DynamicSamplingError, informative_groups
from rljax.errors import UserError

RIGHT, WRONG, MIXED = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]


def test_informative_groups():
    rewards = [RIGHT, WRONG, MIXED, [0.1, 0.1, 0.1], [0.1, 0.1, 0.2]]
    np.testing.assert_array_equal(informative_groups(rewards), [False, False, True, False, True])
    left_out = [[np.nan, 1.0, 0.0], [np.nan, 1.0, 1.0], [np.nan] * 3]
    np.testing.assert_array_equal(informative_groups(left_out), [True, False, False])
    assert not informative_groups([[1e9, 1e9 + 1, 1e9]]).any()  # nor do their advantages differ, in float32
    with pytest.raises(ValueError, match="rewards"):
        informative_groups([1.0, 0.0])


def test_fills_over_rounds_keeps_the_order_and_discards_the_surplus():
    sampler = DynamicSampler(num_groups=3, max_rounds=5)
    assert sampler.offer(["a", "b", "c"], [MIXED, RIGHT, WRONG]) == 1
    assert not sampler.full and sampler.num_missing == 2
    assert sampler.offer(["d", "e"], [WRONG, RIGHT]) == 0
    assert sampler.offer(["f", "g", "h", "i"], [MIXED, WRONG, MIXED, MIXED]) == 3
    assert sampler.full and sampler.rounds == 3 and sampler.num_offered == 9
    assert sampler.take() == ["a", "f", "h"]

    # "i" is gone: the next batch starts from nothing, with all its rounds before it.
    assert not sampler.full and sampler.num_missing == 3 and sampler.rounds == 0 and sampler.num_offered == 0
    sampler.offer(["j", "k", "l"], [MIXED] * 3)
    assert sampler.take() == ["j", "k", "l"]
    sampler = DynamicSampler(num_groups=2, max_rounds=2)  # the last round may fill it
    sampler.offer(["a"], [MIXED])
    sampler.offer(["b"], [MIXED])
    assert sampler.take() == ["a", "b"]


def test_gives_up_after_the_stated_rounds_and_says_what_it_saw():
    sampler = DynamicSampler(num_groups=4, max_rounds=3)
    sampler.offer("abcd", [WRONG, WRONG, MIXED, WRONG])
    sampler.offer("efgh", [WRONG, RIGHT, WRONG, WRONG])
    with pytest.raises(DynamicSamplingError) as caught:
        sampler.offer("ijkl", [WRONG, MIXED, RIGHT, WRONG])
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert message.startswith(
        "algorithm.dynamic_sampling: 3 rounds gave 2 of 4 groups with differing rewards"
    )
    assert "12 groups sampled, 8 all at the least reward (0), 2 all at the greatest (1); " in message
    assert "too hard" in message and "dynamic_sampling_max_rounds" in message and "\n" not in message


SHAPED = [0.1, 0.1, 0.1]  # all wrong, in the right format


def test_all_wrong_and_all_right_are_said_of_what_is_known_to_be():
    for rewards, passed, says in (
        ([SHAPED] * 4, [WRONG] * 4, r"4 groups sampled, 4 all wrong, 0 all right; the task is too hard"),
        ([RIGHT, SHAPED], [RIGHT, RIGHT], r"sampled, 0 all wrong, 2 all right; the task is too easy"),
        ([SHAPED, RIGHT], [MIXED, WRONG], r"1 all wrong, 0 all right, 1 all the same; the task is too hard"),
        ([SHAPED] * 4, None, r"4 groups sampled, 4 all the same \(0\.1\); the rewards do not tell"),
        ([SHAPED, [np.nan] * 3], None, r"1 all the same \(0\.1\), 1 without a reward that counts; the"),
        ([SHAPED, [np.nan, 1, 1]], None, r"1 all at the least reward \(0\.1\), 1 all at the greatest \(1\);"),
    ):
        sampler = DynamicSampler(num_groups=1, max_rounds=1)
        passed = None if passed is None else np.asarray(passed) > 0
        with pytest.raises(DynamicSamplingError, match=says):
            sampler.offer(range(len(rewards)), rewards, passed)


def test_misuse_is_an_error():
    sampler = DynamicSampler(num_groups=1, max_rounds=2)
    with pytest.raises(RuntimeError, match="0 of 1"):
        sampler.take()
    with pytest.raises(ValueError, match="2 groups"):
        sampler.offer(["a", "b"], [MIXED])
    sampler.offer(["a"], [MIXED])
    with pytest.raises(RuntimeError, match="full"):
        sampler.offer(["b"], [MIXED])
    with pytest.raises(ValueError, match="at least 1"):
        DynamicSampler(num_groups=0, max_rounds=1)
