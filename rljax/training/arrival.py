"""Batches in the order in which groups arrive, with bounded lag (`rollout.max_staleness`).

Prompts are handed out ahead of the updates, and a batch is formed of the groups that end first. Responses go
on under newer weights as soon as there are some. Two rules bound the lag to k steps (the first is AReaL's,
arXiv 2505.24298, section 5.1):

1. At step s no more than (s + k + 1) P groups have been created, P being those of a batch.
2. A batch has so many old groups that all the others can still be in a batch in time, the one k steps after
   the group was created. Where too few of them have ended, the update waits.

By the first, the order of creation would do. Who arrives first is decided by time, so such a run cannot be
repeated by its config, but by its schedule (`schedule.py`).

With `cluster.into_next_step` batches are formed in the order of creation, but for groups that wait for
outliers alone: responses that have become much longer than anybody expected (RhymeRL, section 6.3). These are
parked: they go on in the next step, under its weights, and the next groups take their place. Prompts are
handed out one step ahead, so that no group is older than two.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rljax.requests import Completion, DecodeStatistics, accumulate
from rljax.rollout.collector import TRAINING, BegunGroups, Group, Timing, WantedGroups
from rljax.rollout.running import RunningRequests
from rljax.rollout.scheduler import OnProgress
from rljax.training.schedule import ScheduledGroup
from rljax.training.staleness import hold_weights

if TYPE_CHECKING:
    from rljax.training.training_run import TrainingRun


@dataclasses.dataclass(frozen=True)
class Created:
    """A group that is in no batch yet.

    Attributes:
      problem: index of its problem.
      version: version of the weights when it was created.
    """

    problem: int
    version: int


class Arrivals:
    """Which groups may be created, and which form a batch. Pure: it knows no time.

    Args:
      size: groups of a batch.
      lag: k of the rules above.
      total: groups of the whole run.
      ahead: steps by which groups are created ahead; None for k. With k - 1 a group may be parked for a step.

    Attributes:
      created: number of groups created so far, which is the number of the next one.
      open: groups that are in no batch yet, by number.
    """

    def __init__(self, size: int, lag: int, total: int, ahead: int | None = None) -> None:
        self.size, self.lag, self.total = size, lag, total
        self._ahead = lag if ahead is None else ahead
        self.created = 0
        self.open: dict[int, Created] = {}

    def room(self, step: int) -> int:
        """Returns how many groups may be created at a step."""
        return min((step + self._ahead + 1) * self.size, self.total) - self.created

    def create(self, problem: int, step: int) -> int:
        """Creates a group at a step, and returns its number."""
        number, self.created = self.created, self.created + 1
        self.open[number] = Created(problem, step)
        return number

    def batch(self, step: int, arrived: Sequence[int]) -> list[int] | None:
        """Returns the numbers of a step's groups, or None while some must be waited for.

        Args:
          step: the step.
          arrived: numbers of the open groups that have ended, in their order.
        """
        chosen: set[int] = set()
        for last in range(step, step + self.lag + 1):
            due = {number for number, each in self.open.items() if each.version + self.lag <= last}
            needed = len(due) - (last - step) * self.size - len(chosen & due)
            ended = [number for number in arrived if number in due and number not in chosen]
            if len(ended) < needed:
                return None
            chosen.update(ended[: max(needed, 0)])
        others = [number for number in arrived if number not in chosen]
        chosen.update(others[: self.size - len(chosen)])
        return [number for number in arrived if number in chosen] if len(chosen) == self.size else None

    def in_order(self, step: int, arrived: Sequence[int], outliers: Collection[int]) -> list[int] | None:
        """Returns the numbers of a step's groups in the order of creation, without those that are parked;
        None while some must be waited for. With `ahead` 1 and k 2 those that are due fit a batch.

        Args:
          step: the step.
          arrived: numbers of the open groups that have ended.
          outliers: numbers of those that wait for outliers alone.
        """
        spare = len(self.open) - self.size
        batch: list[int] = []
        for number, each in self.open.items():
            if number in outliers and each.version + self.lag > step and spare:
                spare -= 1
            else:
                batch.append(number)
        batch = batch[: self.size]
        return batch if set(batch) <= set(arrived) else None

    def take(self, batch: Sequence[int]) -> None:
        """A batch has been formed."""
        for number in batch:
            del self.open[number]

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {
            "created": self.created,
            "open": [[number, each.problem, each.version] for number, each in self.open.items()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self.created = state["created"]
        self.open = {number: Created(problem, version) for number, problem, version in state["open"]}


class GroupsUnderWay:
    """The open groups of a run as the workers decode them.

    Args:
      run: the run.
    """

    def __init__(self, run: "TrainingRun") -> None:
        rollout = run.config.rollout
        self._run, size = run, rollout.prompts_per_step
        self._parks = run.config.cluster.into_next_step
        lag, total = rollout.max_staleness, run.config.training.steps * size
        self.arrivals = Arrivals(size, lag, total, lag - 1 if self._parks else None)
        self._begun: dict[int, BegunGroups] = {}
        self._parked = 0  # groups that the last batch has passed over

    def renew(self) -> None:
        """What is under way goes on under the newest weights."""
        run = self._run
        hold_weights(run)
        run.cluster.renew(run.versions[run.step], run.step)

    def begin(self) -> None:
        """Creates the groups that may be created now. After a resume, those that were open begin again."""
        run, arrivals = self._run, self.arrivals
        for _ in range(arrivals.room(run.step)):
            position = run.data_position
            (problem,), run.data_position = run.prompts.next_problems("train", position, 1)
            run.passed_over += run.data_position - position - 1
            arrivals.create(int(problem), run.step)
        for number, each in arrivals.open.items():
            if number not in self._begun:
                step, samples = number // arrivals.size, run.config.rollout.samples_per_prompt
                wanted = WantedGroups("train", [each.problem], samples, TRAINING, step, version=run.step)
                self._begun[number] = run.collector.begin(run.versions[run.step], wanted, renewed=True)

    def arrived(self) -> list[int]:
        """Returns the numbers of the groups that have ended, in their order."""
        places = {number: self._run.cluster.place(begun.decoding) for number, begun in self._begun.items()}
        return sorted(
            (number for number, place in places.items() if place is not None), key=lambda each: places[each]
        )

    def batch(self) -> list[int] | None:
        """Returns the numbers of the present step's groups, or None while some must be waited for."""
        step, arrived = self._run.step, self.arrived()
        if not self._parks:
            return self.arrivals.batch(step, arrived)
        numbers = list(self.arrivals.open)[: self.arrivals.size]
        waiting = self._run.cluster.outliers([self._begun[number].decoding for number in numbers])
        return self.arrivals.in_order(step, arrived, {numbers[place] for place in waiting})

    def metrics(self) -> dict[str, float]:
        """Returns how many groups the last batch has left to the next step."""
        return {"cluster/parked": self._parked} if self._parks else {}

    def take(self, batch: Sequence[int]) -> tuple[list[BegunGroups], list[Completion], DecodeStatistics]:
        """Returns what was begun for these groups, their responses, and counts of the work."""
        begun, completions, statistics = [], [], DecodeStatistics()
        for number in batch:
            begun.append(self._begun.pop(number))
            ended, counts = self._run.cluster.finish(begun[-1].decoding)
            completions += ended
            accumulate(statistics, counts)
        self.arrivals.take(batch)
        self._parked = sum(number < max(batch) for number in self.arrivals.open)
        return begun, completions, statistics


def arrived_groups(
    run: "TrainingRun", on_progress: OnProgress, on_arrival: Callable[[int], None]
) -> tuple[list[Group], DecodeStatistics, Timing]:
    """Waits for a step's batch, or decodes that of the schedule that is replayed; and notes it.

    Args:
      run: the run.
      on_progress: see `OnProgress`.
      on_arrival: called with the number of groups that have ended.
    """
    hold_weights(run)
    timing, samples = Timing(), run.config.rollout.samples_per_prompt
    start = time.perf_counter()
    if run.replay is not None:
        scheduled = run.replay.batch(run.step)
        problems = [run.collector.task.problem("train", each.problem) for each in scheduled]
        requests = [
            request
            for each in scheduled
            for request in run.collector.requests(
                WantedGroups("train", [each.problem], samples, TRAINING, each.step)
            )
        ]
        versions = [spans for each in scheduled for spans in each.versions]
        completions, statistics = run.replay.decode(requests, versions, on_progress)
        created = [(each.step, each.problem, each.created) for each in scheduled]
    else:
        under_way = run.under_way
        under_way.renew()
        under_way.begin()
        running = RunningRequests()
        while (batch := under_way.batch()) is None:
            run.cluster.listen()
            running.add(run.cluster.decoding)
            on_arrival(len(under_way.arrived()))
        opened = [under_way.arrivals.open[number] for number in batch]
        begun, completions, statistics = under_way.take(batch)
        statistics.running[:] = [running.points()]  # of all that is under way, while the step waited
        problems = [problem for each in begun for problem in each.problems]
        requests = [request for each in begun for request in each.requests]
        created = [
            (each.wanted.step, group.problem, group.version)
            for each, group in zip(begun, opened, strict=True)
        ]
    timing.decode = time.perf_counter() - start
    groups, timing.reward = run.collector.reward(problems, requests, completions)
    scheduled = [
        ScheduledGroup(step, problem, version, tuple(each.versions for each in group.completions))
        for (step, problem, version), group in zip(created, groups, strict=True)
    ]
    run.directory.append_schedule(run.step + 1, [each.record() for each in scheduled])
    return groups, statistics, timing
