"""The compiled loops of `SuffixForest`: suffix automata on flat arrays.

A suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985) has one
state for every set of substrings that occur at the same places. Here it indexes many sequences at once, all
of which begin with a marker that occurs nowhere else, and counts occurrences while the sequences grow.

Layout, made for few cache misses:

* a state is a row of eight int32 (32 bytes): its longest string's length, suffix link, count, weight (float32
  bits), one outgoing edge in place (most states have just one), the token of the first further edge, `TOP`;
* further edges are rows of four int32 in one open-addressing hash table over (source, token), and those of
  one state are a list linked by tokens, which survives rehashing.

What is passed together is a tuple (numba finds the type of a plain one fastest):

    arena       nodes int32 [rows, 8]; weights, the same memory as float32; table int32 [rows, 4]; header
                int64 [3]; limit, tokens that contexts are cut to
    contexts    of S sequences: states int32 [S]; matched lengths int32 [S]; weights float32 [S], which an
                occurrence adds to a string's; edited contexts int32 [S, 5] (`context_loops.py`)
    batch       of B sequences: ids int32 [B]; tokens int32 [B, T]; how many of each row count, int32 [B]

`TOP` leads past states that are never queried. Contexts are cut to `max_match` tokens, so only strings of
at most `max_match` + 1 tokens are counted: states whose suffix link is at most `max_match` long. `TOP` is the
first such one along the links; if clones were put above it since, the way goes on from there.
"""

import numpy as np

from drafters.compilation import compiled

# Columns of a state.
LENGTH, LINK, COUNT, WEIGHT, TOKEN, TARGET, MORE, TOP = range(8)
STATE_WIDTH = 8
# Columns of a further edge.
SOURCE, EDGE_TOKEN, EDGE_TARGET, NEXT = range(4)
EDGE_WIDTH = 4
# Entries of the header, int64.
STATES, EDGES, TOKENS = range(3)

MARKER = -1  # the token before every sequence
NONE = -2  # no token: no edge, or the end of a list of edges
FREE = -1  # the source of an unused row of the table
MAX_LOAD = 0.7  # of the table; probes get long beyond
ANY_KIND = -1  # of sequence, for `check_batch`
# Outcomes of `check_batch`.
FINE, WRONG_ID, WRONG_KIND, WRONG_COUNT, WRONG_TOKEN = range(5)

_SIDE_BY_SIDE = 64  # walks at a time


# --- edges -----------------------------------------------------------------------------------------------


@compiled
def _slot(source, token, slots):
    key = (np.uint64(source) << np.uint64(32)) | np.uint64(token)
    key = (key ^ (key >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(((key >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))


@compiled
def find_further(table, state, token):
    """Row of a further edge, or -1."""
    slots = table.shape[0]
    slot = _slot(state, token, slots)
    while True:
        source = table[slot, SOURCE]
        if source == state and table[slot, EDGE_TOKEN] == token:
            return slot
        if source == FREE:
            return -1
        slot += 1
        if slot == slots:
            slot = 0


@compiled
def find_edge(nodes, table, state, token):
    """Target of an edge, or -1."""
    if nodes[state, TOKEN] == token:
        return np.int64(nodes[state, TARGET])
    if nodes[state, MORE] == NONE:
        return np.int64(-1)
    slot = find_further(table, state, token)
    return np.int64(table[slot, EDGE_TARGET]) if slot >= 0 else np.int64(-1)


@compiled
def _insert_row(table, source, token, target, following):
    slots = table.shape[0]
    slot = _slot(source, token, slots)
    while table[slot, SOURCE] != FREE:
        slot += 1
        if slot == slots:
            slot = 0
    table[slot, SOURCE] = source
    table[slot, EDGE_TOKEN] = token
    table[slot, EDGE_TARGET] = target
    table[slot, NEXT] = following


@compiled
def _add_edge(nodes, table, header, state, token, target):
    if nodes[state, TOKEN] == NONE:
        nodes[state, TOKEN] = token
        nodes[state, TARGET] = target
    else:
        _insert_row(table, state, token, target, nodes[state, MORE])
        nodes[state, MORE] = token
        header[EDGES] += 1


@compiled
def rehash(old, new):
    """Moves all edges into an empty table."""
    for slot in range(old.shape[0]):
        if old[slot, SOURCE] != FREE:
            _insert_row(
                new, old[slot, SOURCE], old[slot, EDGE_TOKEN], old[slot, EDGE_TARGET], old[slot, NEXT]
            )


@compiled
def adopt(nodes, table, header, other_nodes, other_table, other_header):
    """Copies all states and edges of another forest behind these. Needs room for both."""
    first = header[STATES]
    for other in range(other_header[STATES]):
        state = first + other
        nodes[state] = other_nodes[other]  # a root's link and a leaf's target are none, and stay so
        if nodes[state, LINK] >= 0:
            nodes[state, LINK] += first
        if nodes[state, TARGET] >= 0:
            nodes[state, TARGET] += first
        nodes[state, TOP] += first
    for slot in range(other_table.shape[0]):
        if other_table[slot, SOURCE] != FREE:
            _insert_row(
                table,
                first + other_table[slot, SOURCE],
                other_table[slot, EDGE_TOKEN],
                first + other_table[slot, EDGE_TARGET],
                other_table[slot, NEXT],
            )
    for count in range(header.shape[0]):
        header[count] += other_header[count]


# --- checking --------------------------------------------------------------------------------------------


@compiled
def check_batch(sequences, tokens, counts, kinds, num_sequences, kind):
    """Returns the first error in a batch of tokens, with its row and column."""
    for row in range(sequences.shape[0]):
        if sequences[row] < 0 or sequences[row] >= num_sequences:
            return WRONG_ID, row, 0
        if kind != ANY_KIND and kinds[sequences[row]] != kind:
            return WRONG_KIND, row, 0
        if counts[row] < 0 or counts[row] > tokens.shape[1]:
            return WRONG_COUNT, row, 0
        for column in range(counts[row]):
            if tokens[row, column] < 0:
                return WRONG_TOKEN, row, column
    return FINE, 0, 0


# --- growing ---------------------------------------------------------------------------------------------


@compiled
def top(nodes, state, max_match):
    """Returns the first state along the suffix links, from this one on, with a count that is kept."""
    state = nodes[state, TOP]
    while True:
        link = nodes[state, LINK]
        if link < 0 or nodes[link, LENGTH] <= max_match:
            return np.int64(state)
        state = nodes[link, TOP]


@compiled
def _new_state(nodes, weights, header, length, link):
    state = header[STATES]
    header[STATES] += 1
    nodes[state, LENGTH] = length
    nodes[state, LINK] = link
    nodes[state, COUNT] = 0
    weights[state, WEIGHT] = 0.0
    nodes[state, TOKEN] = NONE
    nodes[state, TARGET] = -1
    nodes[state, MORE] = NONE
    nodes[state, TOP] = state
    return state


@compiled
def add_root(nodes, weights, header):
    """A new automaton: the empty string and, as state root + 1, the marker. Needs room for 2 states."""
    root = _new_state(nodes, weights, header, 0, -1)
    marker = _new_state(nodes, weights, header, 1, root)
    nodes[root, TOKEN] = MARKER
    nodes[root, TARGET] = marker
    return root


@compiled
def _append(nodes, weights, table, header, max_match, last, token):
    """Appends a token to the sequence at state `last`; returns its state, or -1 - (edges needed) if full.

    A sequence begins with the marker, so no string extends it to the left: it is the longest string of its
    state, and where the edge exists already, so is the longer sequence. Only suffixes are cloned.
    """
    target = find_edge(nodes, table, last, token)
    if target >= 0:
        return target

    # How far up the edge is missing, and what it takes, before anything changes.
    needed = 0
    above, root = np.int64(last), np.int64(last)
    while above >= 0:
        target = find_edge(nodes, table, above, token)
        if target >= 0:
            break
        if nodes[above, TOKEN] != NONE:
            needed += 1
        root = above
        above = np.int64(nodes[above, LINK])
    splits = above >= 0 and nodes[target, LENGTH] != nodes[above, LENGTH] + 1
    if splits:
        further = nodes[target, MORE]
        while further != NONE:
            needed += 1
            further = table[find_further(table, target, further), NEXT]
    if header[STATES] + 2 > nodes.shape[0] or header[EDGES] + needed > MAX_LOAD * table.shape[0]:
        return np.int64(-1 - needed)

    state = _new_state(nodes, weights, header, nodes[last, LENGTH] + 1, -1)
    below = np.int64(last)
    while below != above:
        _add_edge(nodes, table, header, below, token, state)
        below = np.int64(nodes[below, LINK])
    if above < 0:
        link = root
    elif not splits:
        link = target
    else:
        # The target's strings up to this length now also end here, its longer ones do not.
        link = _new_state(nodes, weights, header, nodes[above, LENGTH] + 1, nodes[target, LINK])
        nodes[link, COUNT] = nodes[target, COUNT]
        weights[link, WEIGHT] = weights[target, WEIGHT]
        nodes[link, TOKEN] = nodes[target, TOKEN]
        nodes[link, TARGET] = nodes[target, TARGET]
        further = nodes[target, MORE]
        while further != NONE:
            slot = find_further(table, target, further)
            _add_edge(nodes, table, header, link, further, table[slot, EDGE_TARGET])
            further = table[slot, NEXT]
        if nodes[nodes[link, LINK], LENGTH] > max_match:
            nodes[link, TOP] = top(nodes, nodes[link, LINK], max_match)
        nodes[target, LINK] = link
        while above >= 0 and find_edge(nodes, table, above, token) == target:
            if nodes[above, TOKEN] == token:
                nodes[above, TARGET] = link
            else:
                table[find_further(table, above, token), EDGE_TARGET] = link
            above = np.int64(nodes[above, LINK])
    nodes[state, LINK] = link
    if nodes[link, LENGTH] > max_match:
        nodes[state, TOP] = top(nodes, link, max_match)
    return state


@compiled
def _count(nodes, weights, max_match, states, added, pending):
    """Counts one more occurrence of the strings of the first `pending` states and of all their suffixes.

    The walks run side by side, so that their cache misses, which dominate insertion, overlap. Counting late
    is correct: a split in between copies the present count, and the walks then pass the new state.
    """
    for i in range(pending):
        states[i] = top(nodes, states[i], max_match)
    while pending > 0:
        kept = 0
        for i in range(pending):
            state = states[i]
            link = nodes[state, LINK]
            if link >= 0:
                nodes[state, COUNT] += 1
                weights[state, WEIGHT] += added[i]
                states[kept] = link
                added[kept] = added[i]
                kept += 1
        pending = kept


@compiled
def start(arena, contexts, sequences, roots):
    """Puts new sequences behind the markers of their roots."""
    nodes, weights, _, _, _ = arena
    states, lengths, own, _ = contexts
    for row in range(roots.shape[0]):
        marker, sequence = roots[row] + 1, sequences[row]
        nodes[marker, COUNT] += 1
        weights[marker, WEIGHT] += own[sequence]
        states[sequence] = marker
        lengths[sequence] = 1


@compiled
def extend(arena, contexts, batch, row, column):
    """Appends tokens from [row, column] on; returns where the room ended, and the number of edges needed."""
    nodes, weights, table, header, max_match = arena
    states, lengths, own, _ = contexts
    sequences, tokens, counts = batch
    reached, added = np.empty(_SIDE_BY_SIDE, np.int64), np.empty(_SIDE_BY_SIDE, np.float32)
    pending = 0
    new = np.int64(0)
    while row < sequences.shape[0]:
        sequence = sequences[row]
        state = np.int64(states[sequence])
        while column < counts[row]:
            new = _append(nodes, weights, table, header, max_match, state, tokens[row, column])
            if new < 0:
                break
            state = new
            if pending == _SIDE_BY_SIDE:
                _count(nodes, weights, max_match, reached, added, pending)
                pending = 0
            reached[pending], added[pending] = state, own[sequence]
            pending += 1
            column += 1
        states[sequence] = state
        lengths[sequence] = nodes[state, LENGTH]
        if new < 0:
            break
        header[TOKENS] += counts[row]
        row += 1
        column = 0
    _count(nodes, weights, max_match, reached, added, pending)
    return row, column, -1 - new


# --- matching --------------------------------------------------------------------------------------------


@compiled
def current_state(nodes, state, length):
    """Returns the state that holds the string of this length now: it may have moved to a clone."""
    while True:
        link = nodes[state, LINK]
        if link < 0 or nodes[link, LENGTH] < length:
            return np.int64(state)
        state = np.int64(link)


@compiled
def advance(arena, contexts, batch):
    """Moves the state and length of followed contexts by tokens, to their longest suffix in the forest."""
    nodes, _, table, _, _ = arena
    states, lengths, _, _ = contexts
    sequences, tokens, counts = batch
    for row in range(sequences.shape[0]):
        length = np.int64(lengths[sequences[row]])
        state = current_state(nodes, np.int64(states[sequences[row]]), length)
        for column in range(counts[row]):
            target = find_edge(nodes, table, state, tokens[row, column])
            while target < 0 and nodes[state, LINK] >= 0:
                state = np.int64(nodes[state, LINK])
                length = np.int64(nodes[state, LENGTH])
                target = find_edge(nodes, table, state, tokens[row, column])
            if target >= 0:
                state, length = target, length + 1
        states[sequences[row]] = state
        lengths[sequences[row]] = length


@compiled
def context(nodes, state, length, limit):
    """Returns state and length of the longest suffix of at most `limit` tokens with a continuation.

    The string of this length belongs to the state, so the links, whose lengths are elsewhere in memory, are
    read only where it is too long or has no continuation.
    """
    while length > limit or nodes[state, TOKEN] == NONE:
        link = nodes[state, LINK]
        shorter = np.int64(nodes[link, LENGTH])
        if shorter < limit and nodes[state, TOKEN] != NONE:
            return state, limit
        state, length = np.int64(link), shorter
    return state, length
