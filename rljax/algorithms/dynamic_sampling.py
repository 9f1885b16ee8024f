"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2, Eq. 11): trains only on groups with a gradient.

A group whose responses all got the same reward has advantages of 0. In the batch it would shrink the
gradient, the more so as prompts become easy. So such groups are dropped, and more prompts are rolled out
until the batch is full.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from rljax.errors import UserError

Group = TypeVar("Group")


class DynamicSamplingError(UserError):
    """Too few prompts whose responses differ in reward; the message has counts of the others."""


def informative_groups(rewards: ArrayLike) -> np.ndarray:
    """Returns whether the rewards of each group differ: Eq. 11's 0 < #right < G, for any reward. They are
    compared as float32, in which advantages are computed.

    Use the task's rewards, before overlong shaping: a group that is all wrong stays uninformative even if its
    lengths differ.

    Args:
      rewards: [P, G], NaN for responses that are left out.

    Returns:
      bool [P].
    """
    rewards = np.asarray(rewards, np.float32)
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards: shape {rewards.shape}, expected [P, G]")
    return np.fmin.reduce(rewards, axis=1) < np.fmax.reduce(rewards, axis=1)


class DynamicSampler(Generic[Group]):
    """Collects informative groups over rounds of rollouts until it has a batch of them.

        sampler = DynamicSampler(num_groups=32, max_rounds=10)
        while not sampler.full:
            groups, rewards = ...  # roll out fresh prompts
            sampler.offer(groups, rewards)
        batch = sampler.take()

    Groups are kept in the order in which they are offered. Offer them in the order of their prompts: in order
    of completion, short responses would be preferred. Informative groups beyond the batch are discarded, as
    DAPO does: in the next step their policy would be an older one, and their noise that of another step.

    Attributes:
      num_groups: groups in a batch.
      max_rounds: rounds after which an unfilled batch is an error.
      rounds: rounds offered since the last `take`.
      num_offered: groups offered since the last `take`, informative or not.
    """

    def __init__(self, num_groups: int, max_rounds: int):
        if num_groups < 1 or max_rounds < 1:
            raise ValueError(f"num_groups {num_groups} and max_rounds {max_rounds} must be at least 1")
        self.num_groups = num_groups
        self.max_rounds = max_rounds
        self._restart()

    def _restart(self) -> None:
        self._kept: list[Group] = []
        self._equal_rewards: list[float] = []  # the common reward of each uninformative group; NaN if none
        self._equal_passed: list[bool | None] = []  # whether all its responses are right; None if unknown
        self._least, self._greatest = np.inf, -np.inf
        self.rounds = 0
        self.num_offered = 0

    @property
    def full(self) -> bool:
        """Whether `take` can return a whole batch."""
        return len(self._kept) == self.num_groups

    @property
    def num_missing(self) -> int:
        """Informative groups still needed."""
        return self.num_groups - len(self._kept)

    def offer(self, groups: Sequence[Group], rewards: ArrayLike, passed: ArrayLike | None = None) -> int:
        """Adds one round of rollouts.

        Args:
          groups: P groups, of any type.
          rewards: [P, G], the task's rewards, or the part that decides; NaN for responses that are left out.
          passed: bool [P, G], which responses are right, for the error; None where that is unknown.

        Returns:
          The number of informative groups, including those discarded beyond the batch.

        Raises:
          DynamicSamplingError: this was round `max_rounds`, and the batch is still not full.
        """
        rewards = np.asarray(rewards, np.float64)
        informative = informative_groups(rewards)
        if len(groups) != len(rewards):
            raise ValueError(
                f"{len(groups)} groups with rewards {rewards.shape}, expected [{len(groups)}, G]"
            )
        if self.full:
            raise RuntimeError("the batch is full: take() it before offering more")
        self.rounds += 1
        self.num_offered += len(groups)
        chosen = np.flatnonzero(informative)[: self.num_missing]
        self._kept += [groups[i] for i in chosen]
        self._equal_rewards += np.fmax.reduce(rewards[~informative], axis=1).tolist()
        for i in np.flatnonzero(~informative):
            right = set() if passed is None else set(np.asarray(passed)[i, ~np.isnan(rewards[i])].tolist())
            self._equal_passed.append(right.pop() if len(right) == 1 else None)
        self._least = np.fmin(self._least, np.fmin.reduce(rewards, axis=None))
        self._greatest = np.fmax(self._greatest, np.fmax.reduce(rewards, axis=None))
        if not self.full and self.rounds == self.max_rounds:
            raise DynamicSamplingError(self._explain())
        return int(informative.sum())

    def take(self) -> list[Group]:
        """Returns the batch of `num_groups` groups, and starts over."""
        if not self.full:
            raise RuntimeError(f"the batch has {len(self._kept)} of {self.num_groups} groups")
        batch = self._kept
        self._restart()
        return batch

    def _explain(self) -> str:
        seen, cause = self._seen()
        return (
            f"algorithm.dynamic_sampling: {self.rounds} round{'s' if self.rounds > 1 else ''} gave"
            f" {len(self._kept)} of {self.num_groups} groups with differing rewards;"
            f" of {self.num_offered} groups sampled, {seen}; {cause}: change the task or warm start, raise"
            " rollout.samples_per_prompt or algorithm.dynamic_sampling_max_rounds,"
            " or set algorithm.dynamic_sampling=false"
        )

    def _seen(self) -> tuple[str, str]:
        """Returns what the uninformative groups were like, and what that says about the task.

        All right and all wrong are facts only where it is known which responses are right: a wrong one may
        earn a reward for its format. Else groups are compared with the least and the greatest reward seen.
        """
        equal, passed = np.asarray(self._equal_rewards), self._equal_passed
        if any(each is not None for each in passed):
            low, high = passed.count(False), passed.count(True)
            names = "all wrong", "all right"
        elif self._least < self._greatest:
            low, high = (int(np.sum(equal == end)) for end in (self._least, self._greatest))
            names = f"all at the least reward ({self._least:g})", f"all at the greatest ({self._greatest:g})"
        else:
            low = high = 0
            names = "", ""
        none = int(np.isnan(equal).sum())
        counts = [(low, names[0]), (high, names[1])] if names[0] else []
        same = len(equal) - none - low - high
        only = f" ({equal[~np.isnan(equal)][0]:g})" if not names[0] and same else ""
        counts += [(same, f"all the same{only}")] if same else []
        counts += [(none, "without a reward that counts")] if none else []
        seen = ", ".join(f"{count} {name}" for count, name in counts)
        if low == high:
            return seen, "the rewards do not tell responses of this policy apart"
        return seen, f"the task is too {'hard' if low > high else 'easy'} for this policy"
