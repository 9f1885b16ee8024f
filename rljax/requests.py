"""Records of decoding: requests, responses in progress, completions, and counts of their work."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rljax.sampling.distribution import SamplingParams
from rljax.tasks.base import Problem

FinishReason = Literal["eos", "length", "stop"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample.

    Attributes:
      prompt_ids: the prompt's token ids, not empty. Requests with the same tuple share one prefill.
      noise_key: uint32 [2], from `rljax.sampling.noise.request_key`: the request's identity.
      max_response: response tokens at most, tools' answers included.
      training: False where nothing may be trained on it.
      step: training step.
      sampling: temperature and filters; None for the engine's. Only an engine with `per_slot_sampling` takes
        others.
      problem: problem of the episode, where the response is one of an environment.
    """

    prompt_ids: tuple[int, ...]
    noise_key: np.ndarray
    max_response: int
    training: bool = True
    step: int = 0
    sampling: SamplingParams | None = None
    problem: Problem | None = None


@dataclasses.dataclass(frozen=True)
class Episode:
    """What an environment made of a response's turns.

    Attributes:
      rewards: reward of each turn of the policy that the environment has taken.
      done: whether the environment has ended the episode; otherwise a limit cut it off, or it failed.
      info: numbers for metrics, by name.
      failure: "errors" or "timeouts" where the environment raised or took too long; None where it did not.
    """

    rewards: tuple[float, ...] = ()
    done: bool = False
    info: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failure: Literal["errors", "timeouts"] | None = None

    @property
    def reward(self) -> float:
        """Reward of the episode: the sum of its turns', and 0 where the environment failed."""
        return 0.0 if self.failure is not None else float(sum(self.rewards))


@dataclasses.dataclass(frozen=True)
class PartialResponse:
    """The beginning of a response that another decode loop goes on with (`DecodeLoop.withdraw`, `submit`).

    Under the same weights the response goes on with the same bits as if it had never moved: noise depends on
    the request and the position alone, and keys and values are computed again from the tokens.

    Attributes:
      tokens: ids so far, tools' answers included.
      logprobs: one per token, under the distribution really sampled; 0 for tools' answers.
      tool_answers: (begin, end) of every tool's answer in `tokens`.
      versions: (position in the response, version of the weights) where each version began.
      drafted: draft nodes that were verified for it.
      accepted: tokens that came from them.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tool_answers: tuple[tuple[int, int], ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.logprobs)} logprobs")


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled response.

    Attributes:
      response_ids: int32 [n], with the token that ended it (EOS, or the one that completed a stop string).
      logprobs: float32 [n], under the distribution really sampled.
      finish_reason: "eos", "length" (its max_response is reached) or "stop" (a stop string appeared).
      drafted: draft nodes that were verified for it.
      accepted: number of tokens that came from them.
      sampled_mask: bool [n], True for tokens that the policy sampled; the others are tools' answers or an
        environment's turns, with logprobs of 0. None without either: every token was sampled.
      versions: (position in the response, version of the weights) where each version began; one pair unless
        the weights were swapped while it was decoded.
      accepted_spans: (begin, end) of tokens that were accepted drafts, for reports; those before a response
        was resumed are not in it.
      episode: what an environment made of it; None without an environment.
      prompt_ids: its prompt, where the responses of a group have different ones (those of agents).
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    drafted: int = 0
    accepted: int = 0
    sampled_mask: np.ndarray | None = None
    versions: tuple[tuple[int, int], ...] = ()
    accepted_spans: tuple[tuple[int, int], ...] = ()
    episode: Episode | None = None
    prompt_ids: tuple[int, ...] | None = None

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.response_ids) if self.sampled_mask is None else int(self.sampled_mask.sum())


def spans_of(completion: Completion, version: int) -> list[tuple[int, int]]:
    """Returns (begin, end) of the tokens of a response that a version of the weights sampled."""
    begins = [*completion.versions, (len(completion.response_ids), -1)]
    return [
        (begin, end)
        for (begin, each), (end, _) in itertools.pairwise(begins)
        if each == version and end > begin
    ]


@dataclasses.dataclass
class DecodeStatistics:
    """Counts and times of decoding.

    Attributes:
      tokens: response tokens sampled and kept.
      steps: forward passes.
      rows: tokens computed by them: of plain steps the batch bucket.
      cached_tokens: tokens of prompts and responses that they read from the cache, padding not counted.
      prefilled_tokens: prompt tokens prefilled, padding not counted.
      host_syncs: number of host syncs.
      verified: forward passes that verified drafts.
      verified_slots: sum over these of the slots that decoded.
      verified_rows: tokens computed by these.
      drafted: draft nodes verified.
      accepted: draft nodes accepted.
      unusable: draft nodes that a drafter returned and that were none.
      host_seconds: spent on drafting, on choosing, and on telling the drafter.
      device_seconds: time of forward passes.
      draft_seconds: time of drafting on the device.
      train_seconds: time of training drafters between passes.
      idle_seconds: between passes, when the device waited for the host.
      ahead_tokens: tokens sampled ahead for a later rollout.
      ahead_seconds: spent on putting such requests into idle slots.
      ahead_pass_seconds: estimated time by which passes took longer, in batches kept wide to sample ahead.
      ahead_saved_seconds: estimated time that tokens sampled ahead by the rollout before saved in this one.
      ahead_offered: tokens sampled ahead before that drafters could propose for this rollout's responses.
      ahead_accepted: number of these that verifying passes accepted.
      ahead_final: tokens of responses that were sampled ahead to their end and taken over; also in `tokens`.
      tool_calls: calls of tools, or steps of an environment, that were answered; so also below.
      tool_errors: number of calls that were answered with an error.
      tool_seconds: sum of the calls' times.
      tool_tokens: number of tokens of answers in responses.
      tool_waiting_seconds: time that decoding waited for answers.
      running: number of running requests over time, per rollout; see `RunningRequests.points`.
    """

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    host_syncs: int = 0
    verified: int = 0
    verified_slots: int = 0
    verified_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    unusable: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    draft_seconds: float = 0.0
    train_seconds: float = 0.0
    idle_seconds: float = 0.0
    ahead_tokens: int = 0
    ahead_seconds: float = 0.0
    ahead_pass_seconds: float = 0.0
    ahead_saved_seconds: float = 0.0
    ahead_offered: int = 0
    ahead_accepted: int = 0
    ahead_final: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    tool_seconds: float = 0.0
    tool_tokens: int = 0
    tool_waiting_seconds: float = 0.0
    running: list[list[tuple[float, float]]] = dataclasses.field(default_factory=list)

    @property
    def occupancy(self) -> float:
        """Share of computed rows that gave a token."""
        return self.tokens / self.rows if self.rows else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens that a slot gets from a forward pass that verifies drafts: 1 plus what was accepted."""
        return 1 + self.accepted / self.verified_slots if self.verified_slots else 1.0


def accumulate(into: Any, more: Any) -> None:
    """Adds every field of one dataclass of counts, such as `DecodeStatistics`, to another's."""
    for field in dataclasses.fields(into):
        setattr(into, field.name, getattr(into, field.name) + getattr(more, field.name))


def difference(after: DecodeStatistics, before: DecodeStatistics) -> DecodeStatistics:
    """Returns what was counted between two moments; `running` is left out."""
    return DecodeStatistics(
        **{
            field.name: getattr(after, field.name) - getattr(before, field.name)
            for field in dataclasses.fields(after)
            if field.name != "running"
        }
    )
