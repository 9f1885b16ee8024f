"""Time of a rollout for a stated distribution of response lengths.

Slots decode in lockstep: a step takes the time of the batch bucket that holds the running responses and of
the cache bucket that holds the longest of them. A slot that is free takes the next waiting response.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from rljax.engine.buckets import Buckets


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Log-normal response lengths, cut off at the longest.

    Attributes:
      mean: mean number of tokens.
      longest: largest number of tokens.
      sigma: standard deviation of the logarithm; 0.8 is near to published reasoning rollouts, whose longest
        responses are several times the mean.
      prompt: number of tokens of a prompt.
    """

    mean: int
    longest: int
    sigma: float
    prompt: int

    def sample(self, count: int) -> np.ndarray:
        """Returns `count` lengths, int64 [count]: the quantiles, in an order that does not depend on them."""
        normal = statistics.NormalDist()
        quantiles = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        shape = np.exp(self.sigma * quantiles)
        scale = scale_to_mean(shape, self.mean, self.longest)
        lengths = np.clip(np.rint(scale * shape), 1, self.longest).astype(np.int64)
        return np.random.default_rng(0).permutation(lengths)

    def __str__(self) -> str:
        return (
            f"log-normal, mean {self.mean}, sigma {self.sigma:g}, at most {self.longest} tokens behind"
            f" {self.prompt} of the prompt"
        )


def scale_to_mean(lengths: np.ndarray, mean: float, longest: int) -> float:
    """Returns the factor at which lengths have a mean, cut off at the longest."""
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        below = np.minimum(scale * lengths, longest).mean() < mean
        low, high = (scale, high) if below else (low, scale)
    return high


@dataclasses.dataclass(frozen=True)
class RolloutTime:
    """Predicted decoding of one rollout.

    Attributes:
      tokens: sampled tokens.
      seconds: time without prefill.
      steps: number of decode steps or verifying passes.
    """

    tokens: int
    seconds: float
    steps: float

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def rollout_time(
    lengths: Sequence[int],
    prompt: int,
    slots: int,
    buckets: Buckets,
    pass_time: Callable[[int, int], tuple[float, float]],
) -> RolloutTime:
    """Returns the time of decoding responses of these lengths.

    Args:
      lengths: tokens of every response, in the order in which they begin.
      prompt: tokens of every prompt.
      pass_time: (batch bucket, cache bucket) -> (seconds of a pass, mean tokens of a response in it).
    """
    waiting = list(lengths)[::-1]
    running: list[list[int]] = []  # [tokens left, tokens so far]
    total, passes = 0.0, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(), 0])
        longest = prompt + max(done for _, done in running)
        bucket = buckets.cache_for(min(longest + 1, buckets.cache[-1]))
        # Up to the next end of a response, or the next cache bucket.
        tokens = min(min(left for left, _ in running), max(bucket - longest, 1))
        batch = buckets.batch_for(slots if waiting else len(running))
        seconds, accepted = pass_time(batch, bucket)
        total += seconds * tokens / accepted
        passes += tokens / accepted
        running = [[left - tokens, done + tokens] for left, done in running if left > tokens]
    return RolloutTime(int(sum(lengths)), total, passes)
