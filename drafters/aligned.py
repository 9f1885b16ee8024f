"""Drafts that were sampled ahead of time with the request's own noise.

While slots were idle in the last step's tail, the engine decoded this step's requests with this step's noise
and last step's weights (`rljax/speculation/run_ahead.py`). An update changes the policy little, so what was
sampled then is
nearly what will be sampled now: it is proposed as a chain for as long as it agrees, and what another drafter
says where it does not, or where there is none.
"""

from collections.abc import Sequence

import numpy as np

from drafters.base import DraftRequest, Drafts, HostDrafter, Outcome, Queries, Sampled, usable_metrics

_AGREEMENT = 0.97  # of a token with the one sampled ahead; corrected by the speculator's calibration


class AlignedDrafter:
    """Follows what was sampled ahead, and `fallback` elsewhere."""

    def __init__(self, fallback: HostDrafter) -> None:
        self._fallback = fallback
        if hasattr(fallback, "state_name"):
            self.state_name = fallback.state_name

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._fallback.begin(requests)
        ahead = [np.zeros(0, np.int32) if request.ahead is None else request.ahead for request in requests]
        self._lengths = np.asarray([len(tokens) for tokens in ahead], np.int64)
        self._ahead = np.full((len(ahead), int(self._lengths.max(initial=0))), -1, np.int32)
        for row, tokens in enumerate(ahead):
            self._ahead[row, : len(tokens)] = tokens
        self._sampled = np.zeros(len(ahead), np.int64)  # tokens of each request so far
        self._agrees = self._lengths > 0
        self.tokens_ahead = int(self._lengths.sum())
        self.tokens_used = 0

    def propose(self, queries: Queries) -> Drafts:
        drafts = self._fallback.propose(queries)
        begins = self._sampled[queries.requests]
        left = np.minimum(self._lengths[queries.requests] - begins, queries.budgets)
        left = np.where(self._agrees[queries.requests], np.maximum(left, 0), 0)
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
        self._fallback.observe(sampled)
        width = sampled.tokens.shape[1]
        order = np.arange(width)
        begins = self._sampled[sampled.requests]
        if self._ahead.shape[1]:
            positions = begins[:, None] + order
            columns = np.minimum(positions, self._ahead.shape[1] - 1)
            same = self._ahead[sampled.requests[:, None], columns] == sampled.tokens
            same &= positions < self._lengths[sampled.requests, None]
            own = order < sampled.counts[:, None]
            agreeing = np.cumprod(same | ~own, axis=1).astype(bool) & own
            self.tokens_used += int(agreeing[self._agrees[sampled.requests]].sum())
            self._agrees[sampled.requests] &= (same | ~own).all(axis=1)
        self._sampled[sampled.requests] = begins + sampled.counts

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self._fallback.learn(outcomes)

    def state(self) -> dict[str, np.ndarray]:
        return self._fallback.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self._fallback.load_state(state)

    def metrics(self) -> dict[str, float]:
        """`ahead_tokens` were sampled ahead for the rollout's requests, `ahead_agreed` of them came again."""
        own = {"ahead_tokens": self.tokens_ahead, "ahead_agreed": self.tokens_used}
        return usable_metrics(self._fallback.metrics(), own) | own
