"""The automata of past rollouts, by prompt: built when a rollout begins, or while the engine decodes.

RhymeRL (arXiv 2508.18588), sections 4.2 and 5.3: a prompt is not sampled again for many steps, so history
workers index its responses once these have ended, on cores that are idle, and hand the index over when the
prompt returns. Here the workers are threads of the lowest priority. Every automaton is built by itself, then
copied into the forest of the rollout (`SuffixForest.adopt`): drafts do not depend on when it was built.

Automata take some forty times the memory of their tokens, so those of `most_tokens` are built ahead: of the
prompts that were learned first, which return first. The next ones follow as automata are handed over.
"""

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from drafters.history import PastRollout, Prompt, RolloutHistory
from drafters.suffix_automaton import SuffixForest

Insert = Callable[[SuffixForest, int, PastRollout], None]
"""Inserts a past rollout into the automaton with this root."""

_LOWEST_PRIORITY = 19


class _Building(NamedTuple):
    """An automaton that a thread builds, and its tokens."""

    forest: Future[SuffixForest]
    tokens: int


class HistoryIndex:
    """Automata of the prompts of a history. All of its methods are called from one thread.

    Args:
      history: the past rollouts.
      insert: see `Insert`.
      max_match: of the forests.
      workers: threads that build ahead; 0 builds every automaton when its rollout begins.
      most_tokens: tokens in automata that are built ahead.
    """

    def __init__(
        self, history: RolloutHistory, insert: Insert, max_match: int, workers: int, most_tokens: int
    ) -> None:
        self._history, self._insert, self._max_match = history, insert, max_match
        self._most_tokens, self._tokens = most_tokens, 0  # at most, and now, in `_building`
        self._threads = ThreadPoolExecutor(workers, "history", _yield_cores) if workers else None
        self._waiting: collections.OrderedDict[Prompt, list[PastRollout]] = collections.OrderedDict()
        self._building: collections.OrderedDict[Prompt, _Building] = collections.OrderedDict()
        self._metrics: dict[str, float] = {}

    def learn(self, prompts: Iterable[Prompt]) -> None:
        """The past rollouts of these prompts have changed. The automata are built in this order."""
        if self._threads is None:
            return
        for prompt in dict.fromkeys(prompts):
            self._take(prompt)
            if prompt in self._history:
                self._waiting[prompt] = self._history.recall(prompt)
        self._build()

    def load(self) -> None:
        """The history is another one. The prompt that was used longest ago comes first."""
        for prompt in [*self._waiting, *self._building]:
            self._take(prompt)
        self.learn(self._history.prompts())

    def plant(self, forest: SuffixForest, prompts: Iterable[Prompt]) -> dict[Prompt, int]:
        """Puts the automata of a rollout's prompts into its forest, and returns their roots.

        One that is being built is waited for; one that is not begun is built here.
        """
        start, roots, remembered, ahead = time.perf_counter(), {}, 0, 0
        for prompt in dict.fromkeys(prompts):
            rollouts, built = self._history.recall(prompt), self._take(prompt)
            remembered += bool(rollouts)
            if rollouts and built is not None:
                roots[prompt] = forest.adopt(built.result())
                ahead += 1
            else:
                roots[prompt] = forest.adopt(self._grown(rollouts))
        self._metrics = {
            "history_prompts": remembered,
            "history_indexed_ahead": ahead,
            "history_index_seconds": time.perf_counter() - start,
        }
        self._build()
        return roots

    def wait(self) -> None:
        """Waits for the automata that threads are building."""
        for building in self._building.values():
            building.forest.result()

    def metrics(self) -> dict[str, float]:
        """Returns, where threads build ahead, of the last rollout: prompts with a history, those of them
        whose automata a thread had begun, and the seconds of `plant`.
        """
        return {} if self._threads is None else self._metrics

    def _grown(self, rollouts: list[PastRollout]) -> SuffixForest:
        forest = SuffixForest(self._max_match)
        root = forest.add_root()
        for past in rollouts:
            self._insert(forest, root, past)
        return forest

    def _take(self, prompt: Prompt) -> Future[SuffixForest] | None:
        """Forgets the automaton of a prompt, and returns it unless no thread has begun it."""
        self._waiting.pop(prompt, None)
        building = self._building.pop(prompt, None)
        if building is None:
            return None
        self._tokens -= building.tokens
        return None if building.forest.cancel() else building.forest

    def _build(self) -> None:
        """Lets the threads build what there is room for."""
        for prompt in [prompt for prompt in self._building if prompt not in self._history]:
            self._take(prompt)
        while self._waiting and self._tokens < self._most_tokens:
            prompt, rollouts = self._waiting.popitem(last=False)
            if prompt in self._history:
                tokens = sum(len(past.tokens) for past in rollouts)
                self._building[prompt] = _Building(self._threads.submit(self._grown, rollouts), tokens)
                self._tokens += tokens


def _yield_cores() -> None:
    """Lets this thread run where no other would. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
