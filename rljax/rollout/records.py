"""What is asked of the decode engine, and what a rollout leaves behind."""

import dataclasses
from typing import Literal

import numpy as np

FinishReason = Literal["eos", "length", "stop"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample.

    Attributes:
      prompt_ids: the prompt's token ids, not empty. Requests with the same tuple share one prefill.
      noise_key: uint32 [2], from `rljax.engine.noise.request_key`: the request's identity.
      max_response: response tokens at most.
    """

    prompt_ids: tuple[int, ...]
    noise_key: np.ndarray
    max_response: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled response.

    Attributes:
      response_ids: int32 [n], with the token that ended it (EOS, or the one that completed a stop string).
      logprobs: float32 [n], under the distribution really sampled.
      finish_reason: "eos", "length" (its max_response is reached) or "stop" (a stop string appeared).
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason


@dataclasses.dataclass
class DecodeStatistics:
    """Where decoding spent itself.

    Attributes:
      tokens: response tokens kept.
      steps: decode steps; a step computes every slot of its batch bucket.
      slot_steps: sum over steps of the batch bucket.
      prefilled_tokens: prompt tokens prefilled, padding not counted.
      visits: looks from the host.
    """

    tokens: int = 0
    steps: int = 0
    slot_steps: int = 0
    prefilled_tokens: int = 0
    visits: int = 0

    @property
    def occupancy(self) -> float:
        """Share of computed rows that gave a token."""
        return self.tokens / self.slot_steps if self.slot_steps else 0.0
