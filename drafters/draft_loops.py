"""The compiled loops that follow requests through a `SuffixForest` and grow candidate trees from it.

What a request is at is a row of seven int64:

* `STATE`, `MATCHED`: the longest suffix of its tokens that something has followed;
* `EDITED`, `EDITED_MATCHED`: the same for its tokens as history would have had them, or -1. Where a request
  samples what never followed its context, its longest known suffix shrinks to nothing, but what followed in
  history mostly goes on as if nothing had been replaced: paraphrases, a wrong number, a renamed variable. The
  edited context is the one before with the token that followed most often in place of the sampled one;
* `AGREED`: for the last eight tokens of the edited context, one bit each: was it sampled, too?
* `REPLACED`, `REPLACEMENT`: the last token that was edited, and what was sampled there. What was replaced
  once is likely to be replaced again.

A token is predicted by interpolating what the sources say (Jelinek and Mercer, 1980): its share of what
followed the suffix, its share of what followed the edited context, and that of the token which it would
replace. How much each source, and a token that none of them knows, are worth is learned online by expectation
maximisation, in a row of the mixture for each kind of situation (`_situation`).
"""

import math

import numpy as np

from drafters.compilation import compiled
from drafters.suffix_loops import (
    COUNT,
    EDGE_TARGET,
    LENGTH,
    LINK,
    MARKER,
    MORE,
    NEXT,
    NONE,
    TARGET,
    TOKEN,
    WEIGHT,
    context,
    find_edge,
    find_further,
    settle,
    top,
)  # fmt: skip

# Columns of where a request is.
STATE, MATCHED, EDITED, EDITED_MATCHED, AGREED, REPLACED, REPLACEMENT = range(7)
PLACE_WIDTH = 7
# Columns of the mixture.
SUFFIX, EDIT, REPLACE, NOVEL = range(4)
SOURCES = 4

_REMEMBERED = 8  # tokens of the edited context whose agreement is known
_LEAST_AGREEMENT = 2  # of them; the edited context is given up below
_LENGTHS = 7  # of the suffix: 0, 1, 2 to 3, 4 to 7, ..., 32 and more
_EDITS = 1 + 3 * (_REMEMBERED // 2 + 1)  # no edited context, or by agreement and by what it says
SITUATIONS = _LENGTHS * _EDITS


# --- following a request ---------------------------------------------------------------------------------


@compiled
def _known_suffix(nodes, forest_max_match, limit, state, length):
    """What is asked for a string: its state and length now, cut as `context` says."""
    state = settle(nodes, state, length)
    if length > forest_max_match:
        state = top(nodes, state, forest_max_match)
        length = min(length, np.int64(nodes[state, LENGTH]))
    return context(nodes, state, length, limit)


@compiled
def _step_suffix(nodes, table, forest_max_match, state, length, token):
    """The context a token later."""
    target = find_edge(nodes, table, state, token)
    while target < 0 and nodes[state, LINK] >= 0:
        state = np.int64(nodes[state, LINK])
        length = np.int64(nodes[state, LENGTH])
        target = find_edge(nodes, table, state, token)
    if target >= 0:
        state, length = target, length + 1
    return context(nodes, state, length, forest_max_match)


@compiled
def _best_child(nodes, table, state):
    """What followed a state most often, of equals the smaller token: token, target."""
    best, best_target, best_count = np.int64(NONE), np.int64(-1), np.int64(-1)
    token, target = np.int64(nodes[state, TOKEN]), np.int64(nodes[state, TARGET])
    following = np.int64(nodes[state, MORE])
    while token != NONE:
        if token != MARKER:
            count = np.int64(nodes[target, COUNT])
            if count > best_count or (count == best_count and token < best):
                best, best_target, best_count = token, target, count
        token = following
        if token != NONE:
            slot = find_further(table, state, token)
            target, following = np.int64(table[slot, EDGE_TARGET]), np.int64(table[slot, NEXT])
    return best, best_target


@compiled
def _count_ones(bits):
    count = 0
    while bits:
        bits &= bits - 1
        count += 1
    return count


@compiled
def _look_up(nodes, forest_max_match, max_match, states, lengths, edits, sequence, places, at):
    """Where a sequence is now: what was inserted since may have followed longer suffixes."""
    places[at, STATE], places[at, MATCHED] = _known_suffix(
        nodes, forest_max_match, max_match, np.int64(states[sequence]), np.int64(lengths[sequence])
    )
    for column in range(EDITED, PLACE_WIDTH):
        places[at, column] = edits[sequence, column - EDITED]
    if places[at, EDITED] >= 0:
        places[at, EDITED], places[at, EDITED_MATCHED] = _known_suffix(
            nodes, forest_max_match, forest_max_match, places[at, EDITED], places[at, EDITED_MATCHED]
        )
        _drop_shorter(places, at)


@compiled
def _drop_shorter(places, at):
    """Gives up an edited context that says no more than the suffix."""
    if places[at, EDITED_MATCHED] <= places[at, MATCHED]:
        places[at, EDITED] = -1


@compiled
def _step(nodes, table, forest_max_match, places, before, token, target, after):
    """Where a request is a token later: `before` and `after` are rows of `places`, and may be one.

    target: the state behind the suffix and the token where it is known, else -1.
    """
    state, matched = places[before, STATE], places[before, MATCHED]
    _step_edited(nodes, table, forest_max_match, places, before, token, after)
    if target >= 0:
        places[after, STATE], places[after, MATCHED] = context(nodes, target, matched + 1, forest_max_match)
    else:
        places[after, STATE], places[after, MATCHED] = _step_suffix(
            nodes, table, forest_max_match, state, matched, token
        )
    _drop_shorter(places, after)


@compiled
def _step_edited(nodes, table, forest_max_match, places, before, token, after):
    edited, matched, agreed = places[before, EDITED], places[before, EDITED_MATCHED], places[before, AGREED]
    replaced, replacement = places[before, REPLACED], places[before, REPLACEMENT]
    target = np.int64(-1)
    if edited >= 0:
        target = find_edge(nodes, table, edited, token)
        agrees = target >= 0
        if not agrees:
            best, target = _best_child(nodes, table, edited)
            agrees = best == replaced and token == replacement
            replaced, replacement = best, np.int64(token)
        agreed = (agreed << 1 | agrees) & ((1 << _REMEMBERED) - 1)
        if _count_ones(agreed) < _LEAST_AGREEMENT:
            target = np.int64(-1)
    if (
        target < 0
        and places[before, MATCHED] > 0
        and find_edge(nodes, table, places[before, STATE], token) < 0
    ):
        replaced, target = _best_child(nodes, table, places[before, STATE])
        matched, replacement = places[before, MATCHED], np.int64(token)
        agreed = (1 << min(matched + 1, _REMEMBERED)) - 2  # all but the last
    places[after, EDITED] = -1
    if target >= 0:
        places[after, EDITED], places[after, EDITED_MATCHED] = context(
            nodes, target, matched + 1, forest_max_match
        )
    places[after, AGREED], places[after, REPLACED], places[after, REPLACEMENT] = agreed, replaced, replacement


@compiled
def _situation(nodes, table, places, at):
    """The row of the mixture: by the suffix's length, how far the edit agreed, and what that says now."""
    row = np.int64(0)
    while row < _LENGTHS - 1 and places[at, MATCHED] >> row:
        row += 1
    row *= _EDITS
    if places[at, EDITED] < 0:
        return row
    row += 1 + 3 * (_count_ones(places[at, AGREED]) // 2)
    best, _ = _best_child(nodes, table, places[at, EDITED])
    if best == places[at, REPLACED]:
        return row + 2
    return row + (best == _best_child(nodes, table, places[at, STATE])[0])


@compiled
def _share(nodes, table, state, token):
    """Share of a token in what followed a state."""
    total, own = 0.0, 0.0
    other, target = nodes[state, TOKEN], nodes[state, TARGET]
    following = nodes[state, MORE]
    while other != NONE:
        if other != MARKER:
            total += nodes[target, COUNT]
            if other == token:
                own = nodes[target, COUNT]
        other = following
        if other != NONE:
            slot = find_further(table, state, other)
            target, following = table[slot, EDGE_TARGET], table[slot, NEXT]
    return own / total if total > 0.0 else 0.0


@compiled
def _learn(nodes, table, min_match, places, at, token, mixture):
    """Counts each source by its part in what was sampled: a step of expectation maximisation."""
    weights = mixture[_situation(nodes, table, places, at)]
    suffix = edit = replace = 0.0
    if places[at, MATCHED] >= min_match:
        suffix = weights[SUFFIX] * _share(nodes, table, places[at, STATE], token)
    if places[at, EDITED] >= 0:
        edit = weights[EDIT] * _share(nodes, table, places[at, EDITED], token)
        if token == places[at, REPLACEMENT]:
            replace = weights[REPLACE] * _share(nodes, table, places[at, EDITED], places[at, REPLACED])
    known = suffix + edit + replace
    if known > 0.0:
        weights[SUFFIX] += suffix / known
        weights[EDIT] += edit / known
        weights[REPLACE] += replace / known
    else:
        weights[NOVEL] += 1.0


@compiled
def follow(
    nodes, table, forest_max_match, min_match, sequences, tokens, counts, states, lengths, edits, mixture
):
    """Moves the edited contexts by tokens that the forest does not hold yet; learns the mixture from them."""
    places = np.empty((1, PLACE_WIDTH), np.int64)
    for row in range(sequences.shape[0]):
        sequence = sequences[row]
        _look_up(nodes, forest_max_match, forest_max_match, states, lengths, edits, sequence, places, 0)
        for column in range(counts[row]):
            token = tokens[row, column]
            _learn(nodes, table, min_match, places, 0, token, mixture)
            _step(nodes, table, forest_max_match, places, 0, token, -1, 0)
        for column in range(EDITED, PLACE_WIDTH):
            edits[sequence, column - EDITED] = places[0, column]


# --- candidates ------------------------------------------------------------------------------------------


@compiled
def _children(nodes, weights, table, state, by_weight, tokens, targets, masses, found):
    """Lists what followed a state, behind the first `found` and as far as the arrays reach; returns how many
    there are then.
    """
    token, target = nodes[state, TOKEN], nodes[state, TARGET]
    following = nodes[state, MORE]
    while token != NONE:
        if token != MARKER:
            if found < tokens.shape[0]:
                tokens[found] = token
                targets[found] = target
                masses[found] = weights[target, WEIGHT] if by_weight else nodes[target, COUNT]
            found += 1
        token = following
        if token != NONE:
            slot = find_further(table, state, token)
            target, following = table[slot, EDGE_TARGET], table[slot, NEXT]
    return found


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
def _mix(nodes, table, places, at, mixture, tokens, targets, shares, suffixes, both):
    """Turns the shares of what followed the suffix and, behind them, of what followed the edited context into
    probabilities, in place, each token once.

    Returns:
      How many tokens there are.
    """
    weights = mixture[_situation(nodes, table, places, at)]
    replaced = 0.0
    for child in range(suffixes, both):
        if tokens[child] == places[at, REPLACED]:
            replaced = shares[child]
    total = weights[NOVEL]  # and what the sources are worth that have anything to say
    total += weights[SUFFIX] if suffixes else 0.0
    total += weights[EDIT] if both > suffixes else 0.0
    total += weights[REPLACE] if replaced > 0.0 else 0.0
    for child in range(suffixes):
        shares[child] *= weights[SUFFIX] / total
    found = suffixes
    for child in range(suffixes, both):
        found = _add(tokens, targets, shares, found, tokens[child], shares[child] * weights[EDIT] / total)
    if replaced > 0.0:
        found = _add(
            tokens, targets, shares, found, places[at, REPLACEMENT], replaced * weights[REPLACE] / total
        )
    return found


@compiled
def _add(tokens, targets, probabilities, found, token, probability):
    """Adds to the probability of a token; returns how many there are then."""
    for known in range(found):
        if tokens[known] == token:
            probabilities[known] += probability
            return found
    tokens[found] = token
    targets[found] = -1
    probabilities[found] = probability
    return found + 1


@compiled
def _mixed_candidates(nodes, weights, table, places, at, min_match, mixture, tokens, targets, probabilities):
    """What may come next by both contexts: tokens, their states behind the suffix (-1 where they never
    followed that) and probabilities.

    Returns:
      How many there are, or minus the room that they need.
    """
    suffixes = 0
    if places[at, MATCHED] >= min_match:
        state = places[at, STATE]
        suffixes = _children(nodes, weights, table, state, False, tokens, targets, probabilities, 0)
    both = suffixes
    if places[at, EDITED] >= 0:
        state = places[at, EDITED]
        both = _children(nodes, weights, table, state, False, tokens, targets, probabilities, suffixes)
    if both >= tokens.shape[0]:  # a replacement may come on top
        return -2 * both
    _normalize(probabilities, 0, suffixes, 0.0)
    _normalize(probabilities, suffixes, both, 0.0)
    return _mix(nodes, table, places, at, mixture, tokens, targets, probabilities, suffixes, both)


@compiled
def _take_logs(probabilities, count):
    """Replaces the first `count` probabilities by their logarithms."""
    for child in range(count):
        probabilities[child] = math.log(probabilities[child]) if probabilities[child] > 0.0 else -math.inf


# --- proposing -------------------------------------------------------------------------------------------


@compiled
def _copy(entries, place, to):
    for column in range(3):
        entries[to, column] = entries[place, column]


@compiled
def _push(scores, entries, size, capacity, score, parent, token, target):
    """Adds to a list in ascending order of score that keeps the best `capacity`; among equals the first."""
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
    entries[place, 0] = parent
    entries[place, 1] = token
    entries[place, 2] = target
    return size


@compiled
def propose(
    nodes, weights, table, forest_max_match, states, lengths, edits, sequences, budgets,
    max_match, min_match, budget_per_match, by_weight, novelty, mixture, min_log_probability, chain_only,
    out_tokens, out_parents, out_log_probabilities, out_counts, out_match_lengths,
):  # fmt: skip
    """Grows candidate trees best first; `SuffixForest.propose` says what the arguments are."""
    max_nodes = out_tokens.shape[1]
    with_edits = mixture.shape[0] > 0
    scores = np.empty(max_nodes, np.float64)
    entries = np.empty((max_nodes, 3), np.int64)
    # Where the request would be: at the root in row 0, at node i in row i + 1.
    places = np.empty((max_nodes + 1, PLACE_WIDTH), np.int64)
    tokens, targets = np.empty(64, np.int32), np.empty(64, np.int32)
    probabilities = np.empty(64, np.float64)
    for row in range(sequences.shape[0]):
        _look_up(
            nodes, forest_max_match, min(max_match, forest_max_match), states, lengths, edits,
            sequences[row], places, 0,
        )  # fmt: skip
        if not with_edits:
            places[0, EDITED] = -1
        out_match_lengths[row] = places[0, MATCHED]
        out_counts[row] = 0
        budget = np.int64(min(budgets[row], max_nodes))
        if budget_per_match < math.inf:
            match = places[0, MATCHED]
            if places[0, EDITED] >= 0:
                match = max(match, _count_ones(places[0, AGREED]))
            budget = np.int64(min(np.float64(budget), math.floor(budget_per_match * match) + 1.0))
        if budget <= 0:
            continue

        emitted, size, score = 0, 0, 0.0
        while True:
            at = emitted
            if places[at, MATCHED] >= min_match or places[at, EDITED] >= 0:
                while True:
                    if with_edits:
                        found = _mixed_candidates(
                            nodes, weights, table, places, at, min_match, mixture,
                            tokens, targets, probabilities,
                        )  # fmt: skip
                    else:
                        found = _children(
                            nodes, weights, table, places[at, STATE], by_weight,
                            tokens, targets, probabilities, 0,
                        )  # fmt: skip
                        if found > tokens.shape[0]:
                            found = -found
                        _normalize(probabilities, 0, found, novelty)
                    if found >= 0:
                        break
                    tokens, targets = np.empty(-found, np.int32), np.empty(-found, np.int32)
                    probabilities = np.empty(-found, np.float64)
                _take_logs(probabilities, found)
                capacity = 1 if chain_only else budget - emitted
                for child in range(found):
                    new = score + probabilities[child]
                    if new > -math.inf and new >= min_log_probability:
                        size = _push(
                            scores, entries, size, capacity, new, emitted - 1, tokens[child], targets[child]
                        )
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
                _step(nodes, table, forest_max_match, places, parent + 1, token, entries[size, 2], emitted)
            else:
                places[emitted, STATE], places[emitted, MATCHED] = context(
                    nodes, entries[size, 2], places[parent + 1, MATCHED] + 1, forest_max_match
                )
                places[emitted, EDITED] = -1
        out_counts[row] = emitted
