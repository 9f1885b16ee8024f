"""Two tiers: how many workers decode each ranking group of HistoPipe (RhymeRL, section 6.4).

Groups of long responses get several workers, so that the groups' times rise linearly and a long one in a step
complements a short one in the next. The listing of Fig. 12 is mended where it is open:

- `t0` is printed with a misplaced parenthesis: it is max(time of the shortest group on MAX workers, t_train).
  So the shortest group would get MAX workers wherever training is fast. How fast it should be is a choice: of
  all its sizes, the one counts whose first and last group take the least time together, which is the time of
  two steps.
- Its precision of a second is a share of the longest group's time here: where groups take a second, one of
  slope is everything.
- If no plan of the bisection is feasible the listing returns nothing. Here the steepest slope that can help
  is tried first; where even that needs more workers than there are, all groups have the fewest.
- Workers that a plan leaves over go to the group that would take longest beyond its target.
- The line is over groups, but places are paired: the last group may be at half of them, and where the next
  one has a single worker, that worker has the longest group in one step and the second longest in the other.
  So what counts in the end (`tier_sizes`) is the longest time of two steps at a place (`two_steps`): from the
  plan of the listing, and from equal sizes, workers change groups one by one as long as it falls.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

from rljax.papers.rhymerl.histopipe import equal_groups

GroupTime = Callable[[float, int], float]
"""tau(l, k): seconds of a ranking group whose responses have l tokens on average, on k workers."""


def workers_of_groups(
    lengths: Sequence[float],
    workers: int,
    time: GroupTime,
    train_seconds: float = 0.0,
    fewest: int = 1,
    most: int | None = None,
    precision: float = 1e-3,
) -> list[int]:
    """Returns the number of workers of each ranking group (Fig. 12, mended), which add up to `workers`.

    Args:
      lengths: mean length of each group's responses in the previous epoch, ascending.
      workers: number of workers; at least one a group.
      time: tau.
      train_seconds: time of the last training stage: the shortest group need not be faster.
      fewest, most: MIN and MAX, workers of a group.
      precision: slope a group at which the bisection ends, as a share of the time of the longest group on the
        fewest workers.

    Raises:
      ValueError: there are fewer workers than groups need.
    """
    count = len(lengths)
    most = workers - fewest * (count - 1) if most is None else most
    if count * fewest > workers or most < fewest:
        raise ValueError(
            f"{count} ranking groups of at least {fewest} workers need more than the {workers} that there are"
        )

    def needed(start: float, slope: float) -> list[int]:
        """The fewest workers with which the groups' times are on a line; none where they do not suffice."""
        sizes: list[int] = []
        for i in range(count):
            target = start + i * slope
            size = next((k for k in range(fewest, most + 1) if time(lengths[i], k) <= target), None)
            if size is None:
                return []
            sizes.append(size)
        return sizes if sum(sizes) <= workers else []

    starts, plans = {max(time(lengths[0], size), train_seconds) for size in range(fewest, most + 1)}, []
    for start in sorted(starts):
        # The least slope, by bisection. Beyond this one every group but the first is in time with the fewest.
        low, high = 0.0, max([0.0, *((time(lengths[i], fewest) - start) / i for i in range(1, count))])
        plan = needed(start, high)
        while plan and high - low > precision * time(lengths[-1], fewest):
            middle = (low + high) / 2
            better = needed(start, middle)
            low, high, plan = (low, middle, better) if better else (middle, high, plan)
        if plan:
            plans.append((2 * start + (count - 1) * high, start, high, plan))
    _, start, slope, plan = min(plans, default=(0.0, max(starts), 0.0, [fewest] * count))
    while sum(plan) < workers:
        room = [i for i in range(count) if plan[i] < most]
        if not room:
            break
        plan[max(room, key=lambda i: time(lengths[i], plan[i]) - start - i * slope)] += 1
    return plan


def two_steps(plan: Sequence[int], lengths: Sequence[float], time: GroupTime) -> list[tuple[float, int]]:
    """Returns (seconds of an odd and an even step, workers that take as long), the longest first.

    A worker has the group of its place in ascending order, and then in descending order
    (`histopipe.groups_of_places`).

    Args:
      plan: workers of each group.
      lengths, time: see `workers_of_groups`.
    """
    seconds = [time(length, size) for length, size in zip(lengths, plan, strict=True)]
    odd, even, sums = list(plan), list(plan), []
    up, down = 0, len(plan) - 1
    while up < len(plan):
        alike = min(odd[up], even[down])
        sums.append((seconds[up] + seconds[down], alike))
        odd[up] -= alike
        even[down] -= alike
        up, down = up + (not odd[up]), down - (not even[down])
    return sorted(sums, reverse=True)


def _settled(plan: list[int], lengths: Sequence[float], time: GroupTime, fewest: int, most: int) -> list[int]:
    """Lets workers change groups one by one, the change that shortens two steps most first."""
    best, groups = two_steps(plan, lengths, time), range(len(plan))
    while True:
        changed = [
            [size - (i == giver) + (i == taker) for i, size in enumerate(plan)]
            for giver, taker in itertools.permutations(groups, 2)
            if plan[giver] > fewest and plan[taker] < most
        ]
        if not changed:
            return plan
        shortest, nearest = min((two_steps(each, lengths, time), each) for each in changed)
        if shortest >= best:
            return plan
        best, plan = shortest, nearest


def group_seconds(
    lengths: Sequence[int], workers: int, slots: int, pass_seconds: Callable[[int, float], float]
) -> float:
    """Returns tau of a ranking group: seconds of decoding responses of these lengths on some workers.

    The lengths are dealt out evenly. A worker's batch shrinks as its responses end, and between two ends a
    token takes what a pass over the rest takes; those without a slot share the time of the others.

    Args:
      lengths: tokens of every response, such as the previous epoch's.
      workers: workers of the group.
      slots: responses that a worker decodes at a time.
      pass_seconds: (running responses, their tokens so far in all) -> seconds of a token of each.
    """
    ascending = sorted(lengths, reverse=True)[::workers][::-1]
    total, before = 0.0, 0
    for place, length in enumerate(ascending):
        running = len(ascending) - place
        at_a_time = min(running, slots)
        seconds = pass_seconds(at_a_time, at_a_time * (before + length) / 2)
        total += (length - before) * seconds * running / at_a_time
        before = length
    return total


def tier_sizes(
    groups: Sequence[Sequence[int]],
    workers: int,
    slots: int,
    pass_seconds: Callable[[int, float], float],
    train_seconds: float,
    fewest: int = 1,
    most: int | None = None,
    outliers: float = 0.0,
) -> list[int]:
    """Returns the number of workers of each ranking group, from the lengths of its responses in the previous
    epoch.

    Args:
      groups: lengths of each group's responses, groups ascending.
      workers, train_seconds, fewest: see `workers_of_groups`.
      slots, pass_seconds: see `group_seconds`.
      most: most workers of a group; None is four times an even share.
      outliers: share of each group's longest responses, but the last group's, that will be decoded elsewhere.
    """
    kept = [sorted(lengths)[: math.ceil((1 - outliers) * len(lengths))] for lengths in groups[:-1]]
    kept.append(list(groups[-1]))
    means = [sum(lengths) / len(lengths) for lengths in kept]
    of_mean = dict(zip(means, kept, strict=True))
    most = max(1, 4 * workers // len(groups)) if most is None else most

    @functools.cache
    def time(mean: float, count: int) -> float:
        return group_seconds(of_mean[mean], count, slots, pass_seconds)

    line = workers_of_groups(means, workers, time, train_seconds, fewest, most)
    even = [min(len(places), most) for places in equal_groups(range(workers), len(groups))]
    found = [_settled(plan, means, time, fewest, most) for plan in (line, even)]
    return min(found, key=lambda plan: two_steps(plan, means, time))
