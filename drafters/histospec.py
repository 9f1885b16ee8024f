"""HistoSpec: chains along the best rewarded branch of the prompt's last rollout, in an adaptive window.

RhymeRL (arXiv 2508.18588), sections 5.3 and 5.4: a suffix tree per prompt over the responses of its last
rollout; behind a match of 7 tokens, down to 3, the branch with the largest sum of rewards, down to its leaf;
a window of draft tokens per response that grows while they are accepted (`AimdWindows`). A node's
probability, which the paper does not need, is its share of counts. Turning speculation off where it does not
pay is left to the rollout manager (`rljax/speculation/managers/manager.py`): it compares measured times of
passes, where the paper has a profiled table by batch size.
"""

from collections.abc import Sequence

import numpy as np

from drafters.arguments import HistoSpecArguments
from drafters.base import Drafter, DraftRequest, Drafts, Outcome, Queries, Sampled
from drafters.history import HISTORY, PastRollout, RolloutHistory
from drafters.history_index import HistoryIndex
from drafters.suffix import insert_past
from drafters.suffix_automaton import SuffixForest

WIDEST = 32
"""Draft tokens of the widest window, where `max_window` does not say (section 5.4)."""
_LEAST_WEIGHT = 1e-3  # so that responses without reward are drafted where there are no others


class AimdWindows:
    """A window of draft tokens for each request of a rollout, after TCP's additive increase, multiplicative
    decrease (section 5.4).

    Args:
      requests: number of requests.
      first: the window at first and after a rejection, in draft tokens.
      step: growth after every draft that was accepted whole.
      most: the widest window.
    """

    def __init__(self, requests: int, first: int, step: int, most: int) -> None:
        self._first, self._step, self._most = first, step, most
        self._windows = np.full(requests, first, np.int32)

    def __getitem__(self, requests: np.ndarray) -> np.ndarray:
        """Returns the windows of these requests, in draft tokens, int32 [n]."""
        return self._windows[requests]

    def observe(self, requests: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Adapts the windows to verified drafts, int32 [n] each. Where `drafted` is 0, the window stays."""
        windows = self._windows[requests]
        wider = np.minimum(windows + self._step, self._most)
        after = np.where(accepted == drafted, wider, self._first)
        self._windows[requests] = np.where(drafted > 0, after, windows)


class HistoSpec(Drafter):
    """RhymeRL's drafter; see the module's docstring."""

    def __init__(self, arguments: HistoSpecArguments) -> None:
        self.history = RolloutHistory(1, arguments.max_tokens, arguments.spill_dir)
        self.state_name = HISTORY
        self.max_window = arguments.max_window
        self._arguments = arguments
        self._widest = arguments.max_window or max(WIDEST, arguments.first_window)
        # A chain is followed with its whole context: the match, and all that was drafted behind it.
        self._context = arguments.max_match + self._widest
        self._forest = SuffixForest(self._context)
        self.index = HistoryIndex(
            self.history, _insert_weighted, self._context, arguments.history_workers, arguments.indexed_tokens
        )

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._forest = SuffixForest(self._context)
        roots = self.index.plant(self._forest, (request.prompt_ids for request in requests))
        self._sequences = self._forest.track(
            np.asarray([roots[request.prompt_ids] for request in requests], np.int32)
        )
        first, step = self._arguments.first_window, self._arguments.window_step
        self._windows = AimdWindows(len(requests), first, step, self._widest)

    def propose(self, queries: Queries) -> Drafts:
        proposals = self._forest.propose(
            self._sequences[queries.requests],
            np.minimum(queries.budgets, self._windows[queries.requests]),
            queries.nodes,
            min_match=self._arguments.min_match,
            max_match=self._arguments.max_match,
            rank="weight",
        )
        return Drafts(proposals.tokens, proposals.parents, proposals.log_probability, proposals.counts)

    def observe(self, sampled: Sampled) -> None:
        self._forest.advance(self._sequences[sampled.requests], sampled.tokens, sampled.counts)
        self._windows.observe(sampled.requests, sampled.drafted, sampled.accepted)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self.history.record(outcomes)
        self.index.learn(outcome.prompt_ids for outcome in outcomes)

    def state(self) -> dict[str, np.ndarray]:
        return self.history.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self.history.load_state(state)
        self.index.load()

    def metrics(self) -> dict[str, float]:
        return self.history.metrics() | self.index.metrics()


def _insert_weighted(forest: SuffixForest, root: int, past: PastRollout) -> None:
    """Inserts responses, each with its reward above the worst negative one as its weight."""
    weights = past.rewards - min(0.0, float(past.rewards.min())) + _LEAST_WEIGHT
    insert_past(forest, root, past, weights.astype(np.float32))
