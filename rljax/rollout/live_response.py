"""A request in the decode loop, with its response so far."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rljax.requests import Completion, Episode, FinishReason, PartialResponse, Request
from rljax.rollout.stop_strings import StopStrings

Ending = FinishReason | Literal["cancelled"]


@dataclasses.dataclass(eq=False)
class LiveResponse:
    """A request in the decode loop, with its response so far. Compared and hashed by identity.

    Attributes:
      stop: stop strings of this response; None for none.
      yields: whether nobody waits for it: it is decoded in an idle slot, and makes room for others.
      tokens: token ids so far, tools' answers included.
      logprobs: one per token, under the distribution really sampled; 0 for tools' answers.
      tool_answers: (begin, end) of every tool's answer, or environment's turn, in `tokens`.
      actions: texts of the policy's turns that an environment has taken.
      episode: what the environment made of them; None before the first one.
      versions: (position in the response, version of the weights) where each version began.
      drafted: number of draft nodes verified for it, without those under its present `number`.
      accepted: number of tokens from these nodes, likewise.
      accepted_spans: see `Completion`.
      slot: slot in which it is decoded; None before and after.
      number: index under which drafters know it; None before it is registered.
      ending: reason of its end; None before.
    """

    request: Request
    stop: StopStrings | None = None
    yields: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    tool_answers: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tool_calls: int = 0
    actions: list[str] = dataclasses.field(default_factory=list)
    episode: Episode | None = None
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    accepted_spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    slot: int | None = None
    number: int | None = None
    ending: Ending | None = None

    @classmethod
    def resume(
        cls, request: Request, partial: PartialResponse, stop: StopStrings | None = None
    ) -> "LiveResponse":
        """Returns a response that continues `partial`."""
        return cls(
            request,
            stop,
            tokens=list(partial.tokens),
            logprobs=list(partial.logprobs),
            tool_answers=list(partial.tool_answers),
            tool_calls=len(partial.tool_answers),
            versions=list(partial.versions),
            drafted=partial.drafted,
            accepted=partial.accepted,
        )

    @property
    def positions(self) -> int:
        """Number of tokens of prompt and response so far, which is the position of the next token."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens to prefill: those of the prompt and of the response so far."""
        return self.request.prompt_ids + tuple(self.tokens) if self.tokens else self.request.prompt_ids

    @property
    def remaining(self) -> int:
        """Number of response tokens that may still be added."""
        return self.request.max_response - len(self.tokens)

    @property
    def turn_begin(self) -> int:
        """Position in the response after the last tool's answer."""
        return self.tool_answers[-1][1] if self.tool_answers else 0

    @property
    def sampled(self) -> np.ndarray:
        """The mask of tokens that the policy sampled, bool [n]; False for tools' answers."""
        mask = np.ones(len(self.tokens), bool)
        for begin, end in self.tool_answers:
            mask[begin:end] = False
        return mask

    def find_stop(self, known: int) -> int | None:
        """Returns the number of tokens up to the one that completes a stop string behind the first `known`;
        None without one.
        """
        return None if self.stop is None else self.stop.find(self.tokens, known, self.turn_begin)

    def cut(self, end: int) -> None:
        """Drops the tokens behind the first `end`."""
        del self.tokens[end:], self.logprobs[end:]

    def append(self, ids: Sequence[int]) -> None:
        """Adds an answer: tokens that the policy has not sampled."""
        self.tool_answers.append((len(self.tokens), len(self.tokens) + len(ids)))
        self.tokens.extend(ids)
        self.logprobs.extend([0.0] * len(ids))

    def use_version(self, version: int) -> None:
        """Records that tokens from here on are sampled by this version of the weights."""
        if self.versions and self.versions[-1][1] == version:
            return
        if self.versions and self.versions[-1][0] == len(self.tokens):  # that version sampled no token
            self.versions.pop()
            self.use_version(version)
            return
        self.versions.append((len(self.tokens), version))

    def partial(self) -> PartialResponse:
        """Returns a copy that another decode loop can continue."""
        return PartialResponse(
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.tool_answers),
            tuple(self.versions),
            self.drafted,
            self.accepted,
        )

    def completion(self, with_mask: bool) -> Completion:
        """Returns the ended response.

        Args:
          with_mask: whether to set `Completion.sampled_mask`; True where tools can be called.
        """
        return Completion(
            response_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            finish_reason=self.ending,
            drafted=self.drafted,
            accepted=self.accepted,
            sampled_mask=self.sampled if with_mask else None,
            versions=tuple(self.versions),
            accepted_spans=tuple(self.accepted_spans),
            episode=self.episode,
        )
