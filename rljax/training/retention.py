"""Which checkpoints of a run stay: the newest, one every so many steps, and those with the best policies."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Retention:
    """What stays after a save; a checkpoint that one of the rules wants stays.

    Attributes:
      newest: how many of the newest, at least 1: a run resumes from them.
      every: those of steps that it divides; 0 is none.
      best: how many of those with the highest scores; of equals, the newer. 0 is none.
    """

    newest: int
    every: int = 0
    best: int = 0

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ValueError(f"keep: {self.newest}; at least the newest checkpoint must stay")
        if self.every < 0 or self.best < 0:
            raise ValueError(f"keep_every {self.every}, keep_best {self.best}: must not be negative")

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps that stay.

        Args:
          scores: of all complete checkpoints, by step: larger is better, None (or NaN) is not scored.
        """
        kept = set(sorted(scores)[-self.newest :])
        if self.every:
            kept |= {step for step in scores if step % self.every == 0}
        scored = {
            step: score for step, score in scores.items() if score is not None and not math.isnan(score)
        }
        best = sorted(scored, key=lambda step: (scored[step], step), reverse=True)
        return kept | set(best[: self.best])
