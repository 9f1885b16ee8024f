"""The schedule of a run with `rollout.max_staleness`: its batches, and their repetition (`cluster.replay`).

A line of schedule.jsonl is a batch: its groups, and where in each response each version of the weights began.
Every token is a function of its request, the tokens before it and its version. So the same batches, sampled
under the same versions, are the same bits, whoever decodes them and when.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljax.errors import ConfigError
from rljax.requests import Completion, DecodeStatistics, PartialResponse, Request, accumulate
from rljax.rollout.scheduler import OnProgress

if TYPE_CHECKING:
    from rljax.training.training_run import TrainingRun

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


class Replay:
    """Decodes the batches of another run's schedule.

    Args:
      run: the run.
      path: see `read_schedule`.
    """

    def __init__(self, run: "TrainingRun", path: str) -> None:
        self._run, self._path, self._batches = run, path, read_schedule(path)

    def batch(self, step: int) -> list[ScheduledGroup]:
        """Returns the groups of a step.

        Raises:
          ConfigError: the schedule does not have it.
        """
        if step not in self._batches:
            raise ConfigError(f"cluster.replay: {self._path} has no step {step + 1}; lower training.steps")
        return self._batches[step]

    def decode(
        self, requests: Sequence[Request], versions: Sequence[Spans], on_progress: OnProgress
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Decodes responses, each version of the weights from and to the positions of the schedule.

        Args:
          requests: the requests.
          versions: where each version began, by request.
          on_progress: see `OnProgress`.

        Raises:
          ConfigError: a response ends where it did not: it is another run's schedule.
        """
        run, statistics = self._run, DecodeStatistics()
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
            if version not in run.versions:
                raise ConfigError(
                    f"cluster.replay: {self._path} needs weights of step {version} at step {run.step}; set"
                    " rollout.max_staleness as that run had it"
                )
            known = {i: partials[place] for i, place in enumerate(places) if place in partials}
            completions, counts = run.collector.scheduler.run(
                run.versions[version], limited, on_progress, version=version, partials=known
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
