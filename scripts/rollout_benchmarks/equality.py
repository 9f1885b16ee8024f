"""Whether two ways to decode gave the same responses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.requests import Completion


def check_equal(expected: Sequence[Completion], found: Sequence[Completion]) -> None:
    """Raises an AssertionError for a token or a logprob that differs."""
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@dataclasses.dataclass
class Count:
    """Numbers of compared tokens and of differences.

    Attributes:
      tokens: number of compared tokens, up to the first difference of each response.
      drafted, accepted: numbers of verified and of accepted draft tokens.
      flips: for each response that differs, its step, request and position, the two tokens, and the largest
        difference of logprobs over the 16 tokens before: 0 shows an error of verification, a larger one that
        a near-tie was decided differently.
      logprobs: number of equal tokens whose logprobs differ in their bits.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    flips: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    logprobs: int = 0

    def compare(self, plain: Completion, drafted: Completion, where: Mapping[str, int]) -> None:
        """Adds one response."""
        length = min(len(plain.response_ids), len(drafted.response_ids))
        different = np.flatnonzero(plain.response_ids[:length] != drafted.response_ids[:length])
        same = int(different[0]) if len(different) else length
        drift = np.abs(plain.logprobs[:same] - drafted.logprobs[:same])
        self.tokens += same
        self.logprobs += int((drift > 0).sum())
        if len(different) or len(plain.response_ids) != len(drafted.response_ids):
            self.tokens += 1
            before = drift[-16:].max(initial=0.0)
            pair = [
                int(one.response_ids[same]) if same < len(one.response_ids) else None
                for one in (plain, drafted)
            ]
            self.flips.append({**where, "position": same, "tokens": pair, "drift_before": float(before)})
