"""Collects rollouts from agents: every sample of a problem is an episode of an agent."""

import concurrent.futures
import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from rljax.agents.app import AgentService, problem_fields
from rljax.agents.board import EpisodeBoard
from rljax.agents.episode import AgentEpisode
from rljax.agents.server import AgentServer
from rljax.config import ExperimentConfig
from rljax.errors import UserError
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.requests import DecodeStatistics
from rljax.rollout.collector import (
    TRAINING,
    BegunGroups,
    Collector,
    Group,
    OnProgress,
    Scheduler,
    Timing,
    WantedGroups,
)
from rljax.rollout.prompts import Prompts
from rljax.sampling.distribution import SamplingParams
from rljax.sandbox.process import Sandbox
from rljax.serving.worker import EngineWorker
from rljax.tasks.base import Problem, Rewards, Task
from rljax.tasks.rewards.failures import CheckerError, CheckerTimeout
from rljax.tasks.rewards.pool import CheckerPool
from rljax.tasks.rewards.registry import Reward

_LOOK = 0.25  # seconds between two looks at the state of a rollout
_SHOWN = 10  # failures that are shown; the others are counted only


class AgentCollector(Collector):
    """Samples groups of episodes.

    Args:
      task: its problems go to agents; its reward is not used.
      scheduler: its engine and drafters decode.
      prompts: the task's prompts in tokens.
      server: where agents reach the run.
      name: name of the policy for clients.
      say: called with a line about agents that fail.

    Raises:
      ConfigError: the agent cannot be imported or called.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        task: Task,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        prompts: Prompts,
        server: AgentServer,
        name: str,
        sampling: SamplingParams,
        say: Callable[[str], None],
    ) -> None:
        rollout, section = config.rollout, config.agents
        super().__init__(task, tokenizer, scheduler, config.seed, prompts, rollout.max_response_length)
        self._section, self._say, self._said = section, say, 0
        self._least = config.training.minibatches_per_step
        self.board = EpisodeBoard(section.time_limit)
        lengths = (rollout.max_prompt_length, rollout.max_response_length, section.max_requests)
        self.service = AgentService(
            self.board, tokenizer, name, config.seed, sampling, rollout.stop, *lengths, server.api_key
        )
        self.server, self._last = server, [0.0, 0.0, 0.0]
        self._pool = None
        if section.agent is not None:
            compute = ("agent", {"path": section.agent, "args": section.args})
            self._agent = Reward(section.agent, 1.0, "worker", compute, "agents")
            self._pool = CheckerPool(
                [self._agent], Sandbox(), section.time_limit, section.parallel, "agents.time_limit"
            )
            self._pool.check()

    def close(self) -> None:
        """Ends agents and server."""
        self.server.close()
        if self._pool is not None:
            self._pool.close()

    def start(self) -> None:
        """Begins to serve."""
        self.server.start(self.service.app)
        wait = "" if self._pool is not None else "; agents request problems by POST /v1/episodes"
        self._say(f"agents: listening on {self.server.address}{wait}")

    def begin(self, params: Params, wanted: WantedGroups) -> BegunGroups:
        """Makes the episodes that `finish` lets agents play; arguments as for `Collector.begin`."""
        problems, step = wanted.problems(self.task), wanted.step
        episodes = [
            AgentEpisode(
                f"{step}-{problem.id.replace('/', '-')}-{sample}-{secrets.token_hex(8)}",
                problem,
                (wanted.purpose, step, index, sample),
                wanted.sampling,
            )
            for problem, index in zip(problems, wanted.indices, strict=True)
            for sample in range(wanted.samples)
        ]
        return BegunGroups(wanted, (params, episodes), problems, [])

    def finish(
        self, begun: BegunGroups, on_progress: OnProgress | None = None
    ) -> tuple[list[Group], DecodeStatistics, Timing]:
        """Lets agents play the problems; see `Collector.finish`."""
        start = time.perf_counter()
        (params, episodes), problems, wanted = begun.decoding, begun.problems, begun.wanted
        engine, scheduler = self.scheduler.engine, self.scheduler
        worker = EngineWorker(
            engine,
            params,
            scheduler.max_slots,
            scheduler.speculator,
            max_waiting=1 << 16,
            steps_per_sync=engine.decode_steps_per_sync,
            learns=False,
            version=wanted.version,
        )
        self.service.worker, self.service.step = worker, wanted.step
        self.service.training = wanted.purpose == TRAINING

        def check(ended: int) -> None:
            if worker.error is not None:
                raise worker.error
            if on_progress is not None:
                on_progress(worker.statistics.tokens, ended)

        worker.start()
        self.board.open(episodes, hand_out=self._pool is None)
        in_flight: list[concurrent.futures.Future] = []
        try:
            if self._pool is not None:
                in_flight += [self._pool.executor.submit(self._play, episode) for episode in episodes]
            self.board.wait(_LOOK, check)
            for each in in_flight:
                each.result()  # an error of the run, not of an agent
        finally:
            self.board.close()
            for each in in_flight:
                each.cancel()
            self.service.worker = None
            worker.close(drain=False)
        if worker.error is not None:
            raise worker.error
        groups = self._groups(problems, episodes, len(episodes) // len(problems))
        self._last = _measured(episodes)
        worker.statistics.running.append(worker.loop.running_over_time.points())
        return groups, worker.statistics, Timing(time.perf_counter() - start, 0.0)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last rollout's episodes, for the metrics line."""
        requests, sequences, seconds = self._last
        return {"agents/requests": requests, "agents/sequences": sequences, "agents/seconds": seconds}

    # -- agents ----------------------------------------------------------------------------------------------

    def _play(self, episode: AgentEpisode) -> None:
        """Runs the agent for an episode, in a thread of the pool."""
        began = time.monotonic()
        request = {
            "base_url": f"{self.server.address}/v1/episodes/{episode.id}",
            "model": self.service.name,
            "api_key": self.server.api_key or "none",
            "problem": problem_fields(episode),
        }
        failure = None
        try:
            returned = self._pool.ask(self._agent, request, dict)["reward"]
            if returned is not None:
                self.board.report(episode, float(returned), episode.info)
            if episode.reward is None:
                failure = "errors"
                self._failed(episode, "returned no reward and reported none")
        except CheckerTimeout as error:
            failure = "timeouts"
            self._failed(episode, str(error))
        except CheckerError as error:
            failure = "errors"
            self._failed(episode, str(error))
        finally:
            episode.seconds = time.monotonic() - began
            self.board.end(episode, failure)

    def _failed(self, episode: AgentEpisode, what: str) -> None:
        self._said += 1
        if self._said <= _SHOWN:
            self._say(f"agents.agent ({self._section.agent}): {what}; problem {episode.problem.id}")
        if self._said == _SHOWN:
            self._say("further agents that fail are only counted: see reward/errors and reward/timeouts")

    # -- groups ----------------------------------------------------------------------------------------------

    def _groups(
        self, problems: Sequence[Problem], episodes: Sequence[AgentEpisode], samples: int
    ) -> list[Group]:
        failed = [episode for episode in episodes if episode.failure is not None or episode.reward is None]
        if failed and self._section.failures == "stop":
            raise UserError(
                f"agents: the agent of problem {failed[0].problem.id} failed, as did {len(failed)} of"
                f" {len(episodes)}; agents.failures: zero counts such episodes as 0"
            )
        names = dict.fromkeys(name for episode in episodes for name in episode.info)
        groups = []
        for i, problem in enumerate(problems):
            members = episodes[i * samples : (i + 1) * samples]
            groups.append(self._group(problem, members, list(names)))
        if sum(len(group.completions) for group in groups) < self._least:
            raise UserError(
                f"agents: {len(episodes)} episodes have sampled fewer replies to learn from than"
                f" training.minibatches_per_step, {self._least}; the agents may not reach the server, or fail"
            )
        return groups

    def _group(self, problem: Problem, members: Sequence[AgentEpisode], names: Sequence[str]) -> Group:
        rewards: list[Rewards] = []
        completions, owners = [], []
        for owner, member in enumerate(members):
            out = member.failure is not None and self._section.failures == "exclude"
            rewards.append(
                {
                    "reward": None if out else _reward(member),
                    **{name: member.info.get(name, 0.0) for name in names},
                    **{kind: float(member.failure == kind) for kind in ("errors", "timeouts")},
                }
            )
            sequences = [] if out else member.completions()
            completions += sequences
            owners += [owner] * len(sequences)
        prompt_ids = completions[0].prompt_ids if completions else (0,)
        return Group(problem, prompt_ids, completions, rewards, tuple(owners))


def _reward(episode: AgentEpisode) -> float:
    return 0.0 if episode.failure is not None or episode.reward is None else episode.reward


def _measured(episodes: Sequence[AgentEpisode]) -> list[float]:
    """Returns the means of requests, of sequences, and of seconds."""
    counts = [(len(each.turns), len(each.completions()), each.seconds) for each in episodes]
    return [float(mean) for mean in np.mean(counts, axis=0)]
