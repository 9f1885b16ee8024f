"""DAPO's soft overlong punishment, Eq. 13, number by number."""

import numpy as np
import pytest

from rljax.algorithms.reward_shaping import soft_overlong_punishment


def test_by_hand():
    lengths = [0, 1, 79, 80, 81, 85, 90, 99, 100, 101, 500]
    expected = np.array([0, 0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1, -1])
    for penalty in ({}, {"penalty": 0.5}):
        punishment = soft_overlong_punishment(lengths, max_length=100, buffer=20, **penalty)
        np.testing.assert_allclose(punishment, penalty.get("penalty", 1) * expected, rtol=1e-6)
        assert punishment.dtype == np.float32 and not np.signbit(punishment[:4]).any()  # no negative zero
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match=f"buffer: {buffer}, expected 1 to max_length 100"):
            soft_overlong_punishment([1], max_length=100, buffer=buffer)
