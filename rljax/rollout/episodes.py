"""Rewards and metrics of responses that are episodes of an environment."""

from collections.abc import Callable, Sequence

import numpy as np

from rljax.requests import Completion, DecodeStatistics, Episode
from rljax.tasks.base import Rewards
from rljax.tasks.rewards.failures import Kind

_NONE = Episode()  # of a response that was cut off in its first turn


def episode_rewards(completions: Sequence[Completion], declines: Callable[[Kind], bool]) -> list[Rewards]:
    """Returns the rewards of episodes in the form of `Task.reward`: "reward", the numbers of the
    environment's `info` (0 where an episode has none), and "errors" and "timeouts", 1 where the environment
    failed so. `declines` says whether an episode is left out after such a failure.
    """
    episodes = [completion.episode or _NONE for completion in completions]
    names = dict.fromkeys(name for episode in episodes for name in episode.info)
    return [
        {
            "reward": None if episode.failure and declines(episode.failure) else episode.reward,
            **{name: episode.info.get(name, 0.0) for name in names},
            **{kind: float(episode.failure == kind) for kind in ("errors", "timeouts")},
        }
        for episode in episodes
    ]


def environment_metrics(completions: Sequence[Completion], statistics: DecodeStatistics) -> dict[str, float]:
    """Returns metrics of the episodes of a step, for the metrics line.

    Args:
      completions: all responses sampled.
    """
    episodes = [completion.episode or _NONE for completion in completions]
    turns = [len(episode.rewards) for episode in episodes]
    return {
        "environment/turns": float(np.mean(turns)),
        "environment/cut_off": float(np.mean([not episode.done for episode in episodes])),
        "environment/reward_per_turn": sum(episode.reward for episode in episodes) / max(sum(turns), 1),
        "environment/tokens": statistics.tool_tokens,
        "environment/seconds": statistics.tool_seconds,
        "environment/waiting_seconds": statistics.tool_waiting_seconds,
    }
