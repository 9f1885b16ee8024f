"""Drafts from suffixes that were seen before: three scopes of memory, one automaton.

- `srt`: all substrings of what was answered to the same prompt, in earlier rollouts and, as they grow, by the
  group's other samples (SRT, section 3: "Speculative Rollout with Tree-Structured Cache").
- `suffix_decoding`: the same over all prompts at once (SuffixDecoding, Oliaro et al., 2025), for comparison.
- `prompt_lookup`: the request's own prompt and response only (the model-free drafter of TLT, section 5.3).

Candidates behind the longest known suffix are ranked by their share of what followed it, and, where the
noise is
known, by how likely they win under it: `argmax(log p + G)` is what will be sampled.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from drafters.base import DraftRequest, Drafts, Outcome, Queries, Sampled
from drafters.history import PastRollout, RolloutHistory
from drafters.suffix_automaton import SuffixForest

Scope = Literal["request", "prompt", "all"]


def insert_past(
    forest: SuffixForest, root: int, past: PastRollout, weights: np.ndarray | None = None
) -> None:
    """Inserts the responses of a past rollout into the automaton `root`."""
    count = len(past.lengths)
    width = int(past.lengths.max(initial=0))
    tokens = np.zeros((count, width), np.int32)
    tokens[np.arange(width) < past.lengths[:, None]] = past.tokens
    sequences = forest.start(np.full(count, root, np.int32), weights)
    forest.extend(sequences, tokens, past.lengths)


class SuffixDrafter:
    """Proposes what followed the longest known suffix of each context.

    Args:
      scope: whose tokens are searched: the request's own, all of its prompt's, or everybody's.
      history: where earlier rollouts are kept; None for none.
      live: also learn from rollouts while they run.
      min_match: shortest suffix to draft from.
      max_match: longest suffix that is told apart.
      budget_per_match: draft nodes per token of match, SuffixDecoding's alpha: SRT's B(q).
      novelty: pseudo-count of tokens that never followed a context.
      noise_ranking: rank by what wins under the noise.
      noise_temperature: how far the counts are from the policy; see `SuffixForest.propose`.
    """

    def __init__(
        self,
        scope: Scope,
        history: RolloutHistory | None = None,
        live: bool = True,
        min_match: int = 1,
        max_match: int = 48,
        budget_per_match: float = 4.0,
        novelty: float = 0.5,
        noise_ranking: bool = False,
        noise_temperature: float = 1.0,
    ) -> None:
        if not (noise_temperature > 0 and novelty >= 0 and budget_per_match >= 0):
            raise ValueError(
                "novelty and budget_per_match must be at least 0, noise_temperature above 0; got"
                f" {novelty}, {budget_per_match}, {noise_temperature}"
            )
        self.history = history
        self._scope = scope
        self._live = live
        self._max_match = max_match
        self._options = {
            "min_match": min_match,
            "budget_per_match": budget_per_match,
            "novelty": novelty,
            "noise_temperature": noise_temperature,
        }
        self._noise_ranking = noise_ranking
        self._forest = SuffixForest(max_match)
        self._learned = True  # whether the last rollout was
        self._everybody: int | None = (
            None  # the root of scope "all", which outlives a rollout if that is learned
        )

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        roots = self._plant(requests)
        self._sequences = (self._forest.start if self._live else self._forest.track)(roots)
        self._keys = None
        if self._noise_ranking and requests and requests[0].noise_key is not None:
            self._keys = np.stack([request.noise_key for request in requests])
        if self._scope == "request":
            lengths = np.asarray([len(request.prompt_ids) for request in requests], np.int32)
            prompts = np.zeros((len(requests), lengths.max(initial=0)), np.int32)
            for row, request in enumerate(requests):
                prompts[row, : lengths[row]] = request.prompt_ids
            self._forest.extend(self._sequences, prompts, lengths)

    def _plant(self, requests: Sequence[DraftRequest]) -> np.ndarray:
        """The automaton of every request, holding what is known: root ids, int32 [n]."""
        if self._scope == "all":
            if self._everybody is None or not self._learned:  # an evaluation leaves nothing behind
                self._forest = SuffixForest(self._max_match)
                self._everybody = self._forest.add_root()
                for prompt in self.history.prompts():
                    for past in self.history.recall(prompt):
                        insert_past(self._forest, self._everybody, past)
            self._learned = False
            return np.full(len(requests), self._everybody, np.int32)
        self._forest = SuffixForest(self._max_match)
        if self._scope == "request":
            return np.asarray([self._forest.add_root() for _ in requests], np.int32)
        roots: dict[tuple[int, ...], int] = {}
        for request in requests:
            if request.prompt_ids not in roots:
                root = roots[request.prompt_ids] = self._forest.add_root()
                for past in self.history.recall(request.prompt_ids):
                    insert_past(self._forest, root, past)
        return np.asarray([roots[request.prompt_ids] for request in requests], np.int32)

    def propose(self, queries: Queries) -> Drafts:
        noise = {}
        if self._keys is not None:
            noise = {"noise_keys": self._keys[queries.requests], "positions": queries.positions}
        proposals = self._forest.propose(
            self._sequences[queries.requests], queries.budgets, queries.nodes, **self._options, **noise
        )
        return Drafts(proposals.tokens, proposals.parents, proposals.log_probability, proposals.counts)

    def observe(self, sampled: Sampled) -> None:
        follow = self._forest.extend if self._live else self._forest.advance
        follow(self._sequences[sampled.requests], sampled.tokens, sampled.counts)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        if self.history is None:
            return
        self.history.record(outcomes)
        self._learned = True
        if self._scope == "all" and (not self._live or self._forest.num_tokens > 2 * self.history.num_tokens):
            self._forest, self._everybody = (
                SuffixForest(self._max_match),
                None,
            )  # planted anew from the history

    def state(self) -> dict[str, np.ndarray]:
        return {} if self.history is None else self.history.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        if self.history is not None:
            self.history.load_state(state)
            self._everybody = None

    def metrics(self) -> dict[str, float]:
        metrics = {"automaton_bytes": self._forest.nbytes, "automaton_tokens": self._forest.num_tokens}
        if self.history is not None:
            metrics |= {"history_bytes": self.history.nbytes, "history_tokens": self.history.num_tokens}
        return metrics
