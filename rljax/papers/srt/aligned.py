"""Drafts that were sampled ahead of time with the request's own noise.

While slots were idle in the last step's tail, the engine decoded this step's requests with this step's noise
and last step's weights (`run_ahead.py`). An update changes the policy little, so most of
these tokens will be sampled again. They are proposed as a chain for as long as the request agrees with them;
another drafter, the fallback, proposes everywhere else.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from drafters.base import Drafter, DraftRequest, Drafts, Outcome, Queries, Sampled
from drafters.validation import usable_metrics

_AGREEMENT = 0.97  # probability that a token is sampled again; the speculator's calibration corrects it


class AlignedDrafter(Drafter):
    """Proposes the tokens that were sampled ahead, and the drafts of `fallback` where there are none or the
    request has left them.

    Attributes:
      tokens_ahead: tokens that were sampled ahead for the requests.
      tokens_used: those that were sampled again, by verifying passes or plain steps.
      tokens_offered: tokens that were sampled ahead for responses that have ended, in all rollouts.
      tokens_accepted: those that verifying passes accepted, and so the ones that saved time, in all rollouts.
    """

    def __init__(self, fallback: Drafter) -> None:
        self._fallback = fallback
        self.state_name, self.training = fallback.state_name, fallback.training
        self.tokens_ahead = self.tokens_used = self.tokens_offered = self.tokens_accepted = 0

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._fallback.begin(requests)
        ahead = [np.zeros(0, np.int32) if request.ahead is None else request.ahead for request in requests]
        self._lengths = np.asarray([len(tokens) for tokens in ahead], np.int64)
        self._ahead = np.full((len(ahead), int(self._lengths.max(initial=0))), -1, np.int32)
        for row, tokens in enumerate(ahead):
            self._ahead[row, : len(tokens)] = tokens
        self._sampled = np.zeros(len(ahead), np.int64)  # tokens of each request so far
        self._agrees = self._lengths > 0
        self._drafted_ahead = np.zeros(len(ahead), bool)  # the last drafts were not the fallback's
        self.tokens_ahead = int(self._lengths.sum())
        self.tokens_used = 0

    def propose(self, queries: Queries) -> Drafts:
        drafts = self._fallback.propose(queries)
        begins = self._sampled[queries.requests]
        left = np.minimum(self._lengths[queries.requests] - begins, queries.budgets)
        left = np.where(self._agrees[queries.requests], np.maximum(left, 0), 0)
        self._drafted_ahead[queries.requests] = left > 0
        rows = np.flatnonzero(left)
        if not len(rows):
            return drafts
        order = np.arange(queries.nodes)
        columns = np.minimum(begins[rows, None] + order, self._ahead.shape[1] - 1)
        chain = np.where(order < left[rows, None], self._ahead[queries.requests[rows, None], columns], 0)
        tokens, parents = drafts.tokens.copy(), drafts.parents.copy()
        scores, counts = drafts.log_probability.copy(), drafts.counts.copy()
        tokens[rows], parents[rows], counts[rows] = chain, order - 1, left[rows]
        scores[rows] = (order + 1) * np.log(_AGREEMENT)
        return Drafts(tokens, parents, scores, counts)

    def observe(self, sampled: Sampled) -> None:
        ahead = self._drafted_ahead[sampled.requests]  # nothing that the fallback could learn from
        self.tokens_accepted += int(sampled.accepted[ahead].sum())
        self.tokens_offered += int(self._lengths[sampled.requests[sampled.ended]].sum())
        drafted, accepted = np.where(ahead, 0, sampled.drafted), np.where(ahead, 0, sampled.accepted)
        self._fallback.observe(dataclasses.replace(sampled, drafted=drafted, accepted=accepted))
        order = np.arange(sampled.tokens.shape[1])
        begins = self._sampled[sampled.requests]
        if self._ahead.shape[1]:
            positions = begins[:, None] + order
            columns = np.minimum(positions, self._ahead.shape[1] - 1)
            same = self._ahead[sampled.requests[:, None], columns] == sampled.tokens
            same &= positions < self._lengths[sampled.requests, None]
            valid = order < sampled.counts[:, None]
            agreeing = np.cumprod(same | ~valid, axis=1).astype(bool) & valid
            self.tokens_used += int(agreeing[self._agrees[sampled.requests]].sum())
            self._agrees[sampled.requests] &= (same | ~valid).all(axis=1)
        self._sampled[sampled.requests] = begins + sampled.counts

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self._fallback.learn(outcomes)

    def state(self) -> dict[str, np.ndarray]:
        return self._fallback.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self._fallback.load_state(state)

    def metrics(self) -> dict[str, float]:
        """Returns the fallback's metrics with `ahead_tokens`, how many tokens were sampled ahead for the
        rollout's requests, and `ahead_agreed`, how many of them were sampled again.
        """
        metrics = {"ahead_tokens": self.tokens_ahead, "ahead_agreed": self.tokens_used}
        return usable_metrics(self._fallback.metrics(), metrics) | metrics
