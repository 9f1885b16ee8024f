"""Drafts from suffixes that were seen before: three scopes of memory, one automaton.

- `srt`: all substrings of what was answered to the same prompt, in earlier rollouts and, as they grow, by the
  group's other samples (SRT, section 3: "Speculative Rollout with Tree-Structured Cache").
- `suffix_decoding`: the same over all prompts at once (SuffixDecoding, Oliaro et al., 2025), for comparison.
- `prompt_lookup`: the request's own prompt and response only (Saxena, "Prompt Lookup Decoding", 2023).

TLT's model-free drafter (section 5.3) retrieves n-grams from the rollouts of the same prompt: here that is
`srt`, without a limit on n.

Candidates behind the longest known suffix are ranked by their share of what followed it. A drafter with a
history also drafts behind a substitution, where the request sampled something else than history has at the
same place. The weights of the two sources are learned while requests run (`drafters/context_loops.py`).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from drafters.arguments import PromptLookupArguments, SrtArguments, SuffixArguments, SuffixDecodingArguments
from drafters.arrays import padded
from drafters.base import Drafter, DraftRequest, Drafts, Outcome, Queries, Sampled
from drafters.history import HISTORY, PastRollout, RolloutHistory
from drafters.history_index import HistoryIndex
from drafters.suffix_automaton import SuffixForest, new_mixture

Scope = Literal["request", "prompt", "all"]

_REMEMBERED = 0.9  # share of the mixture's counts that is carried over to the next rollout


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


def srt(arguments: SrtArguments) -> "SuffixDrafter":
    """Drafts from the responses to the same prompt, in earlier rollouts and in this one."""
    history = RolloutHistory(arguments.rollouts, arguments.max_tokens, arguments.spill_dir)
    workers, tokens = arguments.history_workers, arguments.indexed_tokens
    index = HistoryIndex(history, insert_past, arguments.max_match, workers, tokens)
    return SuffixDrafter("prompt", arguments, history, index)


def suffix_decoding(arguments: SuffixDecodingArguments) -> "SuffixDrafter":
    """Drafts from the responses to all prompts."""
    return SuffixDrafter("all", arguments, RolloutHistory(arguments.rollouts, arguments.max_tokens))


def prompt_lookup(arguments: PromptLookupArguments) -> "SuffixDrafter":
    """Drafts from the request's own prompt and response."""
    return SuffixDrafter("request", SuffixArguments(substitutions=False, **dict(arguments)))


class SuffixDrafter(Drafter):
    """Proposes the tokens that followed the longest known suffix of each context, and of each edited context.

    Args:
      scope: the tokens that are searched: the request's own, those of its prompt, or those of all prompts.
      arguments: see `SuffixArguments`.
      history: keeps earlier rollouts; None for a drafter without a history.
      index: the automata of the history, for the scope "prompt".
    """

    def __init__(
        self,
        scope: Scope,
        arguments: SuffixArguments,
        history: RolloutHistory | None = None,
        index: HistoryIndex | None = None,
    ) -> None:
        self.history, self.index = history, index
        if history is not None:
            self.state_name = HISTORY
        self._scope = scope
        self._live = arguments.live
        self._max_match = arguments.max_match
        self._options = {
            name: getattr(arguments, name) for name in ("min_match", "budget_per_match", "novelty")
        }
        self._mixture = new_mixture(arguments.novelty) if arguments.substitutions else None
        self._forest = SuffixForest(self._max_match)
        self._learned = True  # whether `learn` has received the last rollout
        # The root of scope "all", which is kept after a rollout that was learned.
        self._shared_root: int | None = None

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        if self._mixture is not None:  # old counts weigh less: the policy has moved
            prior = new_mixture(self._options["novelty"])
            self._mixture[:] = prior + _REMEMBERED * (self._mixture - prior)
        roots = self._plant(requests)
        self._insert_ahead(requests, roots)
        self._sequences = (self._forest.start if self._live else self._forest.track)(roots)
        if self._scope == "request":
            self._forest.extend(self._sequences, *padded([request.prompt_ids for request in requests]))

    def _plant(self, requests: Sequence[DraftRequest]) -> np.ndarray:
        """Builds the automaton of every request from the history; returns root ids, int32 [n]."""
        if self._scope == "all":
            if self._shared_root is None or not self._learned:  # evaluations are not remembered
                self._forest = SuffixForest(self._max_match)
                self._shared_root = self._forest.add_root()
                for prompt in self.history.prompts():
                    for past in self.history.recall(prompt):
                        insert_past(self._forest, self._shared_root, past)
            self._learned = False
            return np.full(len(requests), self._shared_root, np.int32)
        self._forest = SuffixForest(self._max_match)
        if self._scope == "request":
            return np.asarray([self._forest.add_root() for _ in requests], np.int32)
        roots = self.index.plant(self._forest, (request.prompt_ids for request in requests))
        return np.asarray([roots[request.prompt_ids] for request in requests], np.int32)

    def _insert_ahead(self, requests: Sequence[DraftRequest], roots: np.ndarray) -> None:
        """Inserts responses that were sampled ahead: drafts for the other samples of their groups, and for
        the same requests once they differ.
        """
        known = [i for i, request in enumerate(requests) if request.ahead is not None]
        if known and self._scope != "request":
            sequences = self._forest.start(roots[known])
            self._forest.extend(sequences, *padded([requests[i].ahead for i in known]))

    def propose(self, queries: Queries) -> Drafts:
        proposals = self._forest.propose(
            self._sequences[queries.requests],
            queries.budgets,
            queries.nodes,
            mixture=self._mixture,
            **self._options,
        )
        return Drafts(proposals.tokens, proposals.parents, proposals.log_probability, proposals.counts)

    def observe(self, sampled: Sampled) -> None:
        sequences = self._sequences[sampled.requests]
        if self._mixture is not None:
            self._forest.follow(
                sequences, sampled.tokens, sampled.counts, self._mixture, self._options["min_match"]
            )
        append = self._forest.extend if self._live else self._forest.advance
        append(sequences, sampled.tokens, sampled.counts)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        if self.history is None:
            return
        self.history.record(outcomes)
        self._learned = True
        if self.index is not None:
            self.index.learn(outcome.prompt_ids for outcome in outcomes)
        if self._scope == "all" and (not self._live or self._forest.num_tokens > 2 * self.history.num_tokens):
            # The next rollout builds it from the history.
            self._forest, self._shared_root = SuffixForest(self._max_match), None

    def state(self) -> dict[str, np.ndarray]:
        state = {} if self.history is None else self.history.state()
        return state if self._mixture is None else {**state, "mixture": self._mixture.copy()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        if self.history is not None:
            self.history.load_state(state)
            self._shared_root = None
        if self.index is not None:
            self.index.load()
        learned = state.get("mixture")
        if self._mixture is not None and learned is not None and learned.shape == self._mixture.shape:
            self._mixture[:] = learned

    def metrics(self) -> dict[str, float]:
        metrics = {"automaton_bytes": self._forest.nbytes, "automaton_tokens": self._forest.num_tokens}
        if self.history is not None:
            metrics |= self.history.metrics()
        if self.index is not None:
            metrics |= self.index.metrics()
        return metrics
