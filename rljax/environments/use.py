"""The environment of a run, with the tokens between turns and the threads that wait for steps."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.config import ExperimentConfig
from rljax.environments.task import EnvironmentTask, environment_of
from rljax.errors import ConfigError
from rljax.models.chat_turns import ChatTurns, shortened
from rljax.models.tokenizer import Tokenizer
from rljax.tasks.base import Problem, Task
from rljax.tools.workers import ToolWorkers

_NO_LIMIT = 1e6  # seconds; workers have a limit of their own


@dataclasses.dataclass(frozen=True)
class EnvironmentUse:
    """Settings of a run's environment.

    Attributes:
      turns: the tokens between turns.
      max_turns: most turns of the policy in an episode.
      max_observation_length: most characters of a message; a longer one is cut.
      workers: threads that wait for steps.
    """

    task: EnvironmentTask
    tokenizer: Tokenizer
    turns: ChatTurns
    max_turns: int
    max_observation_length: int
    workers: ToolWorkers

    def following(self, messages: Sequence[Mapping[str, str]], last_token: int) -> list[int]:
        """Returns the tokens between a turn of the policy, which ended with `last_token`, and its next."""
        longest = self.max_observation_length
        cut = [{**message, "content": shortened(message["content"], longest)} for message in messages]
        return self.turns.following(cut, last_token)

    def demonstrate(self, problem: Problem, eos_token_id: int) -> tuple[list[int], list[bool]]:
        """Plays a demonstrated episode. The tokens are those of a rollout with the same turns.

        Returns:
          The token ids, and for each token whether the policy would have sampled it.
        """
        ids: list[int] = []
        sampled: list[bool] = []
        actions: list[str] = []
        demonstration = self.task.demonstration(problem)
        if demonstration is None:
            raise ConfigError(
                f"warm_start: environment {self.task.config.name} demonstrates no episodes; leave the section"
                " out"
            )
        for action in demonstration[: self.max_turns]:
            actions.append(action)
            turn = [*self.tokenizer.encode(action), eos_token_id]
            ids += turn
            sampled += [True] * len(turn)
            outcome = self.task.step(f"demonstration/{problem.id}", problem, actions, last=False)
            if outcome.done or outcome.failure or len(actions) == self.max_turns:
                break
            between = self.following(outcome.messages, eos_token_id)
            ids += between
            sampled += [False] * len(between)
        last = len(sampled) - sampled[::-1].index(True) if True in sampled else 0  # ends with a turn
        return ids[:last], sampled[:last]


def make_environment_use(config: ExperimentConfig, task: Task, tokenizer: Tokenizer) -> EnvironmentUse | None:
    """Returns the environment of a task; None where it has none."""
    environment = environment_of(task)
    if environment is None:
        return None
    section = config.environment
    running = config.task.reward_workers or len(os.sched_getaffinity(0))
    return EnvironmentUse(
        environment,
        tokenizer,
        ChatTurns(tokenizer),
        section.max_turns,
        section.max_observation_length,
        ToolWorkers(running, _NO_LIMIT, f"task.name ({config.task.name})", "task.reward_timeout"),
    )


def check_environment(config: ExperimentConfig, task: Task, processes: int = 1) -> None:
    """Raises a ConfigError where the rest of an experiment does not go with the environment of its task."""
    if environment_of(task) is None:
        return
    rollout, name = config.rollout, f"{config.task.name} is an environment"
    penalties = (rollout.repetition_penalty, rollout.frequency_penalty, rollout.presence_penalty)
    for key, used, instead in (
        ("tools", config.tools is not None, "an environment answers calls itself; leave the section out"),
        ("cluster.workers", config.cluster.workers, "an episode does not move to another worker; set 0"),
        ("distributed", processes > 1, "its answers come by the clock of one process; use one"),
        ("rollout", penalties != (1.0, 0.0, 0.0), "set repetition_penalty 1.0 and the others 0"),
    ):
        if used:
            raise ConfigError(f"{key}: is not supported here, since {name}: {instead}")


def training_texts(task: Task, problem: Problem) -> list[str]:
    """Returns texts of a problem for a new tokenizer: prompt, and solution or demonstrated episode."""
    environment = environment_of(task)
    texts = [problem.messages[-1]["content"]]
    if environment is not None:
        return texts + _texts(environment, problem)
    return texts + ([] if problem.solution is None else [problem.solution])


def noise_name(noise_key: np.ndarray) -> str:
    """Returns the name of a request's episode."""
    return noise_key.tobytes().hex()


def _texts(environment: EnvironmentTask, problem: Problem) -> list[str]:
    actions = environment.demonstration(problem) or []
    texts = list(actions)
    for number in range(1, len(actions) + 1):
        key = f"texts/{problem.id}"
        outcome = environment.step(key, problem, actions[:number], last=number == len(actions))
        texts += [message["content"] for message in outcome.messages]
        if outcome.done or outcome.failure:
            break
    return texts
