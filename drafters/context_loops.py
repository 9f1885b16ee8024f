"""The compiled loops that follow requests through a `SuffixForest`.

The place of a request is a row of seven int64:

* `STATE`, `MATCHED`: the longest suffix of its tokens that something has followed;
* `EDITED`, `EDITED_MATCHED`: the same for its tokens as history would have had them, or -1. Where a request
  samples a token that never followed its context, its longest known suffix shrinks to nothing, but what
  followed in history mostly goes on as if nothing had been replaced: paraphrases, a wrong number, a renamed
  variable. The edited context is the one before with the most frequent token in place of the sampled one;
* `AGREED`: one bit for each of the last eight tokens of the edited context: was it sampled, too?
* `REPLACED`, `REPLACEMENT`: the last token that was edited, and the token that was sampled there. What was
  replaced once is likely to be replaced again.

A token is predicted by interpolating three sources (Jelinek and Mercer, 1980): its share of what followed the
suffix, its share of what followed the edited context, and the share there of the token that it would replace.
The weight of each source, and of a token that none of them knows, is learned online by expectation
maximisation, in a row of the mixture for each kind of situation (`situation`).
"""

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
    context,
    current_state,
    find_edge,
    find_further,
    top,
)  # fmt: skip

# Columns of a place.
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


@compiled
def _known_suffix(nodes, forest_max_match, limit, state, length):
    """Returns the context of a string: its present state and length, cut as `context` says."""
    state = current_state(nodes, state, length)
    if length > forest_max_match:
        state = top(nodes, state, forest_max_match)
        length = min(length, np.int64(nodes[state, LENGTH]))
    return context(nodes, state, length, limit)


@compiled
def _step_suffix(nodes, table, forest_max_match, state, length, token):
    """Returns the context after one more token."""
    target = find_edge(nodes, table, state, token)
    while target < 0 and nodes[state, LINK] >= 0:
        state = np.int64(nodes[state, LINK])
        length = np.int64(nodes[state, LENGTH])
        target = find_edge(nodes, table, state, token)
    if target >= 0:
        state, length = target, length + 1
    return context(nodes, state, length, forest_max_match)


@compiled
def best_child(nodes, table, state):
    """Returns the token that followed a state most often (among equals the smaller one), and its target."""
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
def count_ones(bits):
    count = 0
    while bits:
        bits &= bits - 1
        count += 1
    return count


@compiled
def look_up(nodes, forest_max_match, max_match, contexts, sequence, places):
    """Writes the present place of a sequence into the first row. It may match a longer suffix than before,
    since sequences that were inserted in the meantime may have followed one.
    """
    states, lengths, _, edits = contexts
    places[0, STATE], places[0, MATCHED] = _known_suffix(
        nodes, forest_max_match, max_match, np.int64(states[sequence]), np.int64(lengths[sequence])
    )
    for column in range(EDITED, PLACE_WIDTH):
        places[0, column] = edits[sequence, column - EDITED]
    if places[0, EDITED] >= 0:
        places[0, EDITED], places[0, EDITED_MATCHED] = _known_suffix(
            nodes, forest_max_match, forest_max_match, places[0, EDITED], places[0, EDITED_MATCHED]
        )
        _drop_shorter(places, 0)


@compiled
def _drop_shorter(places, at):
    """Gives up an edited context that is no longer than the suffix."""
    if places[at, EDITED_MATCHED] <= places[at, MATCHED]:
        places[at, EDITED] = -1


@compiled
def step(nodes, table, forest_max_match, places, before, token, target, after):
    """Moves a place by one token, from row `before` of `places` to row `after`, which may be the same.

    target: the state behind the suffix and the token if the caller knows it, else -1.
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
            best, target = best_child(nodes, table, edited)
            agrees = best == replaced and token == replacement
            replaced, replacement = best, np.int64(token)
        agreed = (agreed << 1 | agrees) & ((1 << _REMEMBERED) - 1)
        if count_ones(agreed) < _LEAST_AGREEMENT:
            target = np.int64(-1)
    if (
        target < 0
        and places[before, MATCHED] > 0
        and find_edge(nodes, table, places[before, STATE], token) < 0
    ):
        replaced, target = best_child(nodes, table, places[before, STATE])
        matched, replacement = places[before, MATCHED], np.int64(token)
        agreed = (1 << min(matched + 1, _REMEMBERED)) - 2  # all but the last
    places[after, EDITED] = -1
    if target >= 0:
        places[after, EDITED], places[after, EDITED_MATCHED] = context(
            nodes, target, matched + 1, forest_max_match
        )
    places[after, AGREED], places[after, REPLACED], places[after, REPLACEMENT] = agreed, replaced, replacement


@compiled
def situation(nodes, table, places, at):
    """Returns the row of the mixture: by the suffix's length, the edited context's agreement, and whether it
    predicts the same token as the suffix, or one that was replaced before.
    """
    row = np.int64(0)
    while row < _LENGTHS - 1 and places[at, MATCHED] >> row:
        row += 1
    row *= _EDITS
    if places[at, EDITED] < 0:
        return row
    row += 1 + 3 * (count_ones(places[at, AGREED]) // 2)
    best, _ = best_child(nodes, table, places[at, EDITED])
    if best == places[at, REPLACED]:
        return row + 2
    return row + (best == best_child(nodes, table, places[at, STATE])[0])


@compiled
def share(nodes, table, state, token):
    """Returns the share of a token among all tokens that followed a state."""
    total, count = 0.0, 0.0
    other, target = nodes[state, TOKEN], nodes[state, TARGET]
    following = nodes[state, MORE]
    while other != NONE:
        if other != MARKER:
            total += nodes[target, COUNT]
            if other == token:
                count = nodes[target, COUNT]
        other = following
        if other != NONE:
            slot = find_further(table, state, other)
            target, following = table[slot, EDGE_TARGET], table[slot, NEXT]
    return count / total if total > 0.0 else 0.0


@compiled
def _learn(nodes, table, min_match, places, at, token, mixture):
    """Adds each source's share of the responsibility for the sampled token: a step of expectation
    maximisation.
    """
    weights = mixture[situation(nodes, table, places, at)]
    suffix = edit = replace = 0.0
    if places[at, MATCHED] >= min_match:
        suffix = weights[SUFFIX] * share(nodes, table, places[at, STATE], token)
    if places[at, EDITED] >= 0:
        edit = weights[EDIT] * share(nodes, table, places[at, EDITED], token)
        if token == places[at, REPLACEMENT]:
            replace = weights[REPLACE] * share(nodes, table, places[at, EDITED], places[at, REPLACED])
    known = suffix + edit + replace
    if known > 0.0:
        weights[SUFFIX] += suffix / known
        weights[EDIT] += edit / known
        weights[REPLACE] += replace / known
    else:
        weights[NOVEL] += 1.0


@compiled
def follow(arena, contexts, batch, min_match, mixture):
    """Moves the edited contexts by tokens that are not in the forest yet; learns the mixture from them."""
    nodes, _, table, _, limit = arena
    sequences, tokens, counts = batch
    places = np.empty((1, PLACE_WIDTH), np.int64)
    for row in range(sequences.shape[0]):
        look_up(nodes, limit, limit, contexts, sequences[row], places)
        for column in range(counts[row]):
            token = tokens[row, column]
            _learn(nodes, table, min_match, places, 0, token, mixture)
            step(nodes, table, limit, places, 0, token, -1, 0)
        for column in range(EDITED, PLACE_WIDTH):
            contexts[3][sequences[row], column - EDITED] = places[0, column]
