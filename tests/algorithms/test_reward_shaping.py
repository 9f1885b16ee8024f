"""DAPO's soft overlong punishment, Eq. 13, number by number."""

import numpy as np
import pytest

from rljax.algorithms.reward_shaping import soft_overlong_punishment


def test_by_hand():
    lengths = [0, 1, 79, 80, 81, 85, 90, 99, 100, 101, 500]
    expected = [0, 0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1, -1]
    punishment = soft_overlong_punishment(lengths, max_length=100, buffer=20)
    np.testing.assert_allclose(punishment, expected, rtol=1e-6)
    assert punishment.dtype == np.float32
    np.testing.assert_allclose(
        soft_overlong_punishment(lengths, max_length=100, buffer=20, penalty=0.5),
        0.5 * np.array(expected),
        rtol=1e-6,
    )


def test_no_negative_zero():
    assert not np.any(np.signbit(soft_overlong_punishment([1, 2], max_length=100, buffer=20)))


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_outside_the_length_is_named(buffer):
    with pytest.raises(ValueError, match=f"buffer: {buffer}, expected 1 to max_length 100"):
        soft_overlong_punishment([1], max_length=100, buffer=buffer)
