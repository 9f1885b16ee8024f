"""Whether two ways to decode gave the same responses; and drafting at every turn, so that there is much to
compare: passes of all sizes, and all drafters, whatever is predicted to pay.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from drafters.base import Drafter, Drafts, Queries
from rljax.engine.buckets import Buckets
from rljax.requests import Completion
from rljax.speculation.managers.expected import ExpectedManager
from rljax.speculation.pass_choice import Candidates
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator

_ALWAYS = 1e9  # predicted tokens per second above any other prediction


def check_equal(expected: Sequence[Completion], found: Sequence[Completion]) -> None:
    """Raises an AssertionError for a token or a logprob that differs."""
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@dataclasses.dataclass
class Count:
    """Numbers of compared tokens and of differences.

    Attributes:
      tokens: number of compared tokens, up to the first difference of each response.
      drafted, accepted: numbers of verified and of accepted draft tokens.
      flips: for each response that differs, its step, request and position, the two tokens, and the largest
        difference of logprobs over the 16 tokens before: 0 shows an error of verification, a larger one that
        a near-tie was decided differently.
      logprobs: number of equal tokens whose logprobs differ in their bits.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    flips: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    logprobs: int = 0

    def compare(self, plain: Completion, drafted: Completion, where: Mapping[str, int]) -> None:
        """Adds one response."""
        length = min(len(plain.response_ids), len(drafted.response_ids))
        different = np.flatnonzero(plain.response_ids[:length] != drafted.response_ids[:length])
        same = int(different[0]) if len(different) else length
        drift = np.abs(plain.logprobs[:same] - drafted.logprobs[:same])
        self.tokens += same
        self.logprobs += int((drift > 0).sum())
        if len(different) or len(plain.response_ids) != len(drafted.response_ids):
            self.tokens += 1
            before = drift[-16:].max(initial=0.0)
            pair = [
                int(one.response_ids[same]) if same < len(one.response_ids) else None
                for one in (plain, drafted)
            ]
            self.flips.append({**where, "position": same, "tokens": pair, "drift_before": float(before)})


class Knowing(Drafter):
    """Proposes the recorded responses, with mistakes where a request's `right`, bool [tokens], is False."""

    def __init__(self, right: Sequence[np.ndarray], completions: Sequence[Completion]) -> None:
        self._right, self._completions = right, completions

    def begin(self, requests: Sequence[Any]) -> None:
        self._prompts = [len(request.prompt_ids) for request in requests]

    def observe(self, sampled: Any) -> None:
        """Does nothing: the responses are known."""

    def propose(self, queries: Queries) -> Drafts:
        shape = (len(queries.requests), queries.nodes)
        tokens, counts = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        for row, request in enumerate(queries.requests):
            first = queries.positions[row] - self._prompts[request]
            known = self._completions[request].response_ids[first:][: queries.budgets[row]]
            right = self._right[request][first:][: len(known)]
            counts[row] = len(known)
            tokens[row, : len(known)] = np.where(right, known, known ^ 1)  # another token of the vocabulary
        parents = np.broadcast_to(np.arange(-1, shape[1] - 1, dtype=np.int32), shape)
        return Drafts(tokens, parents, np.zeros(shape, np.float32), counts)


class EveryPass:
    """Chooses passes of all sizes in turn, with occasional plain steps."""

    def __init__(self) -> None:
        self.turns = itertools.count()
        self.make = functools.partial(ExpectedManager, choose_rows=self)  # of a `StrategyChoice`

    def __call__(
        self, candidates: Candidates, buckets: Buckets, times: PassTimes, batch: int, length: int
    ) -> int:
        sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)]
        return [*sizes, 0][next(self.turns) % (len(sizes) + 1)]


def take_turns(speculator: Speculator, every_pass: EveryPass, alone: bool) -> None:
    """Makes a speculator ask all drafters whatever their prediction, in turn or together, for chains of all
    lengths.
    """
    turns, number_of = itertools.count(), len(speculator.proposers)
    for number, proposer in enumerate(speculator.proposers):
        if proposer.only_chains:
            most = speculator.engine.buckets.max_drafts
            proposer.choose_length = lambda *_, most=most: (1 + next(every_pass.turns) % most, _ALWAYS)
        rate = proposer.expected_rate

        def asked(*of: Any, number: int = number, rate: Callable[..., float] = rate) -> float:
            rate(*of)  # chooses the strategy
            return 0.0 if alone and next(turns) // number_of % number_of != number else _ALWAYS

        proposer.expected_rate = asked
