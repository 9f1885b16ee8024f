"""One draft tree from those of several drafters.

Drafters fail in different places: SRT where no earlier response is similar, the quantized policy where
rounding matters, run-ahead behind the first difference. Verified side by side, their trees would hold the
same tokens twice. Here a path of tokens is one node, whichever drafters propose it, and the rows of a pass go
to the likeliest nodes of all trees. It is the tree counterpart of best-of-N drafting (SpecActor, section
4.2), which verifies the chains of several drafters separately, on different workers.

**Probability of a node that several drafters propose.** Given that the parent is accepted, drafter i
estimates q_i, the probability of its node divided by that of the parent. A drafter that knows nothing beyond
the strongest one adds nothing; one that knows something else is sometimes right where the others are wrong.
So the probability lies between

    max_i q_i  (they know the same)   and   1 - prod_i (1 - q_i)  (independent: noisy or, Pearl, 1988)

and the point in between is learned for every set of drafters (`Agreement`). The probability of a node is this
times its parent's: at most the parent's, at least the estimate of any of its drafters.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from drafters.base import Drafts
from drafters.compilation import compiled

MOST_DRAFTERS = 8  # their sets are counted one by one

_PRIOR_INDEPENDENCE = 0.5
_PRIOR_WEIGHT = 1.0  # as much as four nodes for which max and noisy or are half apart
_FORGET = 0.5


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The trees of D drafters as one.

    Attributes:
      drafts: the likeliest nodes first, parents before their children, no path of tokens twice.
      probability: float64 [n, nodes], probability that a node and all its ancestors are accepted; 0 where
        there is no node.
      origins: int32 [n, nodes], the drafters that propose a node: bit i stands for drafter i.
      strongest: float64 [n, nodes], the largest estimate of any drafter, given that the parent is accepted.
      pooled: float64 [n, nodes], the noisy or of the estimates, given that the parent is accepted.
      places: int32 [D, n, N], index of each drafter's nodes in the tree, -1 for those left out.
    """

    drafts: Drafts
    probability: np.ndarray
    origins: np.ndarray
    strongest: np.ndarray
    pooled: np.ndarray
    places: np.ndarray


class Agreement:
    """Learns how much a node gains when several drafters propose it: 0 is nothing, 1 is as much as if they
    were independent.

    For every set of drafters it is the least squares fit of `strongest + x (pooled - strongest)` to the
    acceptance of nodes.

    Args:
      drafters: number of drafters.
    """

    def __init__(self, drafters: int) -> None:
        if not 1 <= drafters <= MOST_DRAFTERS:
            raise ValueError(f"{drafters} drafters; 1 to {MOST_DRAFTERS} can be mixed")
        self._gained = np.zeros(1 << drafters)
        self._squares = np.zeros(1 << drafters)

    @property
    def independence(self) -> np.ndarray:
        """The fit x for every set of drafters, as in `Mixture.origins`: float64 [2^D]."""
        fit = (self._gained + _PRIOR_WEIGHT * _PRIOR_INDEPENDENCE) / (self._squares + _PRIOR_WEIGHT)
        return np.clip(fit, 0.0, 1.0)

    def forget(self) -> None:
        """Reduces the weight of old counts, since the policy has changed."""
        self._gained *= _FORGET
        self._squares *= _FORGET

    def observe(self, mixture: Mixture, scored: np.ndarray, accepted: np.ndarray) -> None:
        """Adds verified nodes to the counts.

        Args:
          mixture: the proposed trees.
          scored: bool [n, nodes], nodes that were verified and whose parent was accepted.
          accepted: bool [n, nodes], nodes that were accepted.
        """
        strongest = mixture.strongest[scored]
        spread = mixture.pooled[scored] - strongest
        origins = mixture.origins[scored]
        gained = spread * (accepted[scored] - strongest)
        self._gained += np.bincount(origins, gained, len(self._gained))
        self._squares += np.bincount(origins, spread**2, len(self._squares))

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps."""
        return {"agreement_gained": self._gained.copy(), "agreement_squares": self._squares.copy()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores the arrays that `state` returned; those of another number of drafters are ignored."""
        gained, squares = state.get("agreement_gained"), state.get("agreement_squares")
        if gained is not None and squares is not None and gained.shape == self._gained.shape:
            self._gained, self._squares = gained.copy(), squares.copy()


def mix(
    proposals: Sequence[Drafts],
    probabilities: Sequence[np.ndarray],
    budgets: np.ndarray,
    nodes: int,
    independence: np.ndarray,
) -> Mixture:
    """Merges the draft trees of several drafters for the same queries.

    Args:
      proposals: from each of D drafters, for n queries, N nodes wide.
      probabilities: for each drafter float [n, N], the calibrated probability that a node and all its
        ancestors are accepted. An entry with probability 0, and everything below it, is ignored.
      budgets: int [n], the largest number of nodes.
      nodes: width of the arrays returned.
      independence: float64 [2^D], from `Agreement`.
    """
    if len(independence) != 1 << len(proposals):
        raise ValueError(
            f"independence of {len(independence)} sets for {len(proposals)} drafters; expected 2^drafters"
        )
    tokens = np.stack([drafts.tokens for drafts in proposals]).astype(np.int32, copy=False)
    parents = np.stack([drafts.parents for drafts in proposals]).astype(np.int32, copy=False)
    counts = np.stack([drafts.counts for drafts in proposals]).astype(np.int32, copy=False)
    given = np.stack(probabilities).astype(np.float64, copy=False)
    most = np.minimum(budgets, nodes).astype(np.int64)
    places, counts, *trees = _merge(tokens, parents, counts, given, most, nodes, independence)
    tokens, parents, log_probability, probability, origins, strongest, pooled = trees
    drafts = Drafts(tokens, parents, log_probability, counts)
    return Mixture(drafts, probability, origins, strongest, pooled, places)


def nodes_by_drafter(mixture: Mixture, nodes: np.ndarray) -> np.ndarray:
    """Counts how many of the nodes, bool [n, nodes], each drafter proposed: int32 [D, n], for
    `Sampled.drafted` and `Sampled.accepted`.
    """
    bits = 1 << np.arange(len(mixture.places), dtype=np.int32)
    proposed = (mixture.origins & bits[:, None, None]) != 0
    return (proposed & nodes).sum(axis=2, dtype=np.int32)


@compiled
def _merge(tokens, parents, counts, given, budgets, nodes, independence):
    drafters, queries, width = tokens.shape
    shape = (queries, nodes)
    out_tokens, out_parents = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    out_log_probability, out_probability = np.full(shape, -np.inf, np.float32), np.zeros(shape)
    out_strongest, out_pooled, out_origins = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int32)
    out_counts, out_places = np.zeros(queries, np.int32), np.full(tokens.shape, -1, np.int32)
    most = drafters * width
    # For path m: its last token; the path without it; the head of the list of paths that continue it (at
    # m + 1; at 0 the list of all paths of one token); the next path in the list that holds m.
    token_of, above_of = np.empty(most, np.int32), np.empty(most, np.int64)
    heads, following = np.empty(most + 1, np.int64), np.empty(most, np.int64)
    said = np.empty(
        (drafters, most), np.float64
    )  # estimate of a path by a drafter; 0 where it does not propose it
    path_of = np.empty((drafters, width), np.int64)  # the path of a drafter's node
    capped = np.empty(width, np.float64)  # a node's probability, at most its parent's
    total, strongest, pooled = np.empty(most), np.empty(most), np.empty(most)
    origins = np.empty(most, np.int32)
    chosen, rank = np.empty(nodes, np.int64), np.empty(most, np.int64)
    for query in range(queries):
        # Join the trees: a path of tokens is one entry, with the estimate of every drafter that proposes it.
        known = 0
        heads[0] = -1
        for drafter in range(drafters):
            path_of[drafter] = -1
            for node in range(min(np.int64(counts[drafter, query]), width)):
                parent, probability = parents[drafter, query, node], given[drafter, query, node]
                if not probability > 0.0 or parent < -1 or parent >= node:
                    continue
                above, limit = np.int64(-1), 1.0
                if parent >= 0:
                    above, limit = path_of[drafter, parent], capped[parent]
                    if above < 0:
                        continue
                token = tokens[drafter, query, node]
                path = heads[above + 1]
                while path >= 0 and token_of[path] != token:
                    path = following[path]
                if path < 0:
                    path = known
                    known += 1
                    token_of[path], above_of[path] = token, above
                    following[path], heads[above + 1] = heads[above + 1], path
                    heads[path + 1] = -1
                    said[:, path] = 0.0
                capped[node] = min(probability, limit)
                path_of[drafter, node] = path
                # A drafter that proposes a path twice is no second opinion.
                said[drafter, path] = max(said[drafter, path], capped[node])

        # The probability of every path, between the strongest estimate and the noisy or.
        for path in range(known):
            above = above_of[path]
            strongest[path], pooled[path], origins[path], least = 0.0, 0.0, 0, 0.0
            for drafter in range(drafters):
                if said[drafter, path] > 0.0:
                    estimate = said[drafter, path]
                    given_parent = estimate / said[drafter, above] if above >= 0 else estimate
                    strongest[path] = max(strongest[path], given_parent)
                    pooled[path] += (1.0 - pooled[path]) * given_parent
                    origins[path] |= 1 << drafter
                    least = max(least, estimate)
            pooled[path] = max(pooled[path], strongest[path])  # rounding may make it less
            worth = independence[origins[path]] * (pooled[path] - strongest[path]) + strongest[path]
            of_parent = total[above] if above >= 0 else 1.0
            total[path] = min(of_parent, max(least, of_parent * worth))

        # The likeliest in descending order, of equals the first. A parent is known before its children and no
        # less likely, so it stands before them.
        size, budget = 0, max(budgets[query], 0)
        rank[:known] = -1
        for path in range(known):
            if size == budget and (size == 0 or total[path] <= total[chosen[size - 1]]):
                continue
            place = size if size < budget else size - 1
            size = min(size + 1, budget)
            while place > 0 and total[chosen[place - 1]] < total[path]:
                chosen[place] = chosen[place - 1]
                place -= 1
            chosen[place] = path
        for place in range(size):
            path = chosen[place]
            rank[path] = place
            above = above_of[path]
            out_tokens[query, place] = token_of[path]
            out_parents[query, place] = rank[above] if above >= 0 else -1
            out_log_probability[query, place] = np.log(total[path])
            out_probability[query, place] = total[path]
            out_origins[query, place] = origins[path]
            out_strongest[query, place], out_pooled[query, place] = strongest[path], pooled[path]
        out_counts[query] = size
        for drafter in range(drafters):
            for node in range(width):
                if path_of[drafter, node] >= 0:
                    out_places[drafter, query, node] = rank[path_of[drafter, node]]
    return (
        out_places, out_counts,
        out_tokens, out_parents, out_log_probability, out_probability, out_origins, out_strongest, out_pooled,
    )  # fmt: skip
