"""Which responses go on elsewhere because they became longer than anybody expected (RhymeRL, section 6.3).

A response is an outlier that is among the last share alpha of its ranking group and longer than beta times
the longest one that the group's prompts had in the previous epoch. It moves within the step, to a worker that
decodes longer ones. Only its tokens move; keys and values are computed again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class OutlierRule:
    """The threshold.

    Attributes:
      last: alpha, a share.
      beyond: beta, a factor; see `rljax.cluster.pipe.growth_factor`.
    """

    last: float = 0.1
    beyond: float = 1.1

    def outliers(self, running: Mapping[int, int], size: int, longest: float) -> list[int]:
        """Returns the outliers among a group's responses that have not ended, the longest first.

        Args:
          running: tokens so far, by request.
          size: responses of the group, ended ones included.
          longest: largest length of the group's prompts in the previous epoch, each the median of its
            responses; infinity in the first epoch.
        """
        if len(running) > math.ceil(self.last * size):
            return []
        beyond = [key for key, length in running.items() if length > self.beyond * longest]
        return sorted(beyond, key=lambda key: -running[key])


def less_loaded(loads: Mapping[str, int], avoid: Sequence[str]) -> str | None:
    """Returns the worker with the fewest requests that is none of some, the first one of equals."""
    others = [name for name in loads if name not in avoid]
    return min(others, key=lambda name: loads[name]) if others else None


def halves(held: Mapping[str, Sequence[int]], idle: Sequence[str], least: int) -> list[tuple[int, str]]:
    """Returns (request, worker) such that workers without work take half of the requests of those that have
    most, as long as these have at least `least`.

    Args:
      held: requests under way by worker.
      idle: workers without any.
      least: below so many requests a worker's pass is not faster with half of them.
    """
    left = {name: list(keys) for name, keys in held.items()}
    moves = []
    for taker in idle:
        giver = max(left, key=lambda name: len(left[name]), default=None)
        if giver is None or len(left[giver]) < max(least, 2):
            break
        half = left[giver][len(left[giver]) // 2 :]
        left[giver] = left[giver][: len(left[giver]) // 2]
        left[taker] = half
        moves += [(key, taker) for key in half]
    return moves
