"""A small model beside the target: what it drafts, whatever happened in between; it changes no token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.companion import Companion
from rljax.engine.draft_tree import pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.engine.shapes import Shapes
from rljax.models.config import ModelConfig
from tests import engines
from tests.engines import BUCKETS, PROMPTS, SAMPLING, VOCAB, World, ask, lively_params, stored_pool

NODES = BUCKETS.max_drafts
OTHER = ModelConfig("llama", VOCAB, 32, 1, 2, 1, 32, 64)
SHORT = ModelConfig("llama", VOCAB - 30, 32, 1, 2, 1, 32, 64)
LIMITS = (50, 70, 40, 25)
ASKED = ask(PROMPTS, LIMITS)


def world_of(dtype="float32"):
    return engines.world_of("three", dtype, limits=LIMITS)


def other_of(buckets, rule="coupled"):
    """The small model as a policy, with a pool of its own."""
    numerics = world_of().engine.numerics  # any would do
    engine = DecodeEngine(OTHER, numerics, SAMPLING, buckets, (), 64, stored_pool(), verification=rule)
    return World(engine, engine.load_params(lively_params(OTHER)), ASKED)


class Pair:
    """A target and a companion that is told everything, decoding requests in their slots."""

    def __init__(self, world, companion, members=(0, 1, 2, 3), slots=5, capacity=512):
        self.world, self.engine, self.params = world, world.engine, world.params
        self.companion, self.slots, self.emitted = companion, {}, [[] for _ in ASKED]
        self.state = self.engine.init_state(slots, capacity)
        self.companion.begin(self.state.batch, self.state.cache.length)
        self.insert(members)

    def insert(self, members):
        """Requests enter the first free slots."""
        free = [slot for slot in range(self.state.batch) if slot not in self.slots]
        prompts = [ASKED[i].prompt for i in members]
        prefix = self.engine.prefill(self.params, prompts)
        placed = [Assignment(row, free[row], ASKED[i].key, ASKED[i].limit) for row, i in enumerate(members)]
        self.state = self.engine.bulk_insert(prefix, self.state, placed)
        self.companion.enter([each.slot for each in placed], prompts)
        self.slots |= dict(zip(free, members, strict=False))

    def draft(self, steps=NODES):
        self.drafts = self.companion.draft_chains(self.state, steps)
        return self.drafts

    def drafted(self):
        """The tokens of new chains, [B, NODES]."""
        return np.asarray(self.draft().tokens)

    def verify(self, spoil=None):
        """Verifies the chains; of slots in `spoil` the draft at that depth is made another token."""
        tree = jax.tree.map(np.array, self.drafts.tree(NODES))
        for slot, depth in (spoil or {}).items():
            tree.tokens[slot, depth] = (tree.tokens[slot, depth] + 1) % VOCAB
        self.state, pending = self.engine.verify(self.params, self.state, tree)
        return self.take(pending.result())

    def plain(self, steps):
        self.state, result = self.engine.generate(self.params, self.state, steps)
        return self.take(result)

    def take(self, result):
        """What was sampled, for the companion and for the record; ended requests leave. Tokens a slot got."""
        counts = (result.tokens >= 0).sum(axis=1)
        slots = np.asarray(list(self.slots), np.int32)
        self.companion.follow(slots, result.tokens[slots], counts[slots])
        for slot in slots:
            self.emitted[self.slots[slot]] += result.tokens[slot, : counts[slot]].tolist()
        ended = [slot for slot in slots.tolist() if not result.active[slot]]
        self.companion.forget(ended)
        self.slots = {slot: i for slot, i in self.slots.items() if slot not in ended}
        if any(result.lengths[slot] >= self.state.cache.length for slot in self.slots):
            self.state = self.engine.grow(self.state)
        return counts

    def compact(self):
        kept = list(self.slots)
        self.state = self.engine.compact(self.state, kept)
        self.companion.compact(kept)
        self.slots = {new: self.slots[old] for new, old in enumerate(kept)}

    def widen(self, slots):
        self.state = self.engine.widen(self.state, slots)
        self.companion.widen(slots)

    def check_drafts(self, steps=NODES):
        """Drafts, which must be what plain decoding samples next, to the end of every response."""
        tokens, wanted = np.asarray(self.draft(steps).tokens), [[] for _ in range(self.state.batch)]
        for slot, index in self.slots.items():
            done = len(self.emitted[index])
            room = min(ASKED[index].limit, self.state.cache.length - len(ASKED[index].prompt) + 1) - done
            wanted[slot] = self.world.truth[index][done : done + min(steps, max(room - 1, 0))]
        assert [row[row >= 0].tolist() for row in tokens] == wanted


def itself(world):
    """The policy as its own companion."""
    return Companion(world.engine, world.engine.config, lively_params(world.engine.config))


def stranger(world, config=OTHER):
    """A small model that has nothing to do with the policy."""
    return Companion(world.engine, config, lively_params(config, seed=5))


# -- a companion that is the policy ------------------------------------------------------------------------


@pytest.mark.default_cases("one shape")  # test_head_drafting.py has a wider state
@pytest.mark.parametrize(
    ("members", "capacity"),
    [((0, 1, 2, 3), 512), ((3, 0, 2), 64)],
    ids=["one shape", "through compaction and growth"],
)
def test_the_policy_beside_itself_drafts_what_will_be_sampled(members, capacity):
    """After passes that took all, some and none of the drafts, of chains of every length; requests move while
    what drafting wrote is still to be used.
    """
    world, moves = world_of(), capacity == 64
    pair, rng, taken = Pair(world, itself(world), members, capacity=capacity), np.random.default_rng(0), set()
    lengths, batches = set(), set()
    while pair.slots:
        lengths.add(pair.state.cache.length)
        batches.add(pair.state.batch)
        steps = int(rng.choice([1, 2, 4, NODES, NODES]))
        pair.check_drafts(steps)
        spoil = {slot: int(rng.integers(steps)) for slot in pair.slots if rng.random() < 0.5}
        taken |= set(pair.verify(spoil).tolist())
        if moves and pair.slots and world.engine.buckets.batch_for(len(pair.slots)) < pair.state.batch:
            assert list(pair.slots) != list(range(len(pair.slots)))
            pair.compact()
    assert [pair.emitted[i] for i in members] == [world.truth[i] for i in members]
    assert taken >= {1, 2, 4, 8}
    assert lengths == {capacity, 512} and batches == ({2, 5} if moves else {5})


def test_after_plain_steps_and_chains_that_were_not_verified():
    world = world_of()
    pair = Pair(world, itself(world))
    for steps in (1, 5, 20, 2):  # fewer and more tokens than a chain, and than a pass that catches up
        pair.check_drafts()
        pair.plain(steps)
    pair.check_drafts()
    pair.plain(1)
    pair.plain(16)  # twice, without drafting in between
    while pair.slots:
        pair.check_drafts()
        pair.verify()
    assert pair.emitted == world.truth


def test_requests_that_come_later():
    """Into a wider state, a slot that another left, and one that has been decoding for a while."""
    world = world_of()
    pair = Pair(world, itself(world), members=(3,), slots=2)
    pair.check_drafts()
    pair.verify()
    pair.draft()  # what drafting wrote goes along
    pair.widen(3)
    assert pair.state.batch == pair.companion.batch == 5
    pair.insert((2,))
    pair.check_drafts()
    pair.verify()
    while len(pair.slots) > 1:
        pair.plain(1)
    pair.insert((0,))
    assert pair.slots == {0: 0, 1: 2}
    pair.check_drafts()
    pair.companion.forget([1])
    tokens = pair.drafted()
    assert (tokens[1] == -1).all() and (tokens[0] >= 0).all()
    pair.companion.enter([1], [ASKED[2].prompt + pair.emitted[2]])
    pair.check_drafts()


def test_prompts_of_a_group_are_prefilled_once(monkeypatch):
    world = world_of()
    companion, prefilled = itself(world), []
    prefill = companion.engine.prefill

    def recorded(params, prompts):
        prefilled.extend(prompts)
        return prefill(params, prompts)

    monkeypatch.setattr(companion.engine, "prefill", recorded)
    companion.begin(5, 512)
    first, second, third = (tuple(ASKED[i].prompt) for i in (0, 1, 2))
    companion.enter([0, 1, 2], [first, second, first])
    companion.enter([3, 4], [second, third])
    assert sorted(map(len, prefilled)) == [3, 63, 200]


# -- what follows the target -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_what_drafting_wrote_is_as_good_as_what_is_computed_afterwards(dtype):
    """One companion drafts before every pass; the other hears of tokens only, and computes them all."""
    world = world_of(dtype=dtype)
    pair, second = Pair(world, itself(world)), itself(world)
    second.begin(5, 512)
    second.enter(range(4), [each.prompt for each in ASKED])
    told = 0
    for spoil in ({}, {0: 0, 1: 2, 2: 6}, {3: 1}):
        pair.draft()
        before = {slot: len(pair.emitted[i]) for slot, i in pair.slots.items()}
        counts = pair.verify(spoil)
        told += int(counts.sum())
        tokens = np.full((4, counts.max()), -1, np.int32)
        for slot, start in before.items():
            tokens[slot, : counts[slot]] = pair.emitted[slot][start:]
        second.follow(range(4), tokens, counts[:4])
    ours, theirs = pair.draft(), second.draft_chains(pair.state, NODES)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=tolerance)
    # Every token was computed once: by drafting, unless a whole chain came true.
    assert second.extended == told
    assert pair.companion.extended == 4 + 1 + 3
    lengths = np.asarray(pair.state.lengths)
    for one, other in zip(pair.companion._state.cache.values, second._state.cache.values, strict=True):
        for slot, length in enumerate(lengths[:4]):
            np.testing.assert_allclose(
                np.asarray(one)[slot, :, :length], np.asarray(other)[slot, :, :length], rtol=0, atol=tolerance
            )


@pytest.mark.long  # what drafting wrote: above
def test_drafts_do_not_depend_on_what_was_drafted_before():
    """Against a companion that is told everything at once: chains that came true in part, in plain decoding,
    and tokens that are those of an older chain again.
    """
    world = world_of()
    pair, fresh = Pair(world, stranger(world)), stranger(world)
    pair.draft()
    pair.plain(5)
    chain = pair.drafted()[:4]
    state = jax.tree.map(np.asarray, pair.state)
    known = [each.prompt + pair.emitted[i] for i, each in enumerate(ASKED)]
    for agrees in (0, 1, 3):
        told = np.concatenate([chain[:, :agrees], (chain[:, agrees : agrees + 3] + 1) % VOCAB], axis=1)
        pair.companion.follow(range(4), told, np.full(4, agrees + 3))
        pair.companion.follow(range(4), chain, np.full(4, 3))
        news = zip(known, told.tolist(), chain.tolist(), strict=True)
        known = [[*tokens, *own, *old[:3]] for tokens, own, old in news]
        last, sizes = [[tokens[-1] for tokens in known] + [0], [len(tokens) for tokens in known] + [1]]
        state = state.replace(tokens=np.asarray(last, np.int32), lengths=np.asarray(sizes, np.int32) - 1)
        target = jax.tree.map(jnp.asarray, state)
        fresh.begin(5, 512)
        fresh.enter(range(4), known)
        ours, theirs = pair.companion.draft_chains(target, NODES), fresh.draft_chains(target, NODES)
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        chain = np.asarray(ours.tokens)[:4]
        assert (chain >= 0).all()


def test_slots_whose_tokens_are_not_told_yet_draft_nothing_and_lose_nothing():
    """Halves in turn: chains for one half are drafted while a pass over the other is in progress."""
    world = world_of()
    pair = Pair(world, itself(world))
    pair.check_drafts()
    tree = jax.tree.map(np.array, pair.drafts.tree(NODES))
    tree.tokens[0, 3] += 1
    tree.valid[2:] = False
    rows = pack_rows(tree, np.asarray([0, 1]), 20)
    pair.state, pending = pair.engine.verify(pair.params, pair.state, tree, rows)
    tokens = pair.drafted()
    assert (tokens[:2] == -1).all()
    for slot in (2, 3):
        assert tokens[slot].tolist() == world.truth[slot][:NODES]
    result = pending.result()
    assert (result.tokens >= 0).sum(axis=1).tolist() == [4, 8, 0, 0, 0]
    extended = pair.companion.extended
    pair.take(result)
    pair.check_drafts()
    assert pair.companion.extended == extended + 1  # the last draft of the chain that came true


# -- a companion that knows nothing ------------------------------------------------------------------------


@pytest.mark.long  # test_self_drafting.py has rejection
def test_rejection_gets_a_proposal_as_wide_as_the_vocabulary():
    world = other_of(Buckets((5,), (64,), (40,), NODES), rule="rejection")
    pair = Pair(world, itself(world), members=(0, 3), capacity=64)
    drafts = pair.companion.draft_chains(pair.state, NODES, with_proposal=True)
    _, pending = pair.engine.verify(pair.params, pair.state, drafts.tree(NODES), proposal=drafts.proposal)
    tokens = pending.result().tokens
    np.testing.assert_array_equal(tokens[:2, :NODES], np.asarray(drafts.tokens)[:2])  # p = q
    short = stranger(world, SHORT)
    pair = Pair(world, short, members=(0, 3), capacity=64)
    drafts = short.draft_chains(pair.state, NODES, with_proposal=True)
    proposal = np.asarray(drafts.proposal)
    assert proposal.shape == (5, NODES + 1, VOCAB) and (proposal[..., VOCAB - 30 :] == -np.inf).all()
    _, pending = pair.engine.verify(pair.params, pair.state, drafts.tree(NODES), proposal=drafts.proposal)
    result = pending.result()
    assert np.isfinite(result.logprobs[:2][result.tokens[:2] >= 0]).all()


# -- the contract ------------------------------------------------------------------------------------------


def test_a_companion_that_knows_more_tokens_is_refused():
    with pytest.raises(ValueError, match="vocab_size: 97 is more than the target's 96"):
        stranger(world_of(), ModelConfig("llama", VOCAB + 1, 32, 1, 2, 1, 32, 64))


def test_warm_programs_serve_the_rollout():
    world = other_of(Buckets((2, 4), (64, 128), (40,), NODES))
    companion = itself(world)
    # The target begins with a longer cache than the companion does.
    shapes = Shapes(world.engine.buckets, 4, 16, first_prompts=[64], late_inserts=True, widens=True)
    for batch in (2, 4):
        companion.compile(shapes, batch, shapes.lengths, lambda: False)
    compiled = len(world.engine.pool)
    companion.begin(4, 64)
    companion.enter(range(4), [[1 + slot] * (3 * slot + 4) for slot in range(4)])
    for batch, length in ((4, 64), (4, 128), (2, 128)):
        if batch == 2:
            companion.compact([3, 1])
        companion.draft_chains(world.engine.init_state(batch, length), NODES)
        for count in (1, 9):
            companion.follow(range(batch), np.ones((batch, count), np.int32), np.full(batch, count))
    companion.begin(2, 64)
    companion.enter([1], [[1] * 4])  # which was prefilled with more prompts than are inserted here
    for batch in (2, 4):
        companion.widen(batch)
        companion.draft_chains(world.engine.init_state(batch, 64), NODES)
    assert companion.extended == 0 and len(world.engine.pool) == compiled
