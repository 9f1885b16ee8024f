"""HistoSpec: chains from the prompt's last rollout, the branch with the most reward, in a window that adapts.

RhymeRL (arXiv 2508.18588), sections 5.3 and 5.4: a suffix tree per prompt over the responses of its last
rollout; behind a match of 7 tokens, down to 3, the branch with the largest sum of rewards; a window of draft
tokens per response that starts at 2, grows by 2 when all of them were accepted, up to 32, and falls back to 2
when one was rejected. Turning speculation off where it does not pay is the speculator's business
(`rljax/rollout/speculation.py`).
"""

from collections.abc import Sequence

import numpy as np

from drafters.base import DraftRequest, Drafts, Outcome, Queries, Sampled
from drafters.history import RolloutHistory
from drafters.suffix import insert_past
from drafters.suffix_automaton import SuffixForest

_LEAST_WEIGHT = 1e-3  # a response without reward is still better than no draft


class HistoSpec:
    """See the module's docstring.

    Args:
      history: of the last rollout of each prompt.
      min_match, max_match: shortest and longest suffix that is matched.
      first_window, window_step, max_window: of draft tokens.
    """

    def __init__(
        self,
        history: RolloutHistory,
        min_match: int = 3,
        max_match: int = 7,
        first_window: int = 2,
        window_step: int = 2,
        max_window: int = 32,
    ) -> None:
        if not 1 <= first_window <= max_window:
            raise ValueError(f"first_window: {first_window}, expected from 1 to max_window {max_window}")
        self.history = history
        self._min_match, self._max_match = min_match, max_match
        self._first_window, self._window_step, self._max_window = first_window, window_step, max_window
        self._forest = SuffixForest(max_match)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._forest = SuffixForest(self._max_match)
        roots: dict[tuple[int, ...], int] = {}
        for request in requests:
            if request.prompt_ids in roots:
                continue
            root = roots[request.prompt_ids] = self._forest.add_root()
            for past in self.history.recall(request.prompt_ids):
                weights = past.rewards - min(0.0, float(past.rewards.min())) + _LEAST_WEIGHT
                insert_past(self._forest, root, past, weights.astype(np.float32))
        self._sequences = self._forest.track(
            np.asarray([roots[request.prompt_ids] for request in requests], np.int32)
        )
        self._windows = np.full(len(requests), self._first_window, np.int32)

    def propose(self, queries: Queries) -> Drafts:
        proposals = self._forest.propose(
            self._sequences[queries.requests],
            np.minimum(queries.budgets, self._windows[queries.requests]),
            queries.nodes,
            min_match=self._min_match,
            max_match=self._max_match,
            rank="weight",
            chain_only=True,
        )
        return Drafts(proposals.tokens, proposals.parents, proposals.log_probability, proposals.counts)

    def observe(self, sampled: Sampled) -> None:
        self._forest.advance(self._sequences[sampled.requests], sampled.tokens, sampled.counts)
        windows = self._windows[sampled.requests]
        larger = np.minimum(windows + self._window_step, self._max_window)
        after = np.where(sampled.accepted == sampled.drafted, larger, self._first_window)
        self._windows[sampled.requests] = np.where(sampled.drafted > 0, after, windows)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self.history.record(outcomes)

    def state(self) -> dict[str, np.ndarray]:
        return self.history.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self.history.load_state(state)

    def metrics(self) -> dict[str, float]:
        return {"history_bytes": self.history.nbytes, "history_tokens": self.history.num_tokens}
