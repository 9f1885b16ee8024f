"""Whether two ways to decode gave the same responses."""

from collections.abc import Sequence

import numpy as np

from rljax.requests import Completion


def check_equal(expected: Sequence[Completion], found: Sequence[Completion]) -> None:
    """Raises an AssertionError for a token or a logprob that differs."""
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
