"""Collects rewarded rollouts of problems: prompts, requests with their noise, decoding, rewards.

`Collector` makes requests of problems, and rewards their responses. `Scheduler` decodes a list of requests to
its end; where workers decode, `rljax/cluster/decoder.py` stands in its place.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Outcome
from rljax import processes
from rljax.engine.engine import DecodeEngine
from rljax.environments.task import environment_of
from rljax.environments.use import EnvironmentUse
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, PartialResponse, Request
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy, OnSync, check_request
from rljax.rollout.episodes import episode_rewards
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import open_loop, open_slots
from rljax.rollout.prompts import Prompts
from rljax.rollout.sources.idle import IDLE, IdleSlots
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator
from rljax.tasks.base import Problem, Rewards, Split, Task
from rljax.tasks.judging import judge
from rljax.tools.use import ToolUse

TRAINING, EVALUATION = 0, 1
"""Purposes, the first part of a request's identity: evaluation never reuses the noise of training."""

OnProgress = Callable[[int, int], None]
"""Called at every host sync with (tokens sampled, requests finished)."""

OnFinished = Callable[[int, Completion], None]
"""Called with the index of a request and its response, as soon as the response has ended."""

Decoded = tuple[list[Completion], DecodeStatistics]
"""Responses in the order of their requests, and counts of the work."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The responses to one prompt.

    Attributes:
      prompt_ids: token ids of the prompt.
      completions: G responses; of agents the sequences of G episodes, any number of each.
      rewards: reward of each response by the task, with its named parts; of agents of each episode. The
        "reward" of a response that is left out, because a reward declined, is None.
      episodes: of agents the index of each sequence's episode in `rewards`; None otherwise.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    completions: list[Completion]
    rewards: Sequence[Rewards]
    episodes: tuple[int, ...] | None = None

    @property
    def reward(self) -> np.ndarray:
        """Rewards of the responses, or of episodes, float64 [G]; NaN for those that are left out."""
        return self.part("reward")

    def part(self, name: str) -> np.ndarray:
        """Returns a part of the rewards, float64 [G], NaN where it is missing."""
        return np.asarray([reward.get(name) for reward in self.rewards], np.float64)

    @property
    def places(self) -> Sequence[int]:
        """Place of each completion's reward in `rewards`."""
        return range(len(self.completions)) if self.episodes is None else self.episodes

    def prompt_of(self, completion: Completion) -> tuple[int, ...]:
        """Returns the prompt of one of the completions."""
        return self.prompt_ids if completion.prompt_ids is None else completion.prompt_ids

    def last_of(self, place: int) -> Completion | None:
        """Returns the response of a reward, of an episode the last sequence; None where it has none."""
        found = [each for each, own in zip(self.completions, self.places, strict=True) if own == place]
        return found[-1] if found else None


@dataclasses.dataclass
class Timing:
    """Seconds spent decoding and rewarding."""

    decode: float = 0.0
    reward: float = 0.0


@dataclasses.dataclass(frozen=True)
class WantedGroups:
    """Groups to sample.

    Attributes:
      samples: number of responses to each problem, G.
      purpose: TRAINING or EVALUATION.
      step: the training step; with purpose, problem and sample it identifies a request's noise.
      sampling: see `Request`.
      version: number of the weights, the steps that they have learned; rollout workers know them by it.
    """

    split: Split
    indices: Sequence[int]
    samples: int
    purpose: int
    step: int
    sampling: SamplingParams | None = None
    version: int = 0

    def problems(self, task: Task) -> list[Problem]:
        """Returns the problems of a task that are meant."""
        return [task.problem(self.split, index) for index in self.indices]


@dataclasses.dataclass(frozen=True)
class BegunGroups:
    """Groups that are being sampled, or will be.

    Attributes:
      decoding: what the scheduler has begun.
      requests: their requests, those of one problem together.
    """

    wanted: WantedGroups
    decoding: Any
    problems: list[Problem]
    requests: list[Request]


class Collector:
    """Samples groups of responses to a task's problems.

    Args:
      task: problems and rewards.
      scheduler: decodes requests.
      prompts: the task's prompts in tokens.
      max_response_length: largest number of tokens in a response.

    Attributes:
      has_turns: whether the task is an environment.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        scheduler: "Scheduler",
        seed: int,
        prompts: Prompts,
        max_response_length: int,
    ) -> None:
        self.task, self.tokenizer, self.scheduler = task, tokenizer, scheduler
        self.seed, self.prompts, self.max_response_length = seed, prompts, max_response_length
        self._environment = environment_of(task)
        self.has_turns = self._environment is not None

    def collect(
        self, params: Params, wanted: WantedGroups, on_progress: OnProgress | None = None
    ) -> tuple[list[Group], DecodeStatistics, Timing]:
        """Samples and rewards responses to problems.

        Args:
          params: weights from `engine.load_params`.
          wanted: which problems, how often, and with which noise.

        Returns:
          One group per problem, counts of decoding, and seconds.
        """
        return self.finish(self.begin(params, wanted), on_progress)

    def begin(self, params: Params, wanted: WantedGroups, **how: Any) -> BegunGroups:
        """Begins what `finish` waits for. Rollout workers begin at once; without any, `finish` decodes.

        Args as of `collect`: the arrays of `params` must stay as they are until `finish`. Further ones are
        those of the scheduler's `begin`.
        """
        problems = wanted.problems(self.task)
        requests = self._requests(wanted, problems)
        decoding = self.scheduler.begin(params, requests, wanted.version, **how)
        return BegunGroups(wanted, decoding, problems, requests)

    def finish(
        self, begun: BegunGroups, on_progress: OnProgress | None = None
    ) -> tuple[list[Group], DecodeStatistics, Timing]:
        """Waits for responses that were begun, and rewards them; see `collect`."""
        start = time.perf_counter()
        completions, statistics = self.scheduler.finish(begun.decoding, on_progress)
        decode = time.perf_counter() - start
        groups, seconds = self.reward(begun.problems, begun.requests, completions)
        return groups, statistics, Timing(decode, seconds)

    def reward(
        self, problems: Sequence[Problem], requests: Sequence[Request], completions: Sequence[Completion]
    ) -> tuple[list[Group], float]:
        """Returns the rewarded groups of problems, and the seconds that rewarding took."""
        start, samples = time.perf_counter(), len(requests) // len(problems)
        rewards: Sequence[Rewards]
        if self._environment is not None:
            rewards = episode_rewards(completions, self._environment.declines)
        else:
            answered = [
                (problems[i // samples], self.tokenizer.response_text(completion.response_ids.tolist()))
                for i, completion in enumerate(completions)
            ]
            # A reward may run code under a time limit: one process decides.
            rewards = processes.from_first(lambda: judge(self.task, answered))
        groups = []
        for i, problem in enumerate(problems):
            members = slice(i * samples, (i + 1) * samples)
            prompt_ids = requests[members.start].prompt_ids
            groups.append(Group(problem, prompt_ids, list(completions[members]), rewards[members]))
        return groups, time.perf_counter() - start

    def requests(self, wanted: WantedGroups) -> list[Request]:
        """Returns the requests of `collect`, those of one problem together."""
        return self._requests(wanted, wanted.problems(self.task))

    def _requests(self, wanted: WantedGroups, problems: Sequence[Problem]) -> list[Request]:
        prompts = [self.prompts.tokens(problem) for problem in problems]
        return [
            Request(
                prompt,
                request_key(self.seed, wanted.purpose, wanted.step, index, sample),
                self.max_response_length,
                wanted.purpose == TRAINING,
                wanted.step,
                wanted.sampling,
                problem if self.has_turns else None,
            )
            for problem, prompt, index in zip(problems, prompts, wanted.indices, strict=True)
            for sample in range(wanted.samples)
        ]


def outcomes(groups: Sequence[Group]) -> list[Outcome]:
    """Returns rewarded responses in the form that drafters learn from. One that is left out has the mean
    reward of its group: as text it is as good an example as the others.
    """
    found = []
    for group in groups:
        scored = group.reward[~np.isnan(group.reward)]
        rewards = np.nan_to_num(group.reward, nan=scored.mean() if scored.size else 0.0)
        found += [
            Outcome(group.prompt_of(completion), completion.response_ids, float(rewards[place]))
            for completion, place in zip(group.completions, group.places, strict=True)
        ]
    return found


class Scheduler:
    """Decodes a list of requests to its end.

    Args:
      stop_strings: see `StopStrings`; None for none.
      speculator: speculator, to decode with drafts; None for plain decoding.
      overlap: whether to draft for one half of the slots while the device verifies the other; in plain
        decoding, whether to read results while the device goes on.
      tools: tools that responses may call, or the environment whose episodes they are; None for neither.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        max_slots: int,
        stop_strings: StopStrings | None = None,
        speculator: Speculator | NoDrafts | None = None,
        overlap: bool = False,
        tools: ToolUse | EnvironmentUse | None = None,
    ) -> None:
        self.engine, self.max_slots, self.overlap = engine, max_slots, overlap
        self.stop_strings, self.tools = stop_strings, tools
        self.speculator = NoDrafts() if speculator is None else speculator
        self.lengths = self.speculator.lengths

    def run(
        self,
        params: Params,
        requests: Sequence[Request],
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
        version: int = 0,
        partials: Mapping[int, PartialResponse] | None = None,
    ) -> Decoded:
        """Returns completions in the order of `requests`, and counts of the work.

        Args:
          params: weights from `engine.load_params`.
          requests: requests to decode.
          version: number of the weights, for `Completion.versions`.
          partials: what is known of some responses already, by place.

        Raises:
          ValueError: a request has an empty prompt, no response tokens, or more positions than the largest
            cache bucket.
        """
        for request in requests:
            check_request(request, self.engine.buckets)
        known = partials or {}
        responses = [
            LiveResponse.resume(request, known.get(place, PartialResponse()), self.stop_strings)
            for place, request in enumerate(requests)
        ]
        places = {response: place for place, response in enumerate(responses)}

        def report(synced: Sequence[LiveResponse]) -> None:
            for response in synced:
                if on_finished is not None and response.ending is not None:
                    on_finished(places[response], response.completion(self.tools is not None))
            if on_progress is not None:
                on_progress(loop.statistics.tokens, len(responses) - len(loop.live))

        by_itself = self.stop_strings is None and self.tools is None  # every response ends on the device
        idle = self.speculator.idle.in_slots(self.speculator, takes_over=by_itself) or IDLE
        policy = LoopPolicy(
            start_full=True, longest_first=self.lengths, reads_later=self.overlap and by_itself
        )
        loop = self.open_loop(params, policy, report, version, idle)
        taken = idle.begin(loop.slots, requests)
        for place, completion in taken.items():
            loop.statistics.tokens += len(completion.response_ids)
            if on_finished is not None:
                on_finished(place, completion)
        decoded = [response for place, response in enumerate(responses) if place not in taken]
        if decoded:
            loop.submit(decoded)
            while loop.live:
                loop.step()
            loop.finish_pass()  # a pass over requests that nobody waits for
            idle.end(loop.slots, requests)
            loop.statistics.running.append(loop.running_over_time.points())
        completions = [
            taken.get(place) or response.completion(self.tools is not None)
            for place, response in enumerate(responses)
        ]
        self.speculator.learn_lengths(requests, completions)
        return completions, loop.statistics

    def open_loop(
        self, params: Params, policy: LoopPolicy, on_sync: OnSync, version: int, idle: IdleSlots = IDLE
    ) -> DecodeLoop:
        """Returns a decode loop of the scheduler's parts, without requests. Arguments as of `open_loop`."""
        slots = open_slots(self.engine, params, self.speculator, self.overlap, version)
        return open_loop(slots, self.max_slots, self.tools, policy, on_sync, idle)

    def begin(self, params: Params, requests: Sequence[Request], version: int) -> Callable[..., Decoded]:
        """Returns what `finish` takes: `run` of these requests, which holds the weights until then. Rollout
        workers would begin now (`rljax/cluster/decoder.py`).
        """
        return functools.partial(self.run, params, requests, version=version)

    def finish(self, begun: Callable[..., Decoded], on_progress: OnProgress | None = None) -> Decoded:
        """Decodes what was begun."""
        return begun(on_progress=on_progress)
