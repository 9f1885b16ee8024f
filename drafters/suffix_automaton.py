"""Suffix automata of many token sequences: every substring that was seen, how often, and what followed it.

The store behind the history drafters: the tree-structured cache of SRT (section 3 of "Speculative Rollout
with Tree-Structured Cache"), the reward-weighted history of HistoSpec (RhymeRL, section 5.3) and the global
cache of SuffixDecoding. All of them ask for the longest suffix of a context that was seen before and grow
likely continuations from it. An automaton answers that exactly, grows a token at a time while the rollouts
that feed it are still running, and takes space linear in the tokens.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from drafters import context_loops, draft_loops
from drafters import suffix_loops as loops
from drafters.arrays import GROWTH, aligned_rows, cast, check_ids, vector, with_room

_UNLIMITED = np.iinfo(np.int32).max
_INSERTED, _FOLLOWED = 0, 1
_NO_MIXTURE = np.empty((0, context_loops.SOURCES))


def new_mixture(novelty: float) -> np.ndarray:
    """Returns the prior of the mixture that `SuffixForest.follow` learns: float64 [situations, sources].

    Args:
      novelty: pseudo-count of tokens that no source knows; that of every source is 1.
    """
    mixture = np.ones((context_loops.SITUATIONS, context_loops.SOURCES))
    mixture[:, context_loops.NOVEL] = novelty
    return mixture


class Proposals(NamedTuple):
    """Candidate trees of a batch; the first counts[i] nodes of row i are valid.

    Attributes:
      tokens: int32 [B, N]; 0 where invalid.
      parents: int32 [B, N]; -1 = directly behind the context, and where invalid. Parents precede children.
      log_probability: float32 [B, N], log probability of the path from the context to the node; not
        increasing along a row (nodes come in the order of best-first growth); -inf where invalid.
      counts: int32 [B], nodes of each tree.
      match_lengths: int32 [B], length of the matched suffix; the start of a sequence counts as a token.
    """

    tokens: np.ndarray
    parents: np.ndarray
    log_probability: np.ndarray
    counts: np.ndarray
    match_lengths: np.ndarray


class SuffixForest:
    """Many suffix automata in one arena: one a prompt, or one for all prompts.

    A *root* is an automaton of its own: nothing is shared between roots. A *sequence* is a context of one
    root: one begun with `start` is inserted token by token with `extend`; one begun with `track` only reads,
    and follows with `advance` the longest suffix of its tokens that the automaton contains. `propose` takes
    both. Every sequence begins with a marker that counts as a token of context: before its first token, what
    the others of its root began with is proposed.

    Threads: all work happens in compiled loops over the batch that release the GIL. `propose` only reads, so
    any number of threads may call it at once; `start`, `extend`, `track`, `advance`, `add_root` and `adopt`
    must have the forest to themselves. To insert in parallel, give every thread a forest, with prompts of its
    own.

    Attributes:
      max_match: contexts are cut to this many tokens. Counts of longer strings are not kept, which makes
        insertion cheaper where the same long stretches are repeated. None: no limit.
      num_tokens: tokens inserted so far.
    """

    def __init__(self, max_match: int | None = None) -> None:
        if max_match is not None and max_match < 1:
            raise ValueError(f"max_match: {max_match}, expected at least 1 or None")
        self.max_match = max_match
        self._limit = _UNLIMITED - 1 if max_match is None else max_match
        self._header = np.zeros(3, np.int64)
        self._set_nodes(aligned_rows(16, loops.STATE_WIDTH))
        self._table = self._empty_table(16)
        self._roots = np.empty(4, np.int32)
        self._num_roots = 0
        # By sequence: its state, the matched length there, its weight, kind and edited context.
        self._states = np.empty(16, np.int32)
        self._lengths = np.empty(16, np.int32)
        self._weights = np.empty(16, np.float32)
        self._kinds = np.empty(16, np.int8)
        self._edits = np.empty((16, context_loops.PLACE_WIDTH - context_loops.EDITED), np.int32)
        self._num_sequences = 0

    @property
    def num_tokens(self) -> int:
        return int(self._header[loops.TOKENS])

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        arrays = (self._nodes, self._table, self._roots, *self._sequence_arrays())
        return sum(array.nbytes for array in arrays)

    @property
    def used_bytes(self) -> int:
        """Bytes that states, edges and sequences fill; the rest of `nbytes` is room to grow."""
        states, edges = int(self._header[loops.STATES]), int(self._header[loops.EDGES])
        per_sequence = sum(array[:1].nbytes for array in self._sequence_arrays())
        return (
            states * loops.STATE_WIDTH * 4
            + edges * loops.EDGE_WIDTH * 4
            + self._num_roots * self._roots.itemsize
            + self._num_sequences * per_sequence
        )

    @property
    def _arena(self) -> tuple:
        return self._nodes, self._node_weights, self._table, self._header, self._limit

    @property
    def _contexts(self) -> tuple:
        return self._states, self._lengths, self._weights, self._edits

    # --- sequences ---------------------------------------------------------------------------------------

    def add_root(self) -> int:
        """Adds an empty automaton and returns its id."""
        if self._header[loops.STATES] + 2 > len(self._nodes):
            self._grow_nodes()
        return self._new_root(loops.add_root(self._nodes, self._node_weights, self._header))

    def adopt(self, other: "SuffixForest") -> int:
        """Adds a copy of another forest's one automaton, and returns its root; sequences are not copied.

        It takes the time of copying the states and of placing the edges, not that of inserting the tokens.
        """
        if other.max_match != self.max_match or other._num_roots != 1:
            raise ValueError(
                f"other: {other._num_roots} automata with max_match {other.max_match}, expected 1 with"
                f" {self.max_match}"
            )
        root = int(self._header[loops.STATES] + other._roots[0])
        states, edges = self._header[: loops.TOKENS] + other._header[: loops.TOKENS]
        if states > len(self._nodes):
            self._grow_nodes(int(states))
        if edges > loops.MAX_LOAD * len(self._table):
            self._grow_table(int(other._header[loops.EDGES]))
        loops.adopt(
            self._nodes, self._table, self._header, other._nodes, other._table, other._header
        )  # fmt: skip
        return self._new_root(root)

    def start(self, roots: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Begins sequences that will be inserted.

        Args:
          roots: int32 [B].
          weights: float32 [B], finite and not negative: an occurrence in the sequence adds it to the weight
            of a string (HistoSpec: the reward); 1 by default.

        Returns:
          Sequence ids, int32 [B].
        """
        roots = self._root_states(roots)
        weights = (
            np.ones(len(roots), np.float32)
            if weights is None
            else vector(weights, "weights", np.float32, len(roots))
        )
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("weights: expected finite numbers, none below 0")
        sequences = self._new_sequences(weights, _INSERTED)
        loops.start(self._arena, self._contexts, sequences, roots)
        return sequences

    def track(self, roots: np.ndarray) -> np.ndarray:
        """Begins sequences that are followed but not inserted: roots int32 [B] -> sequence ids, int32 [B]."""
        roots = self._root_states(roots)
        sequences = self._new_sequences(np.zeros(len(roots), np.float32), _FOLLOWED)
        self._states[sequences] = roots + 1
        self._lengths[sequences] = 1
        return sequences

    def extend(self, sequences: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Appends tokens to sequences begun with `start`, row by row.

        Args:
          sequences: ids, int32 [B].
          tokens: int32 [B, T], not negative where valid.
          counts: int32 [B], how many tokens of each row to append.
        """
        batch = self._batch(sequences, tokens, counts, _INSERTED)
        row = column = 0
        while True:
            row, column, needed = loops.extend(self._arena, self._contexts, batch, row, column)
            if row == len(sequences):
                return
            if self._header[loops.STATES] + 2 > len(self._nodes):
                self._grow_nodes()
            if self._header[loops.EDGES] + needed > loops.MAX_LOAD * len(self._table):
                self._grow_table(needed)

    def advance(self, sequences: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Moves sequences begun with `track` by tokens; arguments as for `extend`.

        The match grows by at most one token for each token: text that is inserted after a sequence has
        passed it is matched again only after a mismatch.
        """
        loops.advance(self._arena, self._contexts, self._batch(sequences, tokens, counts, _FOLLOWED))

    def follow(
        self,
        sequences: np.ndarray,
        tokens: np.ndarray,
        counts: np.ndarray,
        mixture: np.ndarray,
        min_match: int = 1,
    ) -> None:
        """Moves the edited contexts of sequences, begun with `start` or `track`, by tokens, and learns the
        weights of the sources of candidates from them.

        Call it before `extend` or `advance` with the same tokens: they are compared with the automaton as it
        was when drafts for them were proposed.

        Args:
          sequences, tokens, counts: as for `extend`.
          mixture: from `new_mixture`; updated in place.
          min_match: as for `propose`.
        """
        _check_mixture(mixture)
        batch = self._batch(sequences, tokens, counts, loops.ANY_KIND)
        context_loops.follow(self._arena, self._contexts, batch, min_match, mixture)

    # --- proposals ---------------------------------------------------------------------------------------

    def propose(
        self,
        sequences: np.ndarray,
        budgets: np.ndarray,
        max_nodes: int,
        *,
        min_match: int = 1,
        max_match: int | None = None,
        budget_per_match: float = math.inf,
        rank: Literal["count", "weight"] = "count",
        novelty: float = 0.5,
        mixture: np.ndarray | None = None,
        min_probability: float = 0.0,
        chain_only: bool = False,
    ) -> Proposals:
        """Grows a tree of likely continuations of every sequence, best first.

        The context of a node is the matched suffix with the path to the node. The candidates behind it are
        the tokens that followed its longest suffix with a continuation. A candidate's probability is
        count / (total + novelty); that of a path is the product.

        Args:
          sequences: ids, int32 [B].
          budgets: int32 [B], the largest number of nodes.
          max_nodes: N of the result; budgets are cut to it.
          min_match: nothing is proposed behind a context whose longest suffix with a continuation is shorter;
            0 allows the tokens that are frequent anywhere.
          max_match: the match is cut to this many tokens, and to the forest's own limit.
          budget_per_match: SuffixDecoding's alpha: at most floor(alpha * match length) + 1 nodes. With an
            edited context, the number of its last tokens that agreed counts as a match, too.
          rank: "count" prefers what is probable. "weight" follows only the candidate with the largest weight,
            and never shortens the context: the chain ends at a leaf (RhymeRL's suffix tree). It is exact as
            far as the forest's limit reaches.
          novelty: pseudo-count of all tokens that have not followed a context yet.
          mixture: from `new_mixture`, as `follow` has updated it: candidates behind the edited context are
            proposed, too, and probabilities are interpolated (`drafters/context_loops.py`) instead of
            smoothed by `novelty`; only for the rank "count".
          min_probability: candidates with a less probable path are left out.
          chain_only: follow only the best candidate of each node.
        """
        sequences = vector(sequences, "sequences", np.int32)
        check_ids(sequences, self._num_sequences, "sequences")
        batch = len(sequences)
        budgets = vector(budgets, "budgets", np.int32, batch)
        if max_nodes < 1:
            raise ValueError(f"max_nodes: {max_nodes}, expected at least 1")
        if rank not in ("count", "weight"):
            raise ValueError(f"rank: {rank!r}, expected 'count' or 'weight'")
        if min_match < 0 or (max_match is not None and max_match < 0):
            raise ValueError(f"min_match and max_match: {min_match}, {max_match}, expected at least 0")
        if not (novelty >= 0 and budget_per_match >= 0 and min_probability >= 0):
            raise ValueError(
                "novelty, budget_per_match and min_probability must be at least 0; got"
                f" {novelty}, {budget_per_match}, {min_probability}"
            )
        if mixture is not None:
            _check_mixture(mixture)
            if rank != "count":
                raise ValueError(f"rank: {rank!r}, expected 'count' with a mixture")
        proposals = Proposals(
            tokens=np.zeros((batch, max_nodes), np.int32),
            parents=np.full((batch, max_nodes), -1, np.int32),
            log_probability=np.full((batch, max_nodes), -np.inf, np.float32),
            counts=np.empty(batch, np.int32),
            match_lengths=np.empty(batch, np.int32),
        )
        options = (
            self._limit if max_match is None else min(max_match, self._limit),
            min_match,
            float(budget_per_match),
            rank == "weight",
            float(novelty),
            _NO_MIXTURE if mixture is None else mixture,
            math.log(min_probability) if min_probability > 0 else -math.inf,
            chain_only,
        )
        draft_loops.propose(self._arena, self._contexts, sequences, budgets, options, tuple(proposals))
        return proposals

    # --- arrays ------------------------------------------------------------------------------------------

    def _sequence_arrays(self) -> tuple[np.ndarray, ...]:
        return self._states, self._lengths, self._weights, self._kinds, self._edits

    def _set_nodes(self, nodes: np.ndarray) -> None:
        self._nodes, self._node_weights = nodes, nodes.view(np.float32)

    def _grow_nodes(self, least: int = 0) -> None:
        used = int(self._header[loops.STATES])
        nodes = aligned_rows(max(int(len(self._nodes) * GROWTH), least), loops.STATE_WIDTH)
        nodes[:used] = self._nodes[:used]
        self._set_nodes(nodes)

    @staticmethod
    def _empty_table(rows: int) -> np.ndarray:
        table = aligned_rows(rows, loops.EDGE_WIDTH)
        table[:, loops.SOURCE] = loops.FREE
        return table

    def _grow_table(self, needed: int) -> None:
        least = math.ceil((int(self._header[loops.EDGES]) + needed) / loops.MAX_LOAD) + 1
        table = self._empty_table(max(int(len(self._table) * GROWTH), least))
        loops.rehash(self._table, table)
        self._table = table

    def _new_sequences(self, weights: np.ndarray, kind: int) -> np.ndarray:
        first = self._num_sequences
        self._num_sequences += len(weights)
        self._states, self._lengths, self._weights, self._kinds, self._edits = (
            with_room(array, self._num_sequences) for array in self._sequence_arrays()
        )
        self._weights[first : self._num_sequences] = weights
        self._kinds[first : self._num_sequences] = kind
        self._edits[first : self._num_sequences] = -1
        return np.arange(first, self._num_sequences, dtype=np.int32)

    def _new_root(self, state: int) -> int:
        self._roots = with_room(self._roots, self._num_roots + 1)
        self._roots[self._num_roots] = state
        self._num_roots += 1
        return self._num_roots - 1

    def _root_states(self, roots: np.ndarray) -> np.ndarray:
        roots = vector(roots, "roots", np.int32)
        check_ids(roots, self._num_roots, "roots")
        return self._roots[roots]

    def _batch(
        self, sequences: np.ndarray, tokens: np.ndarray, counts: np.ndarray, kind: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Checks the arguments of `extend`, `advance` and `follow` before anything changes."""
        sequences = vector(sequences, "sequences", np.int32)
        counts = vector(counts, "counts", np.int32, len(sequences))
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or len(tokens) != len(sequences):
            raise ValueError(f"tokens: shape {list(tokens.shape)}, expected [{len(sequences)}, T]")
        tokens = cast(tokens, "tokens", np.int32)
        known = self._num_sequences
        problem, row, column = loops.check_batch(sequences, tokens, counts, self._kinds, known, kind)
        if problem == loops.WRONG_ID:
            raise ValueError(f"sequences: {sequences[row]} is not known, there are {self._num_sequences}")
        if problem == loops.WRONG_KIND:
            expected, other = ("start", "track") if kind == _INSERTED else ("track", "start")
            raise ValueError(f"sequences: {sequences[row]} was begun with {other}, expected {expected}")
        if problem == loops.WRONG_COUNT:
            raise ValueError(f"counts[{row}]: {counts[row]}, expected 0 to {tokens.shape[1]}")
        if problem == loops.WRONG_TOKEN:
            raise ValueError(f"tokens[{row}, {column}]: {tokens[row, column]}, expected at least 0")
        return sequences, tokens, counts


def _check_mixture(mixture: np.ndarray) -> None:
    expected = (context_loops.SITUATIONS, context_loops.SOURCES)
    if mixture.shape != expected or mixture.dtype != np.float64 or not mixture.flags.c_contiguous:
        raise ValueError(f"mixture: {mixture.dtype} {list(mixture.shape)}, expected float64 {list(expected)}")
