"""Lengths of responses, and how they change from epoch to epoch.

A prompt has a length of its own, log-normal over prompts; the responses of its group scatter around it, and
from epoch to epoch it moves and grows. All is cut off at the longest response. `recorded` takes the lengths
of a run instead.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rljax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LengthModel:
    """See the module's docstring.

    Attributes:
      mean: mean number of tokens in the first epoch, cut off.
      longest: largest number of tokens.
      sigma: standard deviation of the logarithm over all responses; 0.8 is near to published reasoning
        rollouts.
      within: share of the variance that is within the groups.
      drift: standard deviation by which a prompt's logarithm moves from one epoch to the next.
      growth: factor of the mean from one epoch to the next.
      outliers: share of responses that are longer than their prompt lets expect.
      jump: standard deviation of the logarithm by which these are longer.
    """

    mean: float
    longest: int
    sigma: float = 0.8
    within: float = 0.3
    drift: float = 0.1
    growth: float = 1.0
    outliers: float = 0.0
    jump: float = 1.0

    def epochs(self, prompts: int, samples: int, seed: int) -> Iterator[np.ndarray]:
        """Yields the lengths of one epoch after the other, int64 [prompts, samples]."""
        random = np.random.default_rng(seed)
        between = self.sigma * np.sqrt(1 - self.within) * random.standard_normal(prompts)
        scale = self._scale(between, samples)
        spread = self.sigma * np.sqrt(self.within)
        while True:
            noise = spread * random.standard_normal((prompts, samples))
            if self.outliers:
                beyond = random.random((prompts, samples)) < self.outliers
                noise += beyond * np.abs(self.jump * random.standard_normal((prompts, samples)))
            lengths = np.rint(scale * np.exp(between[:, None] + noise))
            yield np.clip(lengths, 1, self.longest).astype(np.int64)
            between = between + self.drift * random.standard_normal(prompts)
            scale *= self.growth

    def _scale(self, between: np.ndarray, samples: int) -> float:
        """The factor at which the lengths have the mean, cut off as they are."""
        noise = np.random.default_rng(0).standard_normal((len(between), min(samples, 16)))
        shape = np.exp(between[:, None] + self.sigma * np.sqrt(self.within) * noise)
        low, high = 0.0, float(self.longest)
        for _ in range(50):
            scale = (low + high) / 2
            low, high = (
                (scale, high) if np.minimum(scale * shape, self.longest).mean() < self.mean else (low, scale)
            )
        return high


def recorded_lengths(path: str, seed: int = 0) -> list[np.ndarray]:
    """Returns the lengths of a run's steps, each in the bins of its `rollouts.jsonl`, spread evenly within.

    Raises:
      ConfigError: the file cannot be read, or is none.
    """
    random, steps = np.random.default_rng(seed), []
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            lengths = json.loads(line)["lengths"]
            width, counts = lengths["bin"], np.asarray(lengths["counts"])
            low = np.repeat(np.arange(len(counts)) * width, counts)
            steps.append(low + random.integers(1, width + 1, len(low)))
    except OSError as error:
        raise ConfigError(f"lengths: {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"lengths: {path} is no rollouts.jsonl of a run") from error
    if not steps:
        raise ConfigError(f"lengths: {path} has no step")
    return steps
