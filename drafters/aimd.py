"""A window of draft tokens for every request: wider after a draft accepted whole, narrow after a rejection.

RhymeRL (arXiv 2508.18588), section 5.4, after TCP's additive increase, multiplicative decrease: a window of 2
tokens grows by 2 up to 32, and falls back to 2 when a draft token was rejected.
"""

import numpy as np


class AimdWindows:
    """The windows of a rollout's requests.

    Args:
      requests: number of requests.
      first: the window at first and after a rejection, in draft tokens.
      step: growth after every draft that was accepted whole.
      most: the widest window.
    """

    def __init__(self, requests: int, first: int, step: int, most: int) -> None:
        self._first, self._step, self._most = first, step, most
        self._windows = np.full(requests, first, np.int32)

    def __getitem__(self, requests: np.ndarray) -> np.ndarray:
        """Returns the windows of these requests, in draft tokens, int32 [n]."""
        return self._windows[requests]

    def observe(self, requests: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Adapts the windows to verified drafts, int32 [n] each. Where `drafted` is 0, the window stays."""
        windows = self._windows[requests]
        wider = np.minimum(windows + self._step, self._most)
        after = np.where(accepted == drafted, wider, self._first)
        self._windows[requests] = np.where(drafted > 0, after, windows)
