"""Retention of checkpoints: the newest ones, one every so many steps, and the best ones."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Retention:
    """Checkpoints to keep after a save. A checkpoint is kept if any rule keeps it.

    Attributes:
      newest: number of newest checkpoints to keep, at least 1, because a run resumes from them.
      every: interval; checkpoints of its multiples are kept. 0 keeps none.
      best: number of checkpoints with the highest scores to keep, newer ones first among equals. 0 keeps
        none.
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
        """Returns the steps of the checkpoints to keep.

        Args:
          scores: score of each complete checkpoint by step; larger is better, None or NaN is unscored.
        """
        kept = set(sorted(scores)[-self.newest :])
        if self.every:
            kept |= {step for step in scores if step % self.every == 0}
        scored = {
            step: score for step, score in scores.items() if score is not None and not math.isnan(score)
        }
        best = sorted(scored, key=lambda step: (scored[step], step), reverse=True)
        return kept | set(best[: self.best])
