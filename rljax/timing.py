"""Times two ways to do something against each other, in the same rounds.

Machines are noisy, and noise comes in spells. So both sides of a comparison run in one process and in
alternation, every round gives one ratio, and the median of these ratios is what counts: a slow spell hits
both sides of its round and leaves the ratio alone.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two sides timed in the same rounds.

    Attributes:
      seconds: median of ours.
      ratio: median over the rounds of baseline / ours; above 1 ours is faster. With few rounds on a noisy
        machine it is not quite baseline_seconds / seconds, whose medians may come from different rounds.
      ratio_low, ratio_high: the least and the largest ratio of a round.
    """

    seconds: float
    baseline_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def interleave(
    actions: Mapping[str, Callable[[], object]], repeats: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of every action in every round.

    The actions run one after the other within a round, in reversed order every second round, so that none
    always follows the same other one. They must return only when their work is done.

    Args:
      actions: functions to time, by name.
      warmups: untimed rounds before them, for compilation and allocation.
    """
    if repeats < 1:
        raise ValueError(f"repeats: {repeats}, expected at least 1")
    for _ in range(warmups):
        for action in actions.values():
            action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats):
        for name in reversed(actions) if repeat % 2 else actions:
            start = time.perf_counter()
            result = actions[name]()
            seconds[name].append(time.perf_counter() - start)
            del result  # the time to free it does not count
    return seconds


def compare(seconds: Sequence[float], baseline_seconds: Sequence[float]) -> Comparison:
    """Compares two sides that `interleave` timed, round by round."""
    ratios = [baseline / ours for ours, baseline in zip(seconds, baseline_seconds, strict=True)]
    return Comparison(
        seconds=statistics.median(seconds),
        baseline_seconds=statistics.median(baseline_seconds),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        rounds=len(ratios),
    )


def paired(ours: Callable[[], object], baseline: Callable[[], object], repeats: int) -> Comparison:
    """Times two sides in alternation; see `interleave` and `Comparison`."""
    seconds = interleave({"ours": ours, "baseline": baseline}, repeats)
    return compare(seconds["ours"], seconds["baseline"])
