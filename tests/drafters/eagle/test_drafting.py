"""Drafting against training's unrolled head, the reference that knows no cache and no tree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle.drafting import DraftStrategy, draft, empty_state, forget
from drafters.eagle.drafting_behind import draft_behind
from drafters.eagle.model import HeadConfig, head_logits
from drafters.eagle.objective import published_training
from drafters.eagle.training import head_loss
from drafters.eagle.unrolling import HeadBatch, unroll
from rljax.engine.draft_tree import with_root
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel, request_key
from tests.drafters.eagle.tiny import (
    NUMERICS,
    PAIRS,
    POLICY,
    jitted_absorb,
    jitted_draft,
    noisy,
    policy_states,
    rollouts,
    with_policy,
)

PLAIN = SamplingParams()
jitted_behind = jax.jit(draft_behind, static_argnames=("steps", "sampling"))
jitted_loss = jax.jit(head_loss, static_argnames="training")
COMMITTED = (PAIRS, 9)  # the policy's committed tokens, of two slots
TREE, CHAIN = DraftStrategy(depth=3, top_k=3, nodes=10), DraftStrategy(depth=4, top_k=1, nodes=4)
# Logits of the heads with opinions reach 55: sums in another order move them by units in the last place. A
# single position of the cache that is left out moves them by 0.008 or more.
ROUNDING = 16 * float(np.spacing(np.float32(55)))
KEYS = jnp.asarray(np.stack([request_key(1, 2), request_key(1, 3)]))
NOISE = {"eagle": KEYS, "eagle3": None, "block": KEYS}  # HASS is EAGLE, trained otherwise
EVERY_VARIANT = pytest.mark.parametrize("variant", NOISE)


def head(variant):
    return noisy(HeadConfig(variant, POLICY))


@functools.cache
def sequences(variant):
    """Tokens int32 [2, 32] and states [2, 32, S, d]."""
    tokens = rollouts(2, 32, 11)
    return tokens, np.stack(policy_states(head(variant)[0], tokens))


def absorbed(variant, counts=COMMITTED, first=None):
    """A state that has absorbed the first pairs of both sequences (from `first` on)."""
    state = empty_state(head(variant)[0], 2, 64, jnp.float32)
    return more(variant, state, (0, 0) if first is None else first, counts)


def more(variant, state, begins, ends, attended=None):
    """Absorbs pairs begins .. ends - 1 of each sequence."""
    tokens, states = sequences(variant)
    columns = np.minimum(np.asarray(begins)[:, None] + np.arange(PAIRS), 30)
    rows = np.arange(2)[:, None]
    counts = np.asarray(ends, np.int32) - np.asarray(begins, np.int32)
    args = (states[rows, columns], tokens[rows, columns + 1], counts)
    return jitted_absorb(with_policy(*head(variant)), state.replace(attended=attended), *args)


def drafted(variant, state, strategy, keys=None, sampling=PLAIN, attended=None):
    state, positions = state.replace(attended=attended), jnp.asarray(COMMITTED, jnp.int32)
    return jitted_draft(with_policy(*head(variant)), state, positions, keys, strategy, sampling)


@functools.partial(jax.jit, static_argnames=("variant", "steps"))
def _unrolled(tokens, states, variant, steps):
    of_head = with_policy(*head(variant))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    ones = jnp.ones_like(tokens)
    batch = HeadBatch(tokens, positions, ones, ones > 0, states)
    return head_logits(of_head, jnp.stack(unroll(of_head, batch, steps)))


def reference(variant, slot, path):
    """Logits [len(path) + 1, V] behind a slot's last token and behind each token of a drafted path, by one
    uncached pass of the training code over the sequence with that path in it. What the policy's states are
    beyond the committed tokens is not to be known: they are poison.
    """
    tokens, states = sequences(variant)
    n = COMMITTED[slot]
    row, known = np.zeros((1, 40), np.int32), np.full((1, 40, *states.shape[2:]), 1e3, np.float32)
    row[0, : n + 1], row[0, n + 1 : n + 1 + len(path)] = tokens[slot, : n + 1], path
    known[0, :n] = states[slot, :n]
    return np.asarray(_unrolled(row, known, variant, TREE.depth))[: len(path) + 1, 0, n - 1]


@jax.jit
def _noise(key, position):
    return gumbel(key, position, jnp.arange(POLICY.vocab_size, dtype=jnp.uint32))


def scores(logits, slot, depth, keys):
    """log softmax(log q + G) of the token `depth` behind the last one, or log q."""
    logits = np.asarray(logits, np.float64)
    if keys is not None:
        logits = logits + np.asarray(_noise(np.asarray(keys)[slot], np.int32(COMMITTED[slot] + depth)))
    return logits - np.logaddexp.reduce(logits)


def paths(tree, slot):
    """Every node's tokens from the first level on."""
    tokens, parents = np.asarray(tree.tree.tokens)[slot], np.asarray(tree.tree.parents)[slot]
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), int(token)])
    return found


@pytest.mark.long  # test_head_drafting.py has a wider state
@pytest.mark.parametrize("variant", ["eagle3", "block"])
def test_drafts_do_not_depend_on_how_much_of_the_cache_is_read(variant):
    """64 of 192 positions, or all of 64."""
    trees, states = [], []
    for room, attended in ((192, 64), (64, None)):
        state = empty_state(head(variant)[0], 2, room, jnp.float32)
        for begins, ends in (((0, 0), (15, 4)), ((15, 4), COMMITTED)):
            state = more(variant, state, begins, ends, attended)
        trees.append(drafted(variant, state, TREE, NOISE[variant], attended=attended))
        states.append((state.outputs, state.cache.values[0][:, :, :64]))
    assert trees[0].tree.valid.all()
    jax.tree.map(np.testing.assert_array_equal, trees[1].tree, trees[0].tree)
    np.testing.assert_allclose(trees[1].log_probability, trees[0].log_probability, atol=ROUNDING)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), *states)


@pytest.mark.parametrize("variant", ["eagle3", "block"])
def test_a_draft_costs_what_it_reads_not_what_the_cache_has_room_for(variant):
    config, params = head(variant)

    def operations(room, attended):
        state = empty_state(config, 2, room, jnp.float32).replace(attended=attended)
        static = {"strategy": DraftStrategy(4, 2, 8), "sampling": PLAIN}
        lowered = jax.jit(functools.partial(draft, **static)).lower(
            with_policy(config, params), state, positions=jnp.zeros(2, jnp.int32), noise_keys=None
        )
        return lowered.cost_analysis()["flops"]

    assert operations(4096, 256) < 1.1 * operations(256, None) < 0.5 * operations(4096, None)


def test_behind_an_unanswered_chain_the_draft_goes_on():
    """Each slot has another number of unanswered drafts, one of them none."""
    config, params = head("eagle3")
    whole = drafted("eagle3", absorbed("eagle3"), CHAIN, KEYS)
    counts, given, steps = (2, 0), 3, 2
    chains = np.full((2, given), -1, np.int32)
    chains[0, given - counts[0] :] = np.asarray(whole.tree.tokens)[0, : counts[0]]
    empty = forget(absorbed("eagle3"), jnp.asarray([False, True]))
    behind, nothing = (
        jitted_behind(
            with_policy(config, params), state, chains, np.asarray(COMMITTED, np.int32), KEYS, steps, PLAIN
        )
        for state in (absorbed("eagle3"), empty)
    )
    for slot, count in enumerate(counts):
        expected = np.asarray(whole.tree.tokens)[slot, count : count + steps]
        np.testing.assert_array_equal(behind.tree.tokens[slot], expected)
        scores = np.asarray(whole.log_probability)[slot]
        expected = scores[count : count + steps] - (scores[count - 1] if count else 0.0)
        np.testing.assert_allclose(behind.log_probability[slot], expected, atol=ROUNDING)
    np.testing.assert_array_equal(nothing.tree.tokens[0], behind.tree.tokens[0])
    assert not nothing.tree.valid[1].any() and (nothing.tree.tokens[1] == -1).all()


@pytest.mark.default_cases("eagle", "eagle3")
@EVERY_VARIANT
def test_a_tree_is_what_training_unrolls(variant):
    """Nodes have the probabilities that training unrolls; the tree is EAGLE-2's, grown in plain Python."""
    keys, k = NOISE[variant], TREE.top_k
    tree = drafted(variant, absorbed(variant), TREE, keys)
    for slot in range(2):
        candidates, frontier = {}, {(): 0.0}
        for level in range(TREE.depth):
            grown = {}
            for path, score in frontier.items():
                behind = scores(reference(variant, slot, path)[-1], slot, level + 1, keys)
                for token in np.argsort(-behind)[:k]:
                    grown[(*path, int(token))] = score + behind[token]
            candidates |= grown
            frontier = dict(sorted(grown.items(), key=lambda item: -item[1])[:k])
        expected = sorted(candidates.items(), key=lambda item: -item[1])[: TREE.nodes]
        found = dict(zip(map(tuple, paths(tree, slot)), np.asarray(tree.log_probability)[slot], strict=True))
        assert set(found) == {path for path, _ in expected}
        for path, score in expected:
            np.testing.assert_allclose(found[path], score, atol=ROUNDING)
    assert np.all(np.diff(np.asarray(tree.log_probability)) <= 0)
    assert np.all(np.asarray(tree.tree.parents) < np.arange(TREE.nodes))
    with_root(tree.tree, jnp.zeros((2,), jnp.int32))  # what verification makes of it


@EVERY_VARIANT
def test_absorbing_in_pieces(variant):
    """Prompt, single steps and verified paths of any length: the same state as all at once."""
    whole = absorbed(variant)
    state = absorbed(variant, (7, 2))
    for begins, ends in [((7, 2), (8, 3)), ((8, 3), (13, 3)), ((13, 3), (20, 9))]:
        state = more(variant, state, begins, ends)
    np.testing.assert_array_equal(state.lengths, whole.lengths)
    np.testing.assert_allclose(state.outputs, whole.outputs, atol=2e-5)
    for slot, n in enumerate(COMMITTED):
        np.testing.assert_allclose(
            state.cache.values[0][slot, :, :n], whole.cache.values[0][slot, :, :n], atol=2e-5
        )


def test_slots_do_not_see_each_other_and_forgotten_ones_draft_nothing():
    state = absorbed("eagle")
    other = dataclasses.replace(
        state, outputs=state.outputs.at[1].set(7.0), lengths=state.lengths.at[1].set(1)
    )
    first, second = (drafted("eagle", each, TREE, KEYS) for each in (state, other))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), first, second)
    assert not np.array_equal(first.tree.tokens[1], second.tree.tokens[1])
    tree = drafted("eagle", forget(state, jnp.asarray([False, True])), TREE, KEYS)
    np.testing.assert_array_equal(tree.tree.valid, [[True] * 10, [False] * 10])
    assert np.all(np.isneginf(tree.log_probability[1]))


def test_beginning_late_is_beginning():
    """A head that missed the first pairs drafts as one for which the response began there."""
    tokens, states = sequences("eagle3")
    state = absorbed("eagle3", first=(5, 5))
    np.testing.assert_array_equal(state.lengths, [15, 4])
    tree = drafted("eagle3", state, TREE)
    row, known = np.zeros((1, 40), np.int32), np.zeros((1, 40, *states.shape[2:]), np.float32)
    row[0, :27], known[0, :27] = tokens[0, 5:], states[0, 5:]
    assert tree.tree.tokens[0, 0] == np.argmax(_unrolled(row, known, "eagle3", TREE.depth)[0, 0, 14])


def test_filters_apply_to_the_draft_and_greedy_ignores_the_noise():
    """Nothing is proposed that the policy's sampling filter would leave out of the head's distribution."""
    state = absorbed("eagle3")
    tree = drafted("eagle3", state, DraftStrategy(2, 4, 8), KEYS, SamplingParams(top_k=2))
    first_level = np.asarray(tree.tree.valid & (tree.tree.parents == -1))
    assert np.all(first_level.sum(axis=1) <= 2)
    for slot in range(2):
        allowed = set(np.argsort(-reference("eagle3", slot, [])[0])[:2].tolist())
        assert set(np.asarray(tree.tree.tokens)[slot, first_level[slot]].tolist()) <= allowed
    greedy = drafted("eagle3", state, TREE, KEYS, SamplingParams(temperature=0.0))
    jax.tree.map(np.testing.assert_array_equal, greedy, drafted("eagle3", state, TREE))


def test_what_lies_behind_the_absorbed_pairs_is_invisible_and_a_full_cache_takes_no_more():
    state = absorbed("eagle")
    behind = jnp.arange(64)[None, None, :, None] >= state.lengths[:, None, None, None]
    keys = state.cache.keys[0].swapaxes(3, 4).reshape(2, 2, 64, 16)
    keys = jnp.where(behind, 1e3, keys).reshape(2, 2, 1, 64, 16).swapaxes(3, 4)
    values = jnp.where(behind, 1e3, state.cache.values[0])
    cache = dataclasses.replace(state.cache, keys=[keys], values=[values])
    trees = (drafted("eagle", each, TREE, KEYS) for each in (state, dataclasses.replace(state, cache=cache)))
    jax.tree.map(np.testing.assert_array_equal, *trees)
    full = dataclasses.replace(state, lengths=jnp.asarray([64, 9], jnp.int32))
    np.testing.assert_array_equal(more("eagle", full, (20, 9), (23, 12)).lengths, [64, 12])


def test_impossible_trees_are_refused():
    for tree, message in ((2, 2, 7), "1 to 6"), ((0, 2, 1), "at least 1"):
        with pytest.raises(ValueError, match=message):
            DraftStrategy(*tree)


def test_bfloat16():
    """The engine's own numerics on an accelerator: a chain close to float32's, and a loss."""
    variant = "eagle3"
    config, params = head(variant)
    tokens, states = sequences(variant)
    numerics = Numerics(compute_dtype="bfloat16")
    state = empty_state(config, 2, 64, jnp.bfloat16)
    counts = jnp.asarray(COMMITTED, jnp.int32)
    args = (jnp.asarray(states[:, :20], jnp.bfloat16), tokens[:, 1:21], counts)
    state = jitted_absorb(with_policy(config, params, numerics), state, *args)
    tree = jitted_draft(with_policy(config, params, numerics), state, counts, KEYS, CHAIN, PLAIN)
    exact = drafted(variant, absorbed(variant), CHAIN, KEYS)
    np.testing.assert_allclose(tree.log_probability[:, 0], exact.log_probability[:, 0], atol=0.2)
    assert np.all(tree.tree.valid)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape)
    halves = jnp.asarray(states, jnp.bfloat16)
    batch = HeadBatch(tokens, positions, np.ones_like(tokens), tokens >= 0, halves)
    training = dataclasses.replace(published_training(variant), steps=1)
    losses = [jitted_loss(with_policy(config, params, n), training, batch)[0] for n in (NUMERICS, numerics)]
    np.testing.assert_allclose(*losses, rtol=0.05)
