"""Responses that are episodes of an environment: turns of the policy, and the environment's between them.

A turn of the policy ends with EOS or a stop string. Its response then pauses as for a tool: it keeps its slot
and its KV cache, the environment takes the turn in a worker, and the other slots decode. The tokens up to the
policy's next turn (`rljax/models/chat_turns.py`) are appended, and the response continues. What the policy
has sampled is never tokenized again.
"""

import dataclasses
import json
import time
from collections.abc import Collection

from rljax.environments.task import Outcome
from rljax.environments.use import EnvironmentUse, noise_name
from rljax.requests import DecodeStatistics, Episode
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.sources.tool_turns import Pauses
from rljax.rollout.sources.turns import Answered
from rljax.tools.markup import ToolCall
from rljax.tools.workers import ToolAnswer


@dataclasses.dataclass
class _Step:
    """One step of an episode, in the form of a tool."""

    use: EnvironmentUse
    response: LiveResponse

    def call(self, text: str) -> str:
        response, actions = self.response, list(self.response.actions)
        last = len(actions) == self.use.max_turns
        name = noise_name(response.request.noise_key)
        outcome = self.use.task.step(name, response.request.problem, actions, last)
        return json.dumps(outcome._asdict())


class EnvironmentTurns(Pauses):
    """The turns of one decode loop.

    Args:
      eos_token_ids: tokens that end a turn of the policy.
    """

    takes_last = True

    def __init__(self, use: EnvironmentUse, eos_token_ids: Collection[int]) -> None:
        super().__init__(use.workers)
        self._use, self._eos = use, frozenset(eos_token_ids)
        self._taken: list[tuple[LiveResponse, ToolAnswer]] = []  # steps of an environment in this process

    def _find(self, response: LiveResponse, known: int, stop: int | None) -> ToolCall | None:
        """Returns the turn of the policy, as a call of the environment."""
        if stop is None and response.tokens[-1] not in self._eos:
            return None
        end = len(response.tokens) if stop is None else stop
        text = self._use.tokenizer.response_text(response.tokens[response.turn_begin : end])
        return ToolCall(end, "step", text)

    def _call(self, response: LiveResponse, call: ToolCall) -> None:
        """Pauses a response, and begins the step. An environment in this process takes it at once."""
        response.actions.append(call.text)
        step = _Step(self._use, response)
        if not self._use.task.is_here:
            self._pause(response, call.name, step, call.text)
            return
        start = time.perf_counter()
        answer = ToolAnswer(0, step.call(call.text), False, time.perf_counter() - start)
        self.paused.add(response)
        self._taken.append((response, answer))

    def answers(self, statistics: DecodeStatistics, alone: bool, joined: bool) -> list[Answered]:
        if not self._use.task.is_here:
            return super().answers(statistics, alone, joined)
        taken, self._taken = self._taken, []
        statistics.tool_calls += len(taken)
        statistics.tool_seconds += sum(answer.seconds for _, answer in taken)
        waiting = [(response, answer) for response, answer in taken if response in self.paused]  # not dropped
        self.paused.clear()
        return [self._answered(response, answer) for response, answer in waiting]

    def _answered(self, response: LiveResponse, answer: ToolAnswer) -> Answered:
        if answer.failed:
            outcome = self._use.task.failed(
                answer.text, "timeouts", response.request.problem, response.actions
            )
        else:
            outcome = Outcome(**json.loads(answer.text))
        episode = response.episode or Episode()
        response.episode = Episode(
            (*episode.rewards, outcome.reward),
            outcome.done,
            {**episode.info, **outcome.info},
            outcome.failure,
        )
        if outcome.done or outcome.failure is not None:
            return Answered(response, [], "eos")
        if len(response.actions) == self._use.max_turns:
            return Answered(response, [], "length")
        return Answered(response, self._use.following(outcome.messages, response.tokens[-1]), None)
