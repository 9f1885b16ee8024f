"""Verification rules: every emitted token follows the model, whatever was drafted.

The model is a table: the logits behind a node are a function of the path's tokens. Thousands of requests are
decoded by passes of drafting and verification until each has emitted `EMITTED` tokens, and the tokens at
every position are compared with the model's distribution behind their own prefix (chi-square, summed over
the prefixes). Rules that are slightly wrong, as published systems offer them, must be told from right ones.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rljax.engine.draft_tree import DraftTree, all_rows, with_root
from rljax.engine.sampling import sample
from rljax.engine.verification import accepted_path, sample_nodes
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams, transform_logits
from rljax.sampling.noise import gumbel

NUMERICS = Numerics()
VOCAB, REQUESTS, EMITTED = 6, 12_000, 3
EXACT = 300  # requests, where tokens are compared one by one
STATES = 2003  # prefixes of up to four tokens have a row of their own; longer ones share
TABLE = np.random.default_rng(0).normal(0, 1.3, (STATES, VOCAB)).astype(np.float32)
START = 7  # position of the first emitted token

RIGHT, WRONG = 1e-4, 1e-6  # p-values: what a right rule stays above, what a wrong one must fall below


def next_state(state, token):
    return (state * VOCAB + token + 1) % STATES


# -- drafters ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drafter:
    """What it believes about every state, and how it picks the children of a node.

    Attributes:
      logits: float32 [STATES, VOCAB].
      drawn: tokens are drawn from the beliefs; False takes the likeliest ones.
    """

    logits: np.ndarray
    drawn: bool = False


_RNG = np.random.default_rng(1)
DRAFTERS = {
    "good": Drafter(TABLE + _RNG.normal(0, 0.4, TABLE.shape).astype(np.float32)),
    "useless": Drafter(-TABLE),
    "random": Drafter(np.zeros_like(TABLE), drawn=True),
    "good, drawn": Drafter(TABLE + _RNG.normal(0, 0.4, TABLE.shape).astype(np.float32), drawn=True),
    "useless, drawn": Drafter(-TABLE, drawn=True),
}

SHAPES = {
    "nothing": [],
    "one": [-1],
    "chain": [-1, 0, 1],
    "wide": [-1, -1, -1, -1],
    "everything": [-1] * VOCAB,
    "deep": [-1, 0, 1, 2, 3],
    "mixed": [-1, -1, 0, 0, 1, 2],
    "interleaved": [-1, 0, -1, 2, 0, 1, 2],
}


def propose(drafter, parents, state, rng, noise_ranked=None):
    """A tree of the given shape for every request, siblings distinct.

    Args:
      state: integers [B], of the last tokens.
      noise_ranked: float32 [B, N, VOCAB], added to the beliefs behind the parent of each node.

    Returns:
      tree, states [B, M] behind every node.
    """
    batch, nodes = len(state), len(parents)
    tokens = np.zeros((batch, nodes), np.int32)
    states = np.zeros((batch, nodes + 1), np.int64)
    states[:, 0] = state
    ranks = {}
    for node, parent in enumerate(parents):
        if parent not in ranks:
            scores = drafter.logits[states[:, parent + 1]]
            if drafter.drawn:
                scores = scores + rng.gumbel(size=scores.shape)
            if noise_ranked is not None:
                scores = scores + noise_ranked[:, node]
            ranks[parent] = iter(np.argsort(-scores, axis=1).T)
        tokens[:, node] = next(ranks[parent])
        states[:, node + 1] = next_state(states[:, parent + 1], tokens[:, node])
    parents = np.broadcast_to(np.asarray(parents, np.int32), (batch, nodes))
    return DraftTree(tokens=tokens, parents=parents, valid=np.ones((batch, nodes), bool)), states


# -- decoding with a rule ----------------------------------------------------------------------------------


@functools.cache
def rule_program(rule, params):
    """(logits, tree, keys, positions, proposal) -> (tokens, logprobs), [B, M]."""

    @jax.jit
    def run(logits, tree, keys, positions, proposal=None):
        flat, rows = logits.reshape(-1, logits.shape[-1]), all_rows(*positions.shape)
        return sample_nodes(rule, flat, tree, rows, keys, positions, params, NUMERICS, proposal)

    return run


PADDED = max(map(len, SHAPES.values()))


def padded(tree, states, *others):
    """Trees with as many nodes as the largest shape, of which those behind their own are invalid, so that one
    program serves all shapes; the other arrays [B, M, ...] as long as their `states`.
    """
    missing = PADDED - tree.tokens.shape[1]
    if missing in (0, PADDED) or missing < 0:  # trees of no node stay what they are
        return tree, states, *others
    longer = lambda x, fill: np.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)  # noqa: E731
    tree = DraftTree(longer(tree.tokens, 0), longer(tree.parents, -1), longer(tree.valid, False))
    return tree, *(longer(x, 0) for x in (states, *others))


_rooted, _accepted = jax.jit(with_root), jax.jit(accepted_path)


def decode(make_tree, choose, requests=REQUESTS, emitted=EMITTED, seed=0):
    """Passes of drafting and verification until every request has emitted enough.

    Args:
      make_tree: (state [B], keys [B, 2], positions [B] of the next token, rng) -> (tree, states [B, M]).
      choose: (logits [B, M, V], rooted tree, keys, positions [B, M]) -> (tokens, logprobs), [B, M].

    Returns:
      tokens int32 [B, emitted], logprobs float32 [B, emitted], nodes accepted a pass.
    """
    rng = np.random.default_rng(seed)
    keys = rng.integers(2**32, size=(requests, 2), dtype=np.uint32)
    state = np.zeros(requests, np.int64)
    last = np.zeros(requests, np.int32)
    done = np.zeros(requests, np.int64)
    out = np.zeros((requests, emitted), np.int32)
    chosen = np.zeros((requests, emitted), np.float32)
    accepted = []
    while done.min() < emitted:
        tree, states = padded(*make_tree(state, keys, (START + done).astype(np.int32), rng))
        rooted = _rooted(tree, last)
        positions = (START + done[:, None]).astype(np.int32) + np.asarray(rooted.depth)
        sampled, logprobs = choose(jnp.asarray(TABLE[states]), rooted, keys, positions)
        path, count = map(np.asarray, _accepted(rooted, jnp.asarray(sampled)))
        sampled, logprobs = np.asarray(sampled), np.asarray(logprobs)
        accepted.append(count.mean() - 1)
        rows = np.arange(requests)
        for depth in range(count.max()):
            on = depth < count
            node = path[:, depth]
            token = sampled[rows, node]
            keep = rows[on & (done < emitted)]
            out[keep, done[keep]], chosen[keep, done[keep]] = token[keep], logprobs[keep, node[keep]]
            state = np.where(on, next_state(state, token), state)
            last = np.where(on, token, last).astype(np.int32)
            done = np.where(on, done + 1, done)
    return out, chosen, accepted


@functools.cache
def distribution(params):
    """Probabilities of every state's next token, float64 [STATES, VOCAB]."""
    logits = np.asarray(jax.jit(lambda x: transform_logits(x, params, NUMERICS))(TABLE), np.float64)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def p_values(tokens, params):
    """Of chi-square at every emitted position, each token against the model behind its own prefix."""
    probs = distribution(params)
    state = np.zeros(len(tokens), np.int64)
    values = []
    for column in tokens.T:
        counts = np.zeros((STATES, VOCAB))
        np.add.at(counts, (state, column), 1)
        expected = counts.sum(axis=1, keepdims=True) * probs
        if counts[probs == 0].any():
            values.append(0.0)
        else:
            statistic, freedom = 0.0, 0
            seen_states = np.unique(state)
            for count, wanted in zip(counts[seen_states], expected[seen_states], strict=True):
                few = wanted < 5
                cells = [*zip(count[~few], wanted[~few], strict=True), (count[few].sum(), wanted[few].sum())]
                cells = [(seen, mean) for seen, mean in cells if mean > 1]
                statistic += sum((seen - mean) ** 2 / mean for seen, mean in cells)
                freedom += max(len(cells) - 1, 0)
            values.append(float(stats.chi2.sf(statistic, freedom)))
        state = next_state(state, column)
    return values


def check_logprobs(tokens, logprobs, params):
    probs, state = distribution(params), np.zeros(len(tokens), np.int64)
    for column, chosen in zip(tokens.T, logprobs.T, strict=True):
        np.testing.assert_allclose(chosen, np.log(probs[state, column]), rtol=1e-5, atol=2e-6)
        state = next_state(state, column)


PLAIN = SamplingParams()
PARAMS = {
    "T=1": PLAIN,
    "T=0.6": SamplingParams(temperature=0.6),
    "T=1.5": SamplingParams(temperature=1.5),
    "top-p": SamplingParams(top_p=0.8),
    "all": SamplingParams(temperature=1.2, top_k=5, top_p=0.9, min_p=0.02),
}
CASES = [  # every value at least once
    ("T=1", "nothing", "good"),
    ("T=0.6", "one", "good, drawn"),
    ("T=1.5", "chain", "useless"),
    ("T=1", "wide", "random"),
    ("top-p", "everything", "good"),
    ("all", "deep", "good, drawn"),
    ("top-p", "deep", "useless"),
    ("T=1", "mixed", "good"),
    ("T=1", "mixed", "useless, drawn"),
    ("T=1", "interleaved", "good"),
]


CHAINS = ("nothing", "one", "chain", "deep")


@pytest.mark.parametrize(
    ("rule", "params", "shape", "drafter"),
    [
        *[("target_only", *case) for case in CASES],
        *[("rejection", *case) for case in CASES if case[1] in CHAINS],
    ],
)
def test_emitted_tokens_follow_the_model(rule, params, shape, drafter):
    params, nodes = PARAMS[params], len(SHAPES[shape])
    tokens, logprobs, accepted = decode(trees_of(drafter, shape), rule_program(rule, params))
    assert min(p_values(tokens, params)) > RIGHT
    check_logprobs(tokens, logprobs, params)
    if nodes:  # both answers of the rule were needed
        assert 0.02 * (params.top_p == 1 or drafter != "useless") <= accepted[0] < nodes


# -- drafts from a known distribution ----------------------------------------------------------------------


def drawn_chain(drafter, q_params, length):
    """Chains whose tokens are drawn from the drafter's own sampling distribution, which comes along.

    Returns:
      (state, rng) -> (tree, states [B, M], proposal: log-probabilities float32 [B, M, V]).
    """

    log_q = jax.jit(lambda logits: jax.nn.log_softmax(transform_logits(logits, q_params, NUMERICS), axis=-1))
    table = np.asarray(log_q(drafter.logits))

    def make(state, rng):
        tree, states = propose(Drafter(table, drawn=True), range(-1, length - 1), state, rng)
        return tree, states, table[states]

    return make


def decode_drawn(make, choose, valid=1.0, **options):
    """`decode` with drafts and their distribution; of every chain's nodes a share `valid` is valid."""
    proposals = []

    def make_tree(state, keys, positions, rng):
        tree, states, proposal = make(state, rng)
        tree = tree.replace(valid=rng.random(tree.valid.shape) < valid)
        tree, states, proposal = padded(tree, states, proposal)
        proposals.append(jnp.asarray(proposal))
        return tree, states

    return decode(make_tree, lambda *args: choose(*args, proposals[-1]), **options)


@pytest.mark.parametrize(
    ("params", "drafter", "q", "length", "valid"),
    [
        ("T=1", "good", "T=0.6", 1, 1.0),
        ("T=1", "good", "top-p", 5, 0.7),
        ("T=1", "useless", "T=1", 3, 1.0),
        ("T=1", "random", "T=1", 3, 0.7),
        ("T=0.6", "good", "T=1", 3, 1.0),
        ("top-p", "good", "T=1", 1, 0.7),
        ("top-p", "useless", "top-p", 3, 1.0),
        ("all", "good", "T=0.6", 3, 0.7),
    ],
)
def test_rejection_of_drawn_drafts_follows_the_model(params, drafter, q, length, valid):
    make, params = drawn_chain(DRAFTERS[drafter], PARAMS[q], length), PARAMS[params]
    tokens, logprobs, accepted = decode_drawn(make, rule_program("rejection", params), valid)
    assert min(p_values(tokens, params)) > RIGHT
    check_logprobs(tokens, logprobs, params)
    assert 0.02 < accepted[0] < length


def test_rejection_takes_as_much_as_the_distributions_share():
    """Of the model itself, everything."""
    tokens, _, accepted = decode_drawn(
        drawn_chain(Drafter(TABLE), PLAIN, 3), rule_program("rejection", PLAIN)
    )
    assert accepted[0] > 2.999 and min(p_values(tokens, PLAIN)) > RIGHT
    drafter = DRAFTERS["good"]
    _, _, accepted = decode_drawn(drawn_chain(drafter, PLAIN, 1), rule_program("rejection", PLAIN))
    q = np.exp(drafter.logits[0] - np.logaddexp.reduce(drafter.logits[0]))
    assert abs(accepted[0] - np.minimum(distribution(PLAIN)[0], q).sum()) < 0.02


# -- trees that a careless drafter returns; coupled has the tokens of plain sampling -----------------------


@functools.cache
def plain_tokens(params, emitted):
    """One token after the other with `sample`, with the keys that `decode` draws."""
    program = jax.jit(lambda *args: sample(*args, params, NUMERICS))

    def choose(logits, tree, keys, positions):
        tokens, logprobs = program(logits[:, 0], keys, positions[:, 0])
        return tokens[:, None], logprobs[:, None]

    return decode(lambda state, *_: propose(DRAFTERS["good"], [], state, None), choose, EXACT, emitted)[:2]


def random_shape_trees(drafter, nodes):
    """Another shape for every request: random parents, repeated siblings and holes included."""

    def make_tree(state, keys, positions, rng):
        batch = len(state)
        tokens, parents = np.zeros((batch, nodes), np.int32), np.full((batch, nodes), -1, np.int32)
        states = np.zeros((batch, nodes + 1), np.int64)
        states[:, 0] = state
        for node in range(nodes):
            if node:
                branch = rng.integers(-1, node, size=batch)
                parents[:, node] = np.where(rng.random(batch) < 0.5, node - 1, branch)
            behind = states[np.arange(batch), parents[:, node] + 1]
            noisy = drafter.logits[behind] + rng.gumbel(size=(batch, VOCAB))
            tokens[:, node] = noisy.argmax(axis=1)
            states[:, node + 1] = next_state(behind, tokens[:, node])
        valid = rng.random((batch, nodes)) < 0.9
        return DraftTree(tokens=tokens, parents=parents, valid=valid), states

    return make_tree


def trees_of(drafter, shape):
    """Trees of one shape by a drafter."""
    return lambda state, keys, positions, rng: propose(DRAFTERS[drafter], SHAPES[shape], state, rng)


def repeated_trees(state, keys, positions, rng):
    """Nodes 0 and 1 are siblings with the same token and different children, the later with more."""
    tree, states = propose(DRAFTERS["good"], [-1, 0, 0, 0, 0], state, rng)
    # The later sibling's first child is the likelier one: most is to be gained by going on behind it.
    tokens = np.concatenate([tree.tokens[:, :1], tree.tokens[:, [0, 2, 1, 3]]], axis=1)
    parents = np.broadcast_to(np.array([-1, -1, 0, 1, 1], np.int32), tokens.shape)
    behind = np.concatenate([states[:, :2], states[:, [1, 3, 2, 4]]], axis=1)
    return DraftTree(tokens=tokens, parents=parents, valid=tree.valid), behind


@pytest.mark.parametrize(
    "make_tree", [repeated_trees, random_shape_trees(DRAFTERS["good"], 7)], ids=["repeated", "of any shape"]
)
def test_careless_trees(make_tree):
    tokens, logprobs, accepted = decode(make_tree, rule_program("target_only", PLAIN))
    assert min(p_values(tokens, PLAIN)) > RIGHT
    check_logprobs(tokens, logprobs, PLAIN)
    assert accepted[0] > 0.2


@pytest.mark.parametrize(
    ("params", "nodes", "drafter"),
    [
        ("T=1", 1, "good"),
        ("T=1", 63, "good"),
        ("all", 7, "random"),
        ("all", 63, "good"),
        ("greedy", 7, "good"),
    ],
)
def test_coupled_emits_the_tokens_of_plain_sampling(params, nodes, drafter):
    params, requests = PARAMS.get(params, SamplingParams(temperature=0.0)), min(EXACT, 6400 // nodes)
    expected_tokens, expected_logprobs = plain_tokens(params, 8)
    tokens, logprobs, accepted = decode(
        random_shape_trees(DRAFTERS[drafter], nodes), rule_program("coupled", params), requests, 8
    )
    np.testing.assert_array_equal(tokens, expected_tokens[:requests])
    np.testing.assert_array_equal(logprobs, expected_logprobs[:requests])
    assert max(accepted) > 0


@pytest.mark.parametrize(("rule", "drafter"), [("target_only", "good"), ("rejection", "useless")])
def test_greedy_is_greedy_under_every_rule(rule, drafter):
    greedy = SamplingParams(temperature=0.0)
    tokens, logprobs, _ = decode(trees_of(drafter, "chain"), rule_program(rule, greedy), EXACT, 8)
    np.testing.assert_array_equal(tokens, plain_tokens(greedy, 8)[0])
    np.testing.assert_array_equal(logprobs, np.zeros_like(logprobs))


# -- controls: what is almost right and must be told apart -------------------------------------------------


def at(values, tokens):
    return np.take_along_axis(values, tokens[:, :, None], axis=2)[:, :, 0]


def speculative_sampling(lenience):
    """Leviathan et al.'s rule in the place of `sample_nodes`, with randomness of its own: as it should be for
    lenience 1; below, drafts are taken more often, as behind the acceptance thresholds of published systems.
    """
    rng = np.random.default_rng(9)

    def choose(logits, tree, keys, positions, proposal):
        logprobs, proposal = np.asarray(jax.nn.log_softmax(logits, axis=-1)), np.asarray(proposal)
        noise, numbers = rng.gumbel(size=logprobs.shape), rng.random(logprobs.shape[:2])
        # The token drafted behind every node of a chain, and whether there is one.
        drafted, there = np.roll(tree.tokens, -1, axis=1), np.roll(tree.valid, -1, axis=1)
        there[:, -1] = False
        taken = there & (numbers * lenience < np.exp(at(logprobs, drafted) - at(proposal, drafted)))
        with np.errstate(divide="ignore"):
            rest = np.log(np.maximum(np.exp(logprobs) - np.exp(proposal), 0))
        rest = np.where(there[:, :, None] & np.isfinite(rest).any(axis=2, keepdims=True), rest, logprobs)
        tokens = np.where(taken, drafted, np.argmax(rest + noise, axis=2)).astype(np.int32)
        return tokens, at(logprobs, tokens)

    return choose


def second(values):
    """A p-value that two positions stay below."""
    return sorted(values)[1]


@pytest.mark.parametrize("lenience", [1.0, 0.9])
def test_a_rule_that_takes_too_much_is_noticed(lenience):
    make = drawn_chain(DRAFTERS["good"], PLAIN, 3)
    values = p_values(decode_drawn(make, speculative_sampling(lenience))[0], PLAIN)
    assert min(values) > RIGHT if lenience == 1.0 else second(values) < WRONG


@pytest.mark.parametrize("own_noise", [False, True])
def test_target_only_with_drafts_ranked_under_its_own_noise_is_noticed(own_noise):
    """Drafts that depend on the request's noise are for `coupled` only."""
    parents = SHAPES["chain"]
    vocabulary = np.arange(VOCAB, dtype=np.uint32)[None, None]

    def make_tree(state, keys, positions, rng):
        if not own_noise:
            keys = rng.integers(2**32, size=keys.shape, dtype=np.uint32)
        depth = np.arange(len(parents), dtype=np.int32)[None]
        each = np.broadcast_to(keys[:, None], (len(state), len(parents), 2))
        noise = np.asarray(gumbel(each, positions[:, None] + depth, vocabulary))
        return propose(DRAFTERS["random"], parents, state, rng, noise_ranked=noise)

    values = p_values(decode(make_tree, rule_program("target_only", PLAIN))[0], PLAIN)
    assert second(values) < WRONG if own_noise else min(values) > RIGHT
