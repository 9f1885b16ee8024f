"""A window of draft tokens for every request: wider after a draft accepted whole, narrow after a rejection.

RhymeRL (arXiv 2508.18588), section 5.4, after TCP's additive increase, multiplicative decrease: a window of 2
tokens grows by 2 up to 32, and falls back to 2 when a draft token was rejected.
"""

import numpy as np


class AimdWindows:
    """The windows of a rollout's requests.

    Args:
      requests: how many there are.
      first: draft tokens at first and after a rejection.
      step: more of them after every draft accepted whole.
      most: the widest window.
    """

    def __init__(self, requests: int, first: int, step: int, most: int) -> None:
        self._first, self._step, self._most = first, step, most
        self._windows = np.full(requests, first, np.int32)

    def __getitem__(self, requests: np.ndarray) -> np.ndarray:
        """Draft tokens for these requests, int32 [n]."""
        return self._windows[requests]

    def observe(self, requests: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What became of drafts, each int32 [n]. Where nothing was drafted, the window stays."""
        windows = self._windows[requests]
        wider = np.minimum(windows + self._step, self._most)
        after = np.where(accepted == drafted, wider, self._first)
        self._windows[requests] = np.where(drafted > 0, after, windows)
