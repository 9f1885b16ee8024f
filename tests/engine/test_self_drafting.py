"""Drafting on the target's cache: what it proposes, and that it leaves nothing behind."""

import functools

import jax
import numpy as np
import pytest

from drafters.quantized import QuantizedPolicy, WeightFormat
from rljax.sampling.distribution import SamplingParams
from tests.engines import BUCKETS, VOCAB, poison, world_of

NODES = BUCKETS.max_drafts
POLICIES = [("three", "float32"), ("three", "bfloat16"), ("one", "float32")]
FORMATS = {"w4": WeightFormat(4, 128), "w8a8": WeightFormat(8, 0, "int8")}
FORMATTED = list(zip(POLICIES, ("w4", "w8a8", "w4"), strict=True))


@pytest.fixture(scope="module", params=POLICIES, ids=" ".join)
def world(request):
    return world_of(*request.param)


@functools.lru_cache
def quantized(name, dtype, fmt):
    return QuantizedPolicy(FORMATS[fmt]).refresh(world_of(name, dtype).params)


def host(tree):
    """Copies: what a program consumes is written anew in place."""
    return jax.tree.map(np.array, tree)


def take(result, outputs):
    """Adds what was sampled to the (tokens, logprobs) of each request."""
    for slot, (tokens, logprobs) in enumerate(outputs):
        sampled = result.tokens[slot] >= 0
        tokens += result.tokens[slot][sampled].tolist()
        logprobs += result.logprobs[slot][sampled].tolist()


# -- what is drafted ---------------------------------------------------------------------------------------


def test_the_policy_itself_drafts_what_it_will_sample(world):
    """Tokens and log-probabilities, at every step to the end of every response."""
    state, emitted = world.state(), [([], []) for _ in world.asked]
    while np.asarray(state.active).any():
        left = np.asarray(state.remaining)[:4]
        state, drafts = world.engine.draft(world.params, state, NODES)
        drafts = host(drafts)
        state, result = world.engine.generate(world.params, state, max_steps=NODES)
        take(result, emitted)
        for slot in range(len(emitted)):
            count = min(NODES, max(left[slot] - 1, 0))
            drafted = drafts.tokens[slot] >= 0
            assert drafted.tolist() == [True] * count + [False] * (NODES - count)
            np.testing.assert_array_equal(drafts.tokens[slot][drafted], result.tokens[slot][:count])
            np.testing.assert_array_equal(drafts.logprobs[slot][drafted], result.logprobs[slot][:count])
            assert (drafts.margins[slot][drafted] > 0).all()
        assert (drafts.tokens[4] == -1).all()
    assert emitted == world.plain


def test_fewer_steps_are_the_beginning_of_more_by_the_same_program():
    world = world_of(*POLICIES[0])
    state, most = world.engine.draft(world.params, world.state(), NODES)
    most = host(most)
    compiled = len(world.engine.pool)
    for steps in (1, 2, 5):
        state, drafts = world.engine.draft(world.params, state, steps)
        drafts = host(drafts)
        for part in ("tokens", "logprobs", "margins"):
            np.testing.assert_array_equal(getattr(drafts, part)[:, :steps], getattr(most, part)[:, :steps])
        assert (drafts.tokens[:, steps:] == -1).all() and not drafts.logprobs[:, steps:].any()
    assert len(world.engine.pool) == compiled
    for steps in (0, NODES + 1):
        with pytest.raises(ValueError, match=f"cannot draft {steps} steps: buckets.max_drafts is 7"):
            world.engine.draft(world.params, state, steps)


def test_a_full_cache_ends_the_chain_and_an_idle_slot_has_none():
    world = world_of(*POLICIES[0])
    state = world.state([0, 2], capacity=64)  # prompts of 3 and 63: one position is left for the second
    state, drafts = world.engine.draft(world.params, state, NODES)
    counts = (host(drafts).tokens >= 0).sum(1)
    assert counts.tolist() == [7, 1, 0, 0, 0]
    state, pending = world.engine.verify(world.params, state, drafts.tree(NODES))
    result = pending.result()
    assert (result.tokens >= 0).sum(1).tolist() == [8, 2, 0, 0, 0]
    assert result.lengths[1] == 64  # full
    before = host(state)
    state, drafts = world.engine.draft(world.params, state, NODES)
    assert (host(drafts).tokens >= 0).sum(1).tolist() == [7, 0, 0, 0, 0]
    for part in ("keys", "values"):  # nor is anything written where the slot has no room
        for old, new in zip(getattr(before.cache, part), getattr(state.cache, part), strict=True):
            np.testing.assert_array_equal(np.asarray(new)[1], old[1])
    outputs = [world.plain[0][0], world.plain[2][0]]
    state, result = world.engine.generate(world.params, world.engine.grow(state), 20)
    assert result.tokens[0].tolist() == outputs[0][8:28]
    assert result.tokens[1].tolist() == outputs[1][2:22]


def test_nothing_is_drafted_behind_the_end_of_a_response():
    plain = world_of(*POLICIES[0]).plain
    ended = plain[0][0][4]
    world = world_of(*POLICIES[0], eos=(ended,))
    _, drafts = world.engine.draft(world.params, world.state(), NODES)
    for row, (tokens, _) in zip(host(drafts).tokens, plain, strict=False):
        wanted = tokens[:NODES]
        wanted = wanted[: wanted.index(ended) + 1] if ended in wanted else wanted
        assert row[: len(wanted)].tolist() == wanted and (row[len(wanted) :] == -1).all()
    assert host(drafts).tokens[0].tolist()[4:] == [ended, -1, -1]


def test_margins_are_how_far_the_noise_is_from_another_token():
    """And greedily, how far the logits are."""
    for temperature in (0.8, 0.0):
        world = world_of(*POLICIES[0], sampling=SamplingParams(temperature))
        _, drafts = world.engine.draft(world.params, world.state(), NODES)
        _, other = world.engine.draft(quantized(*POLICIES[0], "w8a8"), world.state(), NODES)
        drafts, other = host(drafts), host(other)
        agree = (drafts.tokens == other.tokens)[:4]
        first = agree.all(1)
        assert first.any()
        assert (drafts.margins[:4] > 0).all() and (drafts.margins <= 64).all()
        assert np.abs(drafts.margins - other.margins)[:4][first].max() < 1.0


# -- what is left behind -----------------------------------------------------------------------------------


@pytest.mark.default_cases("policy2-w4", "policy1-w8a8")
@pytest.mark.parametrize(("policy", "fmt"), FORMATTED)
def test_the_state_decodes_on_as_if_nothing_had_been_drafted(policy, fmt):
    """Also when everything that was written provisionally is poison."""
    world, drafter = world_of(*policy), quantized(*policy, fmt)
    for poisoned in (False, True):
        state, outputs = world.state(), [([], []) for _ in world.asked]
        for _ in range(4):
            state, _ = world.engine.draft(drafter, state, NODES)
            state = poison(state) if poisoned else state
            state, result = world.engine.generate(world.params, state, max_steps=5)
            take(result, outputs)
        assert outputs == [(tokens[:20], logprobs[:20]) for tokens, logprobs in world.plain]


def test_only_positions_behind_the_committed_ones_change():
    world = world_of(*POLICIES[0])
    state = world.state()
    before = host(state)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)]
    after, drafts = world.engine.draft(quantized(*POLICIES[0], "w8a8"), state, NODES)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after.cache)] == places
    jax.tree.map(np.testing.assert_array_equal, host(after.replace(cache=None)), before.replace(cache=None))
    for old, new in zip(before.cache.values, after.cache.values, strict=True):
        changed = (np.asarray(new) != old).any((1, 3))  # [B, S]
        for slot, length in enumerate(before.lengths):
            behind = np.flatnonzero(changed[slot])
            # An idle slot computes along at its first position, which no request ever reads unwritten.
            wanted = range(length, length + NODES) if before.active[slot] else range(length, length + 1)
            assert set(behind) <= set(wanted)
            assert not before.active[slot] or len(behind) == NODES
    assert (np.asarray(drafts.tokens)[:4] >= 0).all()


@pytest.mark.default_cases("policy2-w4", "policy1-w8a8")
@pytest.mark.parametrize(("policy", "fmt"), FORMATTED)
def test_drafts_verified_from_the_device_give_the_bits_of_plain_decoding(policy, fmt):
    world, drafter = world_of(*policy), quantized(*policy, fmt)
    state, emitted, passes = world.state(), [([], []) for _ in world.asked], 0
    sizes = (3, NODES) if fmt == "w8a8" else (NODES,)
    while np.asarray(state.active).any():
        nodes = sizes[passes % len(sizes)]
        state, drafts = world.engine.draft(drafter, state, nodes)
        state, pending = world.engine.verify(world.params, state, drafts.tree(nodes))
        take(pending.result(), emitted)
        passes += 1
    assert emitted == world.plain
    assert passes < max(len(tokens) for tokens, _ in world.plain) / 1.5


# -- the other rules ---------------------------------------------------------------------------------------


def test_rejection_takes_every_draft_of_the_policy_itself():
    """p = q, to the bit; and none of the drafts used the request's noise."""
    world = world_of(*POLICIES[0], rule="rejection")
    state, drafts = world.engine.draft(world.params, world.state(), NODES, with_proposal=True)
    proposal, tokens = np.asarray(drafts.proposal), np.asarray(drafts.tokens)
    assert proposal.shape == (5, NODES + 1, VOCAB)
    np.testing.assert_allclose(np.exp(proposal[:4, :NODES]).sum(-1), 1, rtol=1e-4)
    chosen = np.take_along_axis(proposal[:4, :NODES], tokens[:4, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(chosen, np.asarray(drafts.logprobs)[:4], rtol=0, atol=1e-5)
    _, coupled = world_of(*POLICIES[0]).engine.draft(world.params, world_of(*POLICIES[0]).state(), NODES)
    assert (np.asarray(coupled.tokens)[:4, 0] != tokens[:4, 0]).any()
    state, pending = world.engine.verify(world.params, state, drafts.tree(NODES), proposal=drafts.proposal)
    result = pending.result()
    np.testing.assert_array_equal(result.tokens[:4, :NODES], tokens[:4])
