"""Plain decoding, in the place of a `Speculator`: nothing drafts, so nothing has to be told."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from drafters.base import Drafter
from drafters.training import Training
from rljax.engine.background import CompilerThread
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, Request
from rljax.response_lengths import ResponseLengths
from rljax.speculation.idle_requests import IdleRequests
from rljax.speculation.pass_record import DecisionLog
from rljax.speculation.warm_up import has_spare_cores


class NoDrafts:
    """Has the attributes and methods of `Speculator`, for whoever decodes with drafts or without.

    Attributes:
      lengths: lengths of the responses so far, by prompt.
      keeps_lengths: whether `state` has them.
    """

    idle = IdleRequests()
    compiling = 0
    keeps_lengths = False

    def __init__(self) -> None:
        self.drafters: Mapping[str, Drafter] = {}
        self.training: Mapping[str, Training] = {}
        self.lengths, self.decisions = ResponseLengths(), DecisionLog()
        self._state_of_others: dict[str, np.ndarray] = {}  # in checkpoints, for runs with drafters

    def learn_lengths(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Learns how long the responses of a rollout are."""
        for request, completion in zip(requests, completions, strict=True):
            self.lengths.learn(request.prompt_ids, len(completion.response_ids))

    def _ignore(self, *_: Any) -> None:
        """Does nothing: there is no drafter."""

    prefer = learn = read = freeze = load_weights = warm_up = close = __exit__ = _ignore

    def __enter__(self) -> Self:
        return self

    def warm_up_in_background(
        self,
        params: Params,
        slots: int,
        prompt_length: int = 1,
        widens: bool = False,
        first_prompts: Sequence[int] = (),
        longest: int | None = None,
        thread: CompilerThread | None = None,
    ) -> None:
        """Adds nothing to what a thread compiles, which begins at once where cores are to spare."""
        if thread is not None and has_spare_cores():
            thread.start()

    def weights(self) -> dict[str, np.ndarray]:
        """Returns nothing: no drafter is trained."""
        return {}

    def metrics(self, statistics: DecodeStatistics) -> dict[str, float]:
        """Returns nothing."""
        return {}

    def state(self, to_share: bool = False) -> dict[str, np.ndarray]:
        """Checkpoint content: what drafters of earlier runs have left, for later ones."""
        return {} if to_share else self._state_of_others

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Keeps the state of drafters that this run does not have."""
        self._state_of_others = dict(state)
