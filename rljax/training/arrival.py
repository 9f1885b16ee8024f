"""Batches in the order in which groups arrive, with bounded lag (`rollout.max_staleness`).

Prompts are handed out ahead of the updates, and a batch is formed of the groups that end first. Responses go
on under newer weights as soon as there are some. Two rules bound the lag to k steps (the first is AReaL's,
arXiv 2505.24298, section 5.1):

1. At step s no more than (s + k + 1) P groups have been created, P being those of a batch.
2. A batch has so many old groups that all the others can still be in a batch in time, the one k steps after
   the group was created. Where too few of them have ended, the update waits.

By the first, the order of creation would do. Who arrives first is decided by time, so such a run cannot be
repeated by its config, but by its schedule (`cluster.replay`): schedule.jsonl has a line a batch, its groups,
and where in each response each version of the weights began. Every token is a function of its request, the
tokens before it and its version. So the same batches, sampled under the same versions, are the same bits,
whoever decodes them and when.

With `cluster.into_next_step` batches are formed in the order of creation, but for groups that wait for
outliers alone: responses that have become much longer than anybody expected (RhymeRL, section 6.3). These are
parked: they go on in the next step, under its weights, and the next groups take their place. Prompts are
handed out one step ahead, so that no group is older than two.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.cluster.decoder import ClusterDecoder
from rljax.errors import ConfigError
from rljax.progress import Progress
from rljax.requests import Completion, DecodeStatistics, PartialResponse, Request, accumulate
from rljax.rollout.collector import TRAINING, BegunGroups, Group, OnProgress, Timing, WantedGroups
from rljax.rollout.running import RunningRequests
from rljax.run_directory import RunDirectory
from rljax.tasks.base import Problem
from rljax.training.batches import Batches, Rollout
from rljax.training.extras import Extra


@dataclasses.dataclass(frozen=True)
class CreatedGroup:
    """A group that is in no batch yet.

    Attributes:
      problem: index of its problem.
      version: version of the weights when it was created.
    """

    problem: int
    version: int


class GroupBuffer:
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
        self._steps_ahead = lag if ahead is None else ahead
        self.created = 0
        self.open: dict[int, CreatedGroup] = {}

    def free_places(self, step: int) -> int:
        """Returns how many groups may be created at a step."""
        return min((step + self._steps_ahead + 1) * self.size, self.total) - self.created

    def create(self, problem: int, step: int) -> int:
        """Creates a group at a step, and returns its number."""
        number, self.created = self.created, self.created + 1
        self.open[number] = CreatedGroup(problem, step)
        return number

    def batch(self, step: int, arrived: Sequence[int]) -> list[int] | None:
        """Returns the numbers of a step's groups, or None while some must be waited for.

        Args:
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
          arrived: numbers of the open groups that have ended.
          outliers: numbers of those that wait for outliers alone.
        """
        parkable = len(self.open) - self.size
        batch: list[int] = []
        for number, each in self.open.items():
            if number in outliers and each.version + self.lag > step and parkable:
                parkable -= 1
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
        self.open = {number: CreatedGroup(problem, version) for number, problem, version in state["open"]}


Spans = tuple[tuple[int, int], ...]
"""(position in the response, version of the weights) where each version began."""


@dataclasses.dataclass(frozen=True)
class ScheduledGroup:
    """A group of a batch, as the schedule has it.

    Attributes:
      step: the training step of its noise.
      problem: index of its problem.
      created: version of the weights when it was created.
      versions: where each version of the weights began, by response.
    """

    step: int
    problem: int
    created: int
    versions: tuple[Spans, ...]

    def record(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {**dataclasses.asdict(self), "versions": [list(map(list, each)) for each in self.versions]}


def read_schedule(path: str) -> dict[int, list[ScheduledGroup]]:
    """Returns the batches of a run by their step, from 0.

    Args:
      path: its directory, or the file.

    Raises:
      ConfigError: there is no schedule.
    """
    file = Path(path)
    file = file / "schedule.jsonl" if file.is_dir() else file
    batches = {}
    try:
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            batches[line["step"] - 1] = [
                ScheduledGroup(
                    each["step"],
                    each["problem"],
                    each["created"],
                    tuple(tuple((at, version) for at, version in spans) for spans in each["versions"]),
                )
                for each in line["groups"]
            ]
    except OSError as error:
        raise ConfigError(f"cluster.replay: {file} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cluster.replay: {file} is no schedule of a run with max_staleness") from error
    return batches


class _Noted(Batches):
    """Batches that are written to schedule.jsonl; `others` as of `Batches`."""

    def __init__(self, directory: RunDirectory, *others: Any) -> None:
        super().__init__(*others)
        self._directory = directory

    def _rewarded(
        self,
        problems: Sequence[Problem],
        requests: Sequence[Request],
        completions: Sequence[Completion],
        created: Sequence[tuple[int, int, int]],
        seconds: float,
    ) -> tuple[list[Group], Timing]:
        """Rewards a batch that was decoded in so many seconds, and writes its line. `created` has the step of
        each group's noise, its problem, and the version of the weights when it was created.
        """
        groups, reward = self._collector.reward(problems, requests, completions)
        lines = [
            ScheduledGroup(step, problem, version, tuple(each.versions for each in group.completions))
            for (step, problem, version), group in zip(created, groups, strict=True)
        ]
        self._directory.append_schedule(self._state.step + 1, [each.record() for each in lines])
        return groups, Timing(seconds, reward)


class ArrivingBatches(_Noted, Extra):
    """Batches of the groups that end first.

    Args:
      cluster: decodes the groups.
      progress: shows how many have ended.
      directory, others: as of `ReplayedBatches`.
    """

    def __init__(
        self, cluster: ClusterDecoder, progress: Progress, directory: RunDirectory, *others: Any
    ) -> None:
        super().__init__(directory, *others)
        rollout = self._config.rollout
        self._cluster, self._progress, self._parks = cluster, progress, cluster.parks
        lag, size = rollout.max_staleness, rollout.prompts_per_step
        total = self._config.training.steps * size
        self._buffer = GroupBuffer(size, lag, total, lag - 1 if self._parks else None)
        self._in_flight: dict[int, BegunGroups] = {}
        self._parked = 0  # groups that the last batch has passed over

    def begin(self, round_: int) -> None:
        """Creates the groups that may be created now. After a resume, those that were open begin again."""
        self._renew()
        state, buffer = self._state, self._buffer
        for _ in range(buffer.free_places(state.step)):
            (problem,) = self.next_problems(1)
            buffer.create(int(problem), state.step)
        samples = self._config.rollout.samples_per_prompt
        with self._cluster.together():
            for number, each in buffer.open.items():
                if number not in self._in_flight:
                    step = number // buffer.size
                    wanted = WantedGroups(
                        "train", [each.problem], samples, TRAINING, step, version=state.step
                    )
                    weights = state.versions[state.step]
                    self._in_flight[number] = self._collector.begin(weights, wanted, renewed=True)

    def _renew(self) -> None:
        """What is in flight goes on under the newest weights."""
        self.retain_policy_version()
        self._cluster.renew(self._state.versions[self._state.step], self._state.step)

    def finish(self, on_progress: OnProgress) -> tuple[list[Group], DecodeStatistics, Timing]:
        """Waits for the step's batch, and rewards it; `on_progress` is not called."""
        start, running = time.perf_counter(), RunningRequests()
        while (batch := self._batch()) is None:
            self._cluster.listen()
            running.add(self._cluster.decoding)
            arrived, needed = len(self._arrived()), self._buffer.size
            self._progress.update("rollout", f"{min(arrived, needed)}/{needed} groups")
        opened = [self._buffer.open[number] for number in batch]
        begun, completions, statistics = self._take(batch)
        statistics.running[:] = [running.points()]  # of all that is in flight, while the step waited
        problems = [problem for each in begun for problem in each.problems]
        requests = [request for each in begun for request in each.requests]
        steps = [each.wanted.step for each in begun]
        created = [(step, each.problem, each.version) for step, each in zip(steps, opened, strict=True)]
        seconds = time.perf_counter() - start
        groups, timing = self._rewarded(problems, requests, completions, created, seconds)
        return groups, statistics, timing

    def _arrived(self) -> list[int]:
        """The numbers of the groups that have ended, in their order."""
        places = {number: self._cluster.place(begun.decoding) for number, begun in self._in_flight.items()}
        return sorted(
            (number for number, place in places.items() if place is not None), key=lambda each: places[each]
        )

    def _batch(self) -> list[int] | None:
        """The numbers of the present step's groups, or None while some must be waited for."""
        step, arrived = self._state.step, self._arrived()
        if not self._parks:
            return self._buffer.batch(step, arrived)
        numbers = list(self._buffer.open)[: self._buffer.size]
        waiting = self._cluster.outliers([self._in_flight[number].decoding for number in numbers])
        return self._buffer.in_order(step, arrived, {numbers[place] for place in waiting})

    def _take(self, batch: Sequence[int]) -> tuple[list[BegunGroups], list[Completion], DecodeStatistics]:
        """What was begun for these groups, their responses, and counts of the work."""
        begun, completions, statistics = [], [], DecodeStatistics()
        for number in batch:
            begun.append(self._in_flight.pop(number))
            ended, counts = self._cluster.finish(begun[-1].decoding)
            completions += ended
            accumulate(statistics, counts)
        self._buffer.take(batch)
        self._parked = sum(number < max(batch) for number in self._buffer.open)
        return begun, completions, statistics

    def before_evaluation(self) -> None:
        self._renew()  # one version for all that workers decode

    def metrics(self, rollout: Rollout, seconds: float) -> Mapping[str, Any]:
        """Returns how many groups the last batch has left to the next step."""
        return {"cluster/parked": self._parked} if self._parks else {}

    def go_back(self, place: Any) -> None:
        """Nothing is asked again: what was begun is in flight as it is saved."""

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        state, arrays = super().state()
        return state | {"under_way": self._buffer.state()}, arrays  # under the weights of the checkpoint

    def load_state(self, host_state: Mapping[str, Any], held: Mapping[str, np.ndarray]) -> None:
        super().load_state(host_state, held)
        if "under_way" in host_state:
            self._buffer.load_state(host_state["under_way"])


class ReplayedBatches(_Noted):
    """The batches of another run's schedule, decoded as that says.

    Args:
      path: see `read_schedule`.
      directory, others: as of `Batches`, and the files of the run.

    Raises:
      ConfigError: the schedule cannot be read, or does not have a step.
    """

    def __init__(self, path: str, directory: RunDirectory, *others: Any) -> None:
        super().__init__(directory, *others)
        self._path, self._schedule = path, read_schedule(path)

    def begin(self, round_: int) -> None:
        self.retain_policy_version()

    def finish(self, on_progress: OnProgress) -> tuple[list[Group], DecodeStatistics, Timing]:
        start, step = time.perf_counter(), self._state.step
        if step not in self._schedule:
            raise ConfigError(f"cluster.replay: {self._path} has no step {step + 1}; lower training.steps")
        scheduled, samples = self._schedule[step], self._config.rollout.samples_per_prompt
        requests = [
            request
            for each in scheduled
            for request in self._collector.requests(
                WantedGroups("train", [each.problem], samples, TRAINING, each.step)
            )
        ]
        versions = [spans for each in scheduled for spans in each.versions]
        completions, statistics = self._decode(requests, versions, on_progress)
        problems = [self._collector.task.problem("train", each.problem) for each in scheduled]
        created = [(each.step, each.problem, each.created) for each in scheduled]
        seconds = time.perf_counter() - start
        groups, timing = self._rewarded(problems, requests, completions, created, seconds)
        return groups, statistics, timing

    def _needed(self) -> set[int]:
        return set(self._state.versions)

    def _decode(
        self, requests: Sequence[Request], versions: Sequence[Spans], on_progress: OnProgress
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Decodes responses, each version of the weights from and to the positions of the schedule.

        Args:
          versions: where each version began, by request.

        Raises:
          ConfigError: a response ends where it did not: it is another run's schedule.
        """
        statistics, held = DecodeStatistics(), self._state.versions
        partials: dict[int, PartialResponse] = {}
        ended: dict[int, Completion] = {}
        for version in sorted({version for spans in versions for _, version in spans}):
            places, limited = [], []
            for place, spans in enumerate(versions):
                ends = {v: end for (_, v), (end, _) in itertools.pairwise(spans)}
                if version in {v for _, v in spans}:
                    places.append(place)
                    end = ends.get(version, requests[place].max_response)
                    limited.append(dataclasses.replace(requests[place], max_response=end))
            if version not in held:
                raise ConfigError(
                    f"cluster.replay: {self._path} needs weights of step {version} at step"
                    f" {self._state.step}; set rollout.max_staleness as that run had it"
                )
            known = {i: partials[place] for i, place in enumerate(places) if place in partials}
            completions, counts = self._collector.scheduler.run(
                held[version], limited, on_progress, version=version, partials=known
            )
            accumulate(statistics, counts)
            for place, request, each in zip(places, limited, completions, strict=True):
                goes_on = request.max_response < requests[place].max_response
                if place in ended or (goes_on and len(each.response_ids) < request.max_response):
                    raise ConfigError(
                        f"cluster.replay: a response ends at token {len(each.response_ids)}, in the schedule"
                        f" later: {self._path} is that of another run"
                    )
                if goes_on:
                    tokens, logprobs = each.response_ids.tolist(), each.logprobs.tolist()
                    partials[place] = PartialResponse(tuple(tokens), tuple(logprobs), versions=each.versions)
                else:
                    ended[place] = each
        statistics.tokens = sum(len(each.response_ids) for each in ended.values())
        return [ended[place] for place in range(len(requests))], statistics
