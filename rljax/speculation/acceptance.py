"""Measured acceptance of drafts: by the drafter's probability, and along a chain.

Both estimates begin with a prior and forget half of their counts whenever the policy has moved.
"""

import numpy as np

_FORGET = 0.5  # share of the counts that is kept when the policy has moved
_PROBABILITY_BINS = 16
_PRIOR_WEIGHT = 4.0  # nodes that a bin starts with, accepted as often as the drafter says
_PRIOR_ACCEPTANCE, _PRIOR_DRAFTS = 0.8, 16.0  # high enough that a drafter never tried is worth a try


class NodeCalibration:
    """Maps the probability that a drafter gives a node to how often such nodes were accepted."""

    def __init__(self) -> None:
        middle = (np.arange(_PROBABILITY_BINS) + 0.5) / _PROBABILITY_BINS
        self._prior = _PRIOR_WEIGHT * middle
        self._accepted = np.zeros(_PROBABILITY_BINS)
        self._total = np.zeros(_PROBABILITY_BINS)

    def forget(self) -> None:
        """Halves the weight of earlier counts."""
        self._accepted *= _FORGET
        self._total *= _FORGET

    def bins(self, log_probability: np.ndarray) -> np.ndarray:
        """The bin of each node, int64 of the same shape; NaN counts as unlikely."""
        probability = np.nan_to_num(np.exp(np.minimum(log_probability, 0.0)), nan=0.0)
        return np.minimum((probability * _PROBABILITY_BINS).astype(np.int64), _PROBABILITY_BINS - 1)

    @property
    def rates(self) -> np.ndarray:
        """Acceptance by bin, float64 [bins]."""
        return (self._accepted + self._prior) / (self._total + _PRIOR_WEIGHT)

    def add(self, bins: np.ndarray, accepted: np.ndarray) -> None:
        """Adds verified nodes: their bins, int [n], and which were accepted, bool [n]."""
        self._accepted += np.bincount(bins, accepted, _PROBABILITY_BINS)
        self._total += np.bincount(bins, minlength=_PROBABILITY_BINS)

    def state(self) -> np.ndarray:
        """Checkpoint content: float64 [2, bins], nodes accepted and nodes verified."""
        return np.stack([self._accepted, self._total])

    def load_state(self, state: np.ndarray) -> None:
        """Restores `state`; a state with another number of bins is ignored."""
        if state.shape == (2, _PROBABILITY_BINS):
            self._accepted, self._total = state.astype(np.float64)


class ChainAcceptance:
    """The probability that a draft is accepted, given that its predecessors are."""

    def __init__(self) -> None:
        self._scored = self._accepted = 0.0

    def forget(self) -> None:
        """Halves the weight of earlier counts."""
        self._scored *= _FORGET
        self._accepted *= _FORGET

    def add(self, scored: int, accepted: int) -> None:
        """Adds drafts whose predecessors were accepted, and how many of them were accepted."""
        self._scored += scored
        self._accepted += accepted

    @property
    def rate(self) -> float:
        return (self._accepted + _PRIOR_ACCEPTANCE * _PRIOR_DRAFTS) / (self._scored + _PRIOR_DRAFTS)

    def state(self) -> np.ndarray:
        """Checkpoint content: float64 [2], drafts scored and accepted."""
        return np.asarray([self._scored, self._accepted], np.float64)

    def load_state(self, state: np.ndarray) -> None:
        """Restores `state`."""
        self._scored, self._accepted = map(float, state)
