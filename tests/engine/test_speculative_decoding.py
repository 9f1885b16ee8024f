"""Speculative decoding on a real transformer: token for token and bit for bit what plain decoding gives."""

import dataclasses

import numpy as np
import pytest

from rljax.engine.draft_tree import DraftTree, empty_tree
from rljax.sampling.distribution import SamplingParams
from tests.engines import (
    LONGEST,
    VOCAB,
    Asked,
    ask,
    decode,
    speculate,
    tangled,
    trained_logprobs,
    world_of,
)
from tests.exactness import check_same

GROUPED, SINGLE = "three", "one"
POLICIES = [(GROUPED, "float32"), (SINGLE, "float32"), (GROUPED, "bfloat16"), (SINGLE, "bfloat16")]


# -- drafts that know the answer ---------------------------------------------------------------------------


def chain(truth, then=0):
    """The true continuation, then the token `then`."""

    def draft(row, request, emitted):
        ahead = truth[request][len(emitted) :][: len(row.tokens)]
        row.tokens[:] = then
        row.tokens[: len(ahead)] = ahead
        row.parents[:] = np.arange(-1, len(row.tokens) - 1)
        row.valid[:] = True

    return draft


def lies(truth):
    """Trees that are full of everything but the true token."""

    def draft(row, request, emitted):
        if len(emitted) < len(truth[request]):
            depth = np.zeros(len(row.tokens), int)
            for node in range(len(row.tokens)):
                row.parents[node] = node // 2 - 1
                depth[node] = depth[row.parents[node]] + 1 if row.parents[node] >= 0 else 0
                place = min(len(emitted) + depth[node], len(truth[request]) - 1)
                row.tokens[node] = (truth[request][place] + 1 + node) % VOCAB
                row.valid[node] = True

    return draft


# -- bit for bit -------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=[*POLICIES[:3], pytest.param(POLICIES[3], marks=pytest.mark.long)], ids=" ".join
)
def world(request):
    return world_of(*request.param)


def check_sped_up(emitted, plain, tokens_a_pass):
    """Drafts were accepted, and wrong ones rejected."""
    assert sum(emitted.counts) == sum(len(tokens) for tokens, _ in plain)
    assert np.mean(emitted.counts) > tokens_a_pass and len(set(emitted.counts)) > 1


def test_trees_give_the_bits_of_plain_decoding(world):
    """Through finished slots, compaction, and the end of the first 256 keys."""
    emitted = speculate(world.engine, world.params, world.asked, tangled(world.truth), 7, capacity=LONGEST)
    check_same(emitted.outputs, world.plain)
    check_sped_up(emitted, world.plain, 2.0)


# Every policy has trees of 7 nodes above, also in fewer slots.
@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        *(pytest.param(POLICIES[0], nodes, marks=pytest.mark.accelerator(needed=False)) for nodes in (1, 31)),
        *(pytest.param(policy, 63, marks=pytest.mark.long) for policy in (POLICIES[0], POLICIES[3])),
    ],
)
def test_trees_of_any_size(policy, nodes):
    world = world_of(*policy)
    draft = tangled(world.truth)
    emitted = speculate(
        world.engine, world.params, world.asked, draft, nodes, capacity=LONGEST, compacting=False
    )
    check_same(emitted.outputs, world.plain)
    check_sped_up(emitted, world.plain, 1.3 if nodes == 1 else 4.0)


def test_chains_across_every_position_of_the_chunk_boundary():
    """Passes that begin at each of the positions before and behind the 256th key."""
    world = world_of(*POLICIES[0])
    prompt = world.asked[1].prompt + world.truth[1][:49]  # 249 tokens
    asked = [dataclasses.replace(world.asked[1], prompt=prompt[:length], limit=20) for length in (247, 248)]
    plain = decode(world.engine, world.params, asked, capacity=LONGEST)
    truth = [tokens for tokens, _ in plain]
    for first in range(1, 16):  # the first pass emits `first` tokens, all others up to 16

        def draft(row, request, emitted, first=first):
            chain(truth)(row, request, emitted)
            if not emitted:
                row.valid[first - 1 :] = False

        emitted = speculate(world.engine, world.params, asked, draft, 15, capacity=LONGEST)
        check_same(emitted.outputs, plain)
        assert emitted.counts[:2] == [first, first]


def test_caches_that_grow_and_slots_with_gaps():
    world = world_of(*POLICIES[0])
    members = [2, 0, 3]
    asked = [world.asked[i] for i in members]
    plain = [world.plain[i] for i in members]
    truth = [tokens for tokens, _ in plain]
    emitted = speculate(world.engine, world.params, asked, tangled(truth), 7, [4, 0, 2])
    check_same(emitted.outputs, plain)
    check_sped_up(emitted, plain, 2.0)


@pytest.mark.accelerator(needed=False)
@pytest.mark.parametrize("drafts", ["lies", "nothing"])
def test_a_drafter_that_always_lies_or_is_silent_costs_passes_only(drafts):
    world = world_of(*POLICIES[0])
    asked = [dataclasses.replace(each, limit=24) for each in world.asked]
    draft = lies(world.truth) if drafts == "lies" else lambda *_: None
    emitted = speculate(world.engine, world.params, asked, draft, 7, capacity=LONGEST)
    check_same(emitted.outputs, [(tokens[:24], logprobs[:24]) for tokens, logprobs in world.plain])
    assert emitted.passes == 24 and set(emitted.counts) == {1}


def test_some_nodes_of_some_slots():
    """Ragged passes: few rows for many slots, slots that stand still, trees of any size side by side."""
    world = world_of(*POLICIES[0])
    rng, size, shares = np.random.default_rng(0), 9, set()

    def take(active, tree):
        part = rng.permutation(active)[: rng.integers(1, len(active) + 1)]
        room = size - len(part)
        for slot in part:  # a prefix of each tree, so that no node is without its parent
            kept = int(rng.integers(0, room + 1))
            own = np.flatnonzero(tree.valid[slot])
            tree.valid[slot, own[kept:]] = False
            room -= min(kept, len(own))
        shares.add(len(part) / len(active))
        return part, size

    emitted = speculate(
        world.engine, world.params, world.asked, tangled(world.truth, 5), 7, capacity=LONGEST, take=take
    )
    check_same(emitted.outputs, world.plain)
    assert len(shares) > 3 and max(emitted.counts) > 4


@pytest.mark.parametrize(
    ("policy", "value"),
    list(zip([POLICIES[0], *POLICIES[:3]], (1e4, float("nan"), -3e38, float("inf")), strict=True)),
)
def test_what_is_not_committed_is_invisible(policy, value):
    """Rejected nodes, old entries and whatever else lies at or behind a slot's length."""
    world = world_of(*policy)
    limits = (280, 9, 9, 9)
    asked = [dataclasses.replace(each, limit=n) for each, n in zip(world.asked, limits, strict=True)]
    plain = [(tokens[:n], logprobs[:n]) for n, (tokens, logprobs) in zip(limits, world.plain, strict=True)]
    draft = tangled(world.truth, 3)
    check_same(
        speculate(world.engine, world.params, asked, draft, 7, capacity=LONGEST, poisoned=value).outputs,
        plain,
    )


def test_plain_and_speculative_decoding_take_turns():
    """Either continues from what the other has committed."""
    world = world_of(*POLICIES[0])
    state, outputs, draft = world.state(slots=4), [([], []) for _ in world.asked], tangled(world.truth)
    for turn in range(12):
        if turn % 2:
            state, result = world.engine.generate(world.params, state, 3)
        else:
            tree = empty_tree(state.batch, 7)
            for i in range(4):
                draft(DraftTree(tree.tokens[i], tree.parents[i], tree.valid[i]), i, outputs[i][0])
            state, pending = world.engine.verify(world.params, state, tree)
            result = pending.result()
        for i in range(4):
            valid = result.tokens[i] >= 0
            outputs[i][0].extend(result.tokens[i][valid].tolist())
            outputs[i][1].extend(result.logprobs[i][valid].tolist())
    for (tokens, logprobs), plain in zip(outputs, world.plain, strict=True):
        assert len(tokens) >= min(24, len(plain[0]))
        assert (tokens, logprobs) == (plain[0][: len(tokens)], plain[1][: len(tokens)])


# -- sampling distributions, ends, capacity ----------------------------------------------------------------


def policy_of(**others):
    """An engine and its weights."""
    world = world_of(*POLICIES[0], **others)
    return world.engine, world.params


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(temperature=0.0), marks=pytest.mark.long),
        SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01),
    ],
    ids=["greedy", "filtered"],
)
def test_sampling_distributions(sampling):
    engine, params = policy_of(sampling=sampling)
    asked = ask([5, 40], [80, 60])
    plain = decode(engine, params, asked, capacity=LONGEST)
    truth = [tokens for tokens, _ in plain]
    emitted = speculate(engine, params, asked, tangled(truth), 7, capacity=LONGEST)
    check_same(emitted.outputs, plain)
    check_sped_up(emitted, plain, 2.0)


def test_eos_inside_an_accepted_run_ends_it_there():
    endless, params = policy_of()
    ending, _ = policy_of(eos=(7, 8))
    cut = []
    for seed in range(12):
        asked = ask([4, 9], [48, 48], seed)
        truth = [tokens for tokens, _ in decode(endless, params, asked, capacity=LONGEST)]
        plain = decode(ending, params, asked, capacity=LONGEST)
        # Drafted beyond the end, and rightly.
        emitted = speculate(ending, params, asked, chain(truth), 15, capacity=LONGEST)
        check_same(emitted.outputs, plain)
        for (tokens, _), longer in zip(plain, truth, strict=True):
            assert tokens == longer[: len(tokens)]
            if len(tokens) < 48:
                assert tokens[-1] in (7, 8)
                cut.append(len(tokens) % 16)  # where in its pass of 16 tokens
    assert len(set(cut)) > 3 and any(1 < place < 15 for place in cut)


@pytest.mark.parametrize("limits", [(1, 16), (17, 8), (2, 33)])
def test_the_longest_response_ends_inside_an_accepted_run(limits):
    engine, params = policy_of()
    truth = [tokens for tokens, _ in decode(engine, params, ask([4, 9], [60, 60]), capacity=LONGEST)]
    asked = ask([4, 9], limits)
    plain = decode(engine, params, asked, capacity=LONGEST)
    emitted = speculate(engine, params, asked, chain(truth), 15, capacity=LONGEST)
    check_same(emitted.outputs, plain)
    assert [len(tokens) for tokens, _ in emitted.outputs] == list(limits)
    assert emitted.passes == -(-max(limits) // 16)


@pytest.mark.parametrize("prompt", [49, 60, 64])
def test_an_accepted_run_beyond_a_full_cache_waits_for_its_growth(prompt):
    """Up to the last position of the smaller cache, and up to the very last of the largest."""
    engine, params = policy_of()
    limit = LONGEST - prompt + 1
    asked = ask([prompt, 30], [limit, 90])
    plain = decode(engine, params, asked)
    truth = [tokens for tokens, _ in plain]
    for then in (chain(truth), tangled(truth, prompt)):
        emitted = speculate(engine, params, asked, then, 15)
        check_same(emitted.outputs, plain)
    first = speculate(engine, params, asked, chain(truth), 15, most=1)
    assert first.counts == [min(16, 64 - prompt + 1), 16]


def score(engine, params, prompt, tokens):
    """Log-probabilities of a response, as training computes them."""
    return trained_logprobs(engine, params, [Asked(prompt, None, 0)], [(tokens, [0.0] * len(tokens))])[0]


@pytest.mark.parametrize("rule", ["target_only", "rejection"])
def test_the_other_rules_end_and_fill_like_plain_decoding(rule):
    """Other tokens, but the same contract: ends, limits, and the distribution's own log-probabilities."""
    engine, params = policy_of(eos=(7, 8), rule=rule)
    plain_engine, _ = policy_of()
    asked = ask([50, 9], [60, 40])
    truth = [tokens for tokens, _ in decode(plain_engine, params, asked, capacity=LONGEST)]
    emitted = speculate(engine, params, asked, chain(truth), 15, capacity=LONGEST)
    for each, (tokens, logprobs) in zip(asked, emitted.outputs, strict=True):
        assert len(tokens) == each.limit or tokens[-1] in (7, 8)
        assert not set(tokens[:-1]) & {7, 8}
        assert logprobs == score(engine, params, each.prompt, tokens)
    assert max(emitted.counts) > 1
