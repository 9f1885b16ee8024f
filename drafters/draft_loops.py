"""The compiled loops that grow candidate trees from requests' contexts (`drafters/context_loops.py`)."""

import math

import numpy as np

from drafters.compilation import compiled
from drafters.context_loops import (
    AGREED,
    EDIT,
    EDITED,
    MATCHED,
    NOVEL,
    PLACE_WIDTH,
    REPLACE,
    REPLACED,
    REPLACEMENT,
    STATE,
    SUFFIX,
    count_ones,
    look_up,
    situation,
    step,
)
from drafters.suffix_loops import (
    COUNT,
    EDGE_TARGET,
    MARKER,
    MORE,
    NEXT,
    NONE,
    TARGET,
    TOKEN,
    WEIGHT,
    context,
    find_further,
)

# --- candidates ------------------------------------------------------------------------------------------


@compiled
def _children(nodes, table, state, found, count):
    """Appends the tokens that followed a state to the first `count` candidates, as far as the arrays reach.

    Args:
      found: tokens int32 [n], the states behind them int32 [n], and counts float64 [n], which then become
        shares and probabilities.

    Returns:
      The number of candidates, those that did not fit included.
    """
    tokens, targets, counts = found
    token, target = nodes[state, TOKEN], nodes[state, TARGET]
    following = nodes[state, MORE]
    while token != NONE:
        if token != MARKER:
            if count < tokens.shape[0]:
                tokens[count] = token
                targets[count] = target
                counts[count] = nodes[target, COUNT]
            count += 1
        token = following
        if token != NONE:
            slot = find_further(table, state, token)
            target, following = table[slot, EDGE_TARGET], table[slot, NEXT]
    return count


@compiled
def _heaviest(weights, found, count):
    """Keeps only the candidate with the largest weight, the first of equals. Returns the number kept."""
    tokens, targets, shares = found
    best = 0
    for child in range(1, count):
        if weights[targets[child], WEIGHT] > weights[targets[best], WEIGHT]:
            best = child
    if count > 0:
        tokens[0], targets[0], shares[0] = tokens[best], targets[best], shares[best]
    return min(count, 1)


@compiled
def _normalize(masses, first, last, novelty):
    """Turns masses into shares, in place; `novelty` is the mass of all tokens that have none."""
    total = novelty
    for child in range(first, last):
        total += masses[child]
    if total > 0.0:
        for child in range(first, last):
            masses[child] /= total


@compiled
def _mix(weights, places, at, found, suffixes, both):
    """Turns shares into probabilities, in place, with one entry for each token.

    The first `suffixes` entries are shares of what followed the suffix, those up to `both` shares of what
    followed the edited context. `weights` are those of the mixture in this situation.

    Returns:
      The number of tokens.
    """
    tokens, _, shares = found
    replaced = 0.0
    for child in range(suffixes, both):
        if tokens[child] == places[at, REPLACED]:
            replaced = shares[child]
    total = weights[NOVEL]  # and the weights of the sources that predict anything here
    total += weights[SUFFIX] if suffixes else 0.0
    total += weights[EDIT] if both > suffixes else 0.0
    total += weights[REPLACE] if replaced > 0.0 else 0.0
    for child in range(suffixes):
        shares[child] *= weights[SUFFIX] / total
    count = suffixes
    for child in range(suffixes, both):
        count = _add(found, count, tokens[child], shares[child] * weights[EDIT] / total)
    if replaced > 0.0:
        count = _add(found, count, places[at, REPLACEMENT], replaced * weights[REPLACE] / total)
    return count


@compiled
def _add(found, count, token, probability):
    """Adds to the probability of a token, in a new entry if it has none; returns the number of entries."""
    tokens, targets, probabilities = found
    for known in range(count):
        if tokens[known] == token:
            probabilities[known] += probability
            return count
    tokens[count] = token
    targets[count] = -1
    probabilities[count] = probability
    return count + 1


@compiled
def _mixed_candidates(nodes, table, places, at, min_match, mixture, found):
    """Lists the candidates of both contexts: tokens, their states behind the suffix (-1 where a token never
    followed it) and probabilities.

    Returns:
      The number of candidates, or minus the size of arrays that they need.
    """
    tokens, _, probabilities = found
    suffixes = 0
    if places[at, MATCHED] >= min_match:
        suffixes = _children(nodes, table, places[at, STATE], found, 0)
    both = suffixes
    if places[at, EDITED] >= 0:
        both = _children(nodes, table, places[at, EDITED], found, suffixes)
    if both >= tokens.shape[0]:  # a replacement may be one more
        return -2 * both
    _normalize(probabilities, 0, suffixes, 0.0)
    _normalize(probabilities, suffixes, both, 0.0)
    return _mix(mixture[situation(nodes, table, places, at)], places, at, found, suffixes, both)


# --- proposing -------------------------------------------------------------------------------------------


@compiled
def _copy(entries, place, to):
    for column in range(3):
        entries[to, column] = entries[place, column]


@compiled
def _push(scores, entries, size, capacity, score, entry):
    """Inserts an entry (parent, token, target) into a list in ascending order of score that keeps the best
    `capacity` entries, among equals the first; returns its size.
    """
    if size == capacity:
        if score <= scores[0]:
            return size
        place = 0
        while place + 1 < size and scores[place + 1] < score:
            scores[place] = scores[place + 1]
            _copy(entries, place + 1, place)
            place += 1
    else:
        place = size
        while place > 0 and scores[place - 1] >= score:
            scores[place] = scores[place - 1]
            _copy(entries, place - 1, place)
            place -= 1
        size += 1
    scores[place] = score
    entries[place, 0], entries[place, 1], entries[place, 2] = entry
    return size


@compiled
def propose(arena, contexts, sequences, budgets, options, out):
    """Grows candidate trees best first, into the arrays of `Proposals`; see `SuffixForest.propose`."""
    nodes, weights, table, _, limit = arena
    max_match, min_match, budget_per_match, by_weight, novelty, mixture, least, chain_only = options
    out_tokens, out_parents, out_log_probabilities, out_counts, out_match_lengths = out
    max_nodes = out_tokens.shape[1]
    with_edits = mixture.shape[0] > 0
    scores = np.empty(max_nodes, np.float64)
    entries = np.empty((max_nodes, 3), np.int64)
    # Where the request would be: at the root in row 0, at node i in row i + 1.
    places = np.empty((max_nodes + 1, PLACE_WIDTH), np.int64)
    found = np.empty(64, np.int32), np.empty(64, np.int32), np.empty(64, np.float64)
    for row in range(sequences.shape[0]):
        # The place of the request, and how many nodes its match is worth.
        look_up(nodes, limit, min(max_match, limit), contexts, sequences[row], places)
        if not with_edits:
            places[0, EDITED] = -1
        out_match_lengths[row] = places[0, MATCHED]
        out_counts[row] = 0
        budget = np.int64(min(budgets[row], max_nodes))
        if budget_per_match < math.inf:
            match = places[0, MATCHED]
            if places[0, EDITED] >= 0:
                match = max(match, count_ones(places[0, AGREED]))
            budget = np.int64(min(np.float64(budget), math.floor(budget_per_match * match) + 1.0))
        if budget <= 0:
            continue

        # Best-first growth: list the candidates behind the newest node, take the best of all listed.
        emitted, size, score = 0, 0, 0.0
        while True:
            at = emitted
            if places[at, MATCHED] >= min_match or places[at, EDITED] >= 0:
                while True:
                    if with_edits:
                        count = _mixed_candidates(nodes, table, places, at, min_match, mixture, found)
                    else:
                        count = _children(nodes, table, places[at, STATE], found, 0)
                        if count > found[0].shape[0]:
                            count = -count
                        _normalize(found[2], 0, count, novelty)
                        if by_weight:
                            count = _heaviest(weights, found, count)
                    if count >= 0:
                        break
                    found = (
                        np.empty(-count, np.int32),
                        np.empty(-count, np.int32),
                        np.empty(-count, np.float64),
                    )
                capacity = 1 if chain_only or by_weight else budget - emitted
                tokens, targets, probabilities = found
                for child in range(count):
                    probability = probabilities[child]
                    new = score + (math.log(probability) if probability > 0.0 else -math.inf)
                    if new > -math.inf and new >= least:
                        entry = (emitted - 1, tokens[child], targets[child])
                        size = _push(scores, entries, size, capacity, new, entry)
            if size == 0:
                break
            size -= 1
            score = scores[size]
            parent, token = entries[size, 0], entries[size, 1]
            out_tokens[row, emitted] = token
            out_parents[row, emitted] = parent
            out_log_probabilities[row, emitted] = score
            emitted += 1
            if emitted == budget:
                break
            if with_edits:
                step(nodes, table, limit, places, parent + 1, token, entries[size, 2], emitted)
            elif by_weight:  # down one subtree, to its leaf
                places[emitted, STATE] = entries[size, 2]
                places[emitted, MATCHED] = places[parent + 1, MATCHED] + 1
                places[emitted, EDITED] = -1
            else:
                places[emitted, STATE], places[emitted, MATCHED] = context(
                    nodes, entries[size, 2], places[parent + 1, MATCHED] + 1, limit
                )
                places[emitted, EDITED] = -1
        out_counts[row] = emitted
