"""The draft length over training steps: longer while nearly all drafts are accepted, shorter while too few.

EfficientRollout, section 3.3 and Algorithm 1 (appendix E.1), lines 14 to 19.
After each step, with tau the tokens of a pass and P the patience:

    min of the last P tau >= 1 + gamma * alpha_up:    the next longer length
    max of the last P tau <= 1 + gamma * alpha_down:  the next shorter one

Here both are stated in acceptance, (tau - 1) / gamma, the share of draft tokens that were accepted: at least
alpha_up, at most alpha_down. One difference: a step counts for the length that it drafted, and patience
begins anew with a new length. The algorithm as printed compares tau of the earlier length with the thresholds
of the new one, so that a single step could take back the rise from 5 to 7 that the step before had earned.

The paper's tau takes every chain for one of gamma drafts. Many are shorter: a pass had no room for more, or
the response ended. `StepAcceptance` judges each of them as far as it went.
"""

import numpy as np

from rljax.papers.efficient_rollout import ToggleConfig

_DEPTHS = 64  # draft nodes of a slot, and so the depth of a draft, are fewer


class StepAcceptance:
    """The acceptance of the chains of a training step, some of which were cut short.

    A chain that ends early says nothing of the drafts that it did not have: neither that they would have been
    accepted, as its high share suggests, nor that they would have been rejected. So drafts are counted by
    depth, and the share that is expected of whole chains is the product-limit estimate (Kaplan and Meier,
    1958). Where no chain was cut short it is the share of draft tokens that were accepted.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, _DEPTHS), np.int64)  # drafts scored and accepted, by depth from 1 on

    def add(self, scored: np.ndarray, accepted: np.ndarray) -> None:
        """Adds chains.

        Args:
          scored: int [n], drafts of each chain that the policy accepted or rejected. Those behind a rejected
            one or behind the end of the response are not scored.
          accepted: int [n], how many of them were accepted.
        """
        depths = np.arange(1, _DEPTHS + 1)[:, None]
        self._counts += [(depths <= scored).sum(axis=1), (depths <= accepted).sum(axis=1)]

    def share(self, length: int) -> float | None:
        """Expected share of accepted drafts in chains of this length; None if no draft was scored.

        At depths that no chain reached, drafts are taken to be accepted as often as at the others.
        """
        scored, accepted = self._counts
        if not scored.any():
            return None
        rates = np.where(scored > 0, accepted / np.maximum(scored, 1), accepted.sum() / scored.sum())
        return float(np.cumprod(rates[:length]).mean())

    def state(self) -> np.ndarray:
        """Checkpoint content: int64 [2, depths], drafts scored and accepted."""
        return self._counts.copy()

    def load_state(self, state: np.ndarray) -> None:
        """Restores `state`; a state with another number of depths is ignored."""
        if state.shape == self._counts.shape:
            self._counts = state.astype(np.int64)


class DraftLengthSchedule:
    """Chooses the draft length of the next training step.

    Args:
      keys: `speculation.toggle`.
      most: `speculation.max_drafts`; longer lengths are left out, and where none is left it is the only one.
    """

    def __init__(self, keys: ToggleConfig, most: int = _DEPTHS - 1) -> None:
        self._lengths = tuple(length for length in keys.lengths if length <= most) or (most,)
        self._alpha_up, self._alpha_down, self._patience = keys.alpha_up, keys.alpha_down, keys.patience
        self._index = 0 if keys.first is None else self._lengths.index(keys.first)
        self._streak = 0  # steps in a row that asked for longer drafts, or, negative, for shorter ones

    @property
    def length(self) -> int:
        """Draft tokens of a pass, gamma."""
        return self._lengths[self._index]

    def update(self, acceptance: float | None) -> int:
        """A training step is over.

        Args:
          acceptance: share of its draft tokens that were accepted, `StepAcceptance.share`. None where nothing
            was drafted: the step is left out.

        Returns:
          The draft length of the next step.
        """
        if acceptance is None:
            return self.length
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance: {acceptance}, expected a share")
        if acceptance >= self._alpha_up:
            self._streak = max(self._streak, 0) + 1
        elif acceptance <= self._alpha_down:
            self._streak = min(self._streak, 0) - 1
        else:
            self._streak = 0
        if abs(self._streak) >= self._patience:
            index = self._index + (1 if self._streak > 0 else -1)
            if 0 <= index < len(self._lengths):
                self._index, self._streak = index, 0
        return self.length

    def state(self) -> dict[str, np.ndarray]:
        """Checkpoint content."""
        return {"patience_ladder": np.asarray([self.length, self._streak], np.int64)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores `state`. Where its length is not among the lengths, the longest one below it is taken."""
        if "patience_ladder" not in state:
            return
        length, streak = map(int, state["patience_ladder"])
        self._index = max(sum(known <= length for known in self._lengths) - 1, 0)
        self._streak = streak if length == self.length else 0
