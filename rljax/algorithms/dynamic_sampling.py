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
    """Returns whether the rewards of each group differ: Eq. 11's 0 < #right < G, for any reward.

    Use the task's rewards, before overlong shaping: a group that is all wrong stays uninformative even if its
    lengths differ.

    Args:
      rewards: [P, G].

    Returns:
      bool [P].
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards: shape {rewards.shape}, expected [P, G]")
    return np.any(rewards != rewards[:, :1], axis=1)


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
        self._equal_rewards: list[float] = []  # the common reward of each uninformative group
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

    def offer(self, groups: Sequence[Group], rewards: ArrayLike) -> int:
        """Adds one round of rollouts.

        Args:
          groups: P groups, of any type.
          rewards: [P, G], the task's rewards.

        Returns:
          The number of informative groups, including those discarded beyond the batch.

        Raises:
          DynamicSamplingError: this was round `max_rounds`, and the batch is still not full.
        """
        rewards = np.asarray(rewards)
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
        self._equal_rewards += rewards[~informative, 0].tolist()
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
        equal = np.asarray(self._equal_rewards)
        num_right, num_wrong = int(np.sum(equal > 0)), int(np.sum(equal <= 0))
        cause = "too hard" if num_wrong >= num_right else "too easy"
        return (
            f"algorithm.dynamic_sampling: {self.rounds} round{'s' if self.rounds > 1 else ''} gave"
            f" {len(self._kept)} of {self.num_groups} groups with differing rewards"
            f" ({self.num_offered} groups sampled: {num_wrong} all wrong, {num_right} all right);"
            f" the task is {cause} for this policy: change the task or warm start, raise"
            " rollout.samples_per_prompt or algorithm.dynamic_sampling_max_rounds,"
            " or set algorithm.dynamic_sampling=false"
        )
