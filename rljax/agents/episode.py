"""One episode of an agent: the requests that it made, in exact tokens, and the sequences to train on.

An agent sends text: messages, among them the policy's own earlier replies. Tokenized again, a reply may
become other tokens than were sampled, and a policy would be trained on what it never did. So replies are
recognised by their text and stand for the tokens that were sampled:

    request 1   system, user                               prompt tokens by the chat template
    reply 1     text                                       sampled tokens
    request 2   system, user, reply 1, tool's result       tokens of request 1 + of reply 1 + what follows

Requests whose prompt begins with the tokens of an earlier request and its reply become one sequence, with a
mask of what was sampled. Others, of an agent that shortens its history or calls a second role, are sequences
of their own. All share the reward of the episode.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.models.chat_turns import ChatTurns
from rljax.requests import Completion, FinishReason
from rljax.sampling.distribution import SamplingParams
from rljax.tasks.base import Problem

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request, and one reply to it.

    Attributes:
      text: text of the reply, as the agent got it.
      prompt_ids: tokens of the request.
      response_ids: tokens of the reply, with the one that ended it.
      logprobs: one per token, under the distribution really sampled.
      versions: see `Completion`.
      drafted, accepted: see `Completion`.
    """

    messages: Sequence[Message]
    text: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...] = ()
    drafted: int = 0
    accepted: int = 0

    @property
    def conversation(self) -> list[Message]:
        """The messages with the reply."""
        return [*self.messages, {"role": "assistant", "content": self.text}]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the request and the reply."""
        return self.prompt_ids + self.response_ids


@dataclasses.dataclass
class AgentEpisode:
    """An episode. Requests of one episode may come from several threads.

    Attributes:
      id: its name in addresses.
      identity: numbers that its requests' noise follows from: purpose, step, index of the problem, sample.
      sampling: see `Request.sampling`.
      turns: requests with their replies, in the order of their ends.
      reward: what the agent reported; None before.
      info: further numbers that it reported, for metrics.
      failure: "errors" or "timeouts"; None where the agent did not fail.
      seconds: time that it took.
      requests: requests that were answered or are in flight; the next one's number.
      deadline: when it ends unless the agent has reported, by `time.monotonic`; None before it has begun.
      ended: whether requests are refused.
    """

    id: str
    problem: Problem
    identity: tuple[int, ...]
    sampling: SamplingParams | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    reward: float | None = None
    info: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str | None = None
    seconds: float = 0.0
    requests: int = 0
    deadline: float | None = None
    ended: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    def prompt(self, messages: Sequence[Message], chat: ChatTurns) -> tuple[int, ...]:
        """Returns the tokens of a request's messages, with those that were sampled for replies in them.

        Raises:
          TokenizerError: the chat template refuses the messages.
        """
        with self.lock:
            turns = list(self.turns)
        for turn in sorted(turns, key=lambda turn: -len(turn.messages)):
            known = turn.conversation
            more = messages[len(known) :]
            if more and list(messages[: len(known)]) == known:
                last = turn.response_ids[-1] if turn.response_ids else None
                return (*turn.token_ids, *chat.following(more, last))
        return tuple(chat.conversation(messages, _recognised(messages, turns)))

    def room(self, prompt_ids: tuple[int, ...], longest_prompt: int, longest_response: int) -> int:
        """Returns how many tokens a reply to this prompt may have; 0 or less where the prompt is too long.

        Args:
          prompt_ids: tokens of the request.
          longest_prompt: most tokens before the first reply of a sequence.
          longest_response: most tokens of a sequence from its first reply on.
        """
        with self.lock:
            begun = _extended(sequences(self.turns), prompt_ids)
        if begun is not None:
            return longest_response - (len(prompt_ids) - len(begun.prompt_ids))
        return longest_response if len(prompt_ids) <= longest_prompt else 0

    def completions(self) -> list[Completion]:
        """Returns the sequences to train on."""
        with self.lock:
            return [sequence.completion() for sequence in sequences(self.turns)]


@dataclasses.dataclass
class _Sequence:
    """Turns that continue each other."""

    prompt_ids: tuple[int, ...]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason = "eos"
    drafted: int = 0
    accepted: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + tuple(self.tokens)

    def add(self, turn: Turn) -> None:
        read = turn.prompt_ids[len(self.prompt_ids) + len(self.tokens) :]
        begin = len(self.tokens) + len(read)
        self.tokens += [*read, *turn.response_ids]
        self.logprobs += [*([0.0] * len(read)), *turn.logprobs]
        self.sampled += [False] * len(read) + [True] * len(turn.response_ids)
        self.versions += [(begin + place, version) for place, version in turn.versions]
        self.finish_reason = turn.finish_reason
        self.drafted, self.accepted = self.drafted + turn.drafted, self.accepted + turn.accepted

    def completion(self) -> Completion:
        return Completion(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.logprobs, np.float32),
            self.finish_reason,
            self.drafted,
            self.accepted,
            np.asarray(self.sampled, bool),
            tuple(self.versions),
            prompt_ids=self.prompt_ids,
        )


def sequences(turns: Sequence[Turn]) -> list[_Sequence]:
    """Merges turns whose prompts begin with the tokens of an earlier one, token for token."""
    merged: list[_Sequence] = []
    for turn in turns:
        if not turn.response_ids:
            continue
        extended = _extended(merged, turn.prompt_ids)
        if extended is None:
            extended = _Sequence(turn.prompt_ids)
            merged.append(extended)
        extended.add(turn)
    return merged


def _extended(merged: Sequence[_Sequence], prompt_ids: tuple[int, ...]) -> _Sequence | None:
    """Returns the longest sequence that a prompt continues; None where there is none."""
    found = [each for each in merged if prompt_ids[: len(each.token_ids)] == each.token_ids]
    return max(found, key=lambda each: len(each.tokens), default=None)


def _recognised(messages: Sequence[Message], turns: Sequence[Turn]) -> dict[int, tuple[int, ...]]:
    """Returns the tokens that were sampled for replies among messages, by their places. Of equal replies the
    first is the first.
    """
    left, found = list(turns), {}
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = next((turn for turn in left if turn.text == message["content"]), None)
        if turn is not None:
            found[place] = turn.response_ids
            left.remove(turn)
    return found
