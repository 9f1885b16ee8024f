"""A head that follows the slots: the tokens are those of plain decoding, whatever it knows and learns."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.base import DraftRequest
from drafters.eagle.checkpoint import load_head
from drafters.eagle.head_state import FrozenHead
from drafters.eagle.slots import attended_lengths
from drafters.registry import make_drafter, states_read
from rljax.engine.buckets import Buckets
from rljax.engine.host_sync import Assignment
from rljax.engine.shapes import warm_up_plain
from rljax.errors import CheckpointError
from rljax.models import transformer
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from rljax.rollout.collector import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.noise import request_key
from rljax.speculation.speculator import Speculator
from rljax.speculation.warm_up import time_passes
from tests.engines import stored_pool
from tests.speculation.speculators import POOL
from tests.tiny_policy import CONFIG, HEAD, SLOTS, CheapTimes, assert_same, make_engine, outcomes, spell

BUCKETS = Buckets((4,), (128,), (16,), 7)
GROWING = Buckets((4,), (64, 128), (16,), 7)


def make_speculator(others=(), buckets=BUCKETS, pool=POOL, **args):
    drafters = {"eagle": make_drafter("eagle", **(HEAD | args))}
    drafters |= {name: make_drafter(name) for name in others}
    engine = make_engine(buckets=buckets, pool=pool, hidden_layers=states_read(drafters, CONFIG))
    return Speculator(engine, drafters, SLOTS, times=CheapTimes())


def roll_out(speculator, params, requests, stop=None, overlap=False):
    return Scheduler(speculator.engine, SLOTS, stop, speculator, overlap).run(params, requests)


class Placed:
    """Requests in the first slots of a decode state, and the head that follows them."""

    def __init__(self, params, prompts, limit=50, length=128, batch=4, attended=None, **args):
        speculator = make_speculator(**({"slices": 0} | args))
        self.head, self.engine, self.params = speculator.drafters["eagle"], speculator.engine, params
        self.slots = self.head.slots
        self.slots._attended_lengths = attended or self.slots._attended_lengths
        self.head.refresh(params)
        self.head.begin([DraftRequest(prompt, None, trainable=False) for prompt in prompts])
        self.state = self.engine.init_state(batch, length)
        self.slots.start(batch)
        self.place(prompts[:2], [0, 1], limit)

    def place(self, prompts, slots, limit=50):
        placed = [Assignment(row, slot, request_key(slot), limit) for row, slot in enumerate(slots)]
        prefix = self.engine.prefill(self.params, prompts)
        self.state = self.engine.bulk_insert(prefix, self.state, placed)
        self.slots.insert(self.slots.prefill(prefix, prompts), placed, slots)

    def decode(self, steps):
        self.state, result = self.engine.generate(self.params, self.state, steps)
        self.slots.advance(result)
        return result

    def draft(self):
        return self.slots.draft(self.state, self.slots.strategies[-1])


PROMPTS = [(5, 6, 7), (9, 2)]


@pytest.mark.default_cases("three drafters")
@pytest.mark.parametrize(
    ("others", "overlap", "head"),
    [((), False, {"depths": [1, 3]}), (("srt", "quantized"), True, {})],
    ids=["two trees", "three drafters"],
)
def test_the_tokens_are_those_of_plain_decoding(params, requests, expected, others, overlap, head):
    speculator = make_speculator(others, **head)
    speculator.drafters["eagle"]._budget.allows = lambda: True  # however slow this machine is
    for _ in range(2):  # in the second one it has learned, and the others remember
        completions, statistics = roll_out(speculator, params, requests, overlap=overlap)
        assert_same(completions, expected)
        assert statistics.drafted == sum(completion.drafted for completion in completions) > 0
        speculator.learn(outcomes(requests, completions))
    assert statistics.draft_seconds > 0
    metrics = speculator.metrics(statistics)
    assert metrics["speculation/draft_share"] > 0
    assert metrics["speculation/head/updates"] == 4


@pytest.mark.parametrize(
    ("overlap", "buckets"),
    [pytest.param(False, BUCKETS, marks=pytest.mark.long), (True, GROWING)],
    ids=["in turn", "overlapping, growing"],
)
def test_nothing_is_compiled_after_warming_up(params, requests, expected, overlap, buckets):
    """Whatever lengths and batches come about, plain stretches in between included."""
    if buckets is GROWING:  # let the state begin in the shorter cache
        short = [i for i, request in enumerate(requests) if len(request.prompt_ids) < 64]
        requests, expected = ([each[i] for i in short] for each in (requests, expected))
    pool = stored_pool()
    speculator = make_speculator(buckets=buckets, pool=pool)
    longest = max(len(request.prompt_ids) for request in requests)
    warm_up_plain(speculator.engine, params, SLOTS, longest, late_inserts=overlap)
    for shape in itertools.product(buckets.batch, buckets.cache):
        time_passes(speculator.engine, params, *shape, 1)
    speculator.warm_up(params, longest)
    slots, read = speculator.drafters["eagle"].slots, {"draft": set(), "pairs": set()}
    run = slots._run

    def noting(name, shapes, *args, **options):
        if name in read:
            read[name].add(shapes[-1])
        return run(name, shapes, *args, **options)

    slots._run = noting
    speculator.drafters["eagle"]._budget.allows = lambda: True
    turns, (proposer,) = itertools.count(), speculator.proposers
    rate = proposer.expected_rate  # eight plain host syncs in a row
    proposer.expected_rate = lambda *of: rate(*of) if next(turns) // 8 % 2 else 0.0
    before = len(pool)
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests, overlap=overlap)
        speculator.learn(outcomes(requests, completions))
        assert_same(completions, expected)
    assert 0 < statistics.verified < statistics.steps
    assert len(pool) == before
    assert read["draft"] == set(buckets.cache) <= read["pairs"]  # prefilling reads one block alone


def test_it_learns_the_policys_states_at_every_token_that_is_kept(params, requests):
    """What the passes handed out is what one forward pass over the whole response computes. Neither what a
    stop string cuts off nor an evaluation is learned.
    """
    seen, speculator, stop = [], make_speculator(), StopStrings(("dd",), spell)
    evaluated = [dataclasses.replace(request, training=False) for request in requests]
    roll_out_recording(speculator, params, evaluated, seen)
    assert not seen
    completions, _ = roll_out_recording(speculator, params, requests, seen, stop)
    prompts, whole = {}, set()
    for request, completion in zip(requests, completions, strict=True):
        tokens = (*request.prompt_ids, *completion.response_ids.tolist())[:-1]
        prompts[tokens] = len(request.prompt_ids)
        if completion.finish_reason != "stop":
            whole.add(tokens)
    assert whole <= {tuple(tokens) for tokens, *_ in seen} <= prompts.keys() > whole
    layers = speculator.drafters["eagle"].config.layers
    for tokens, states, mask in seen:
        length, prompt = len(tokens), prompts[tuple(tokens)]
        assert mask.tolist() == [False] * prompt + [True] * (length - prompt)
        expected = states_of(params, np.pad(tokens, (0, 128 - length)), layers)[:length]
        np.testing.assert_allclose(np.asarray(states, np.float32), expected, rtol=1e-3, atol=1e-3)


@functools.partial(jax.jit, static_argnames="layers")
def states_of(params, tokens, layers):
    """The features [T, S, d] of tokens [T], by one forward pass."""
    length = len(tokens)
    attention = PackedAttention(jnp.ones((1, length), jnp.int32), Numerics(False))
    rope, positions = jnp.asarray(rope_table(CONFIG, length)), jnp.arange(length)[None]
    final, _, residuals = transformer.forward_with_residuals(
        params, CONFIG, tokens[None], positions, attention, rope, Numerics(False), layers
    )
    return jnp.stack([*residuals, final], axis=2)[0]


def roll_out_recording(speculator, params, requests, seen, stop=None):
    """A rollout after whose warm-up the head's trainer only records what it is given."""
    head = speculator.drafters["eagle"]
    head.refresh(params)
    head.trainer.add = lambda *sequence: seen.append(sequence)
    return roll_out(speculator, params, requests, stop)


def test_training_in_the_tail_touches_neither_tokens_nor_weights(params, requests, expected):
    speculator = make_speculator(train_below=SLOTS, train_share=1.0, slices=50)
    before = jax.tree.map(np.array, params)
    assert not speculator.drafters["eagle"].trained
    completions, statistics = roll_out(speculator, params, requests)
    assert_same(completions, expected)
    assert statistics.train_seconds > 0 and speculator.drafters["eagle"].trained
    assert speculator.drafters["eagle"].trainer.updates > 0
    jax.tree.map(np.testing.assert_array_equal, params, before)


@pytest.mark.parametrize("memory", [{}, {"unread_bytes": 0}])
def test_long_plain_stretches_do_not_change_tokens(params, requests, expected, memory):
    speculator = make_speculator(slices=0, **memory)
    turns = itertools.cycle([True, *[False] * 9])
    (proposer,) = speculator.proposers
    rate = proposer.expected_rate
    proposer.expected_rate = lambda *of: rate(*of) if next(turns) else 0.0
    completions, statistics = roll_out(speculator, params, requests)
    assert_same(completions, expected)
    assert 0 < statistics.verified < statistics.steps
    assert (speculator.metrics(statistics)["speculation/head/absorbed_early"] > 0) == bool(memory)


@pytest.mark.parametrize(("syncs_kept", "early"), [(None, 0), (0, 8), (3, 5)])
def test_after_long_plain_decoding_the_head_drafts_as_if_asked_all_along(params, syncs_kept, early):
    """Nothing is forgotten, whatever memory the unread features have."""
    trees = {}
    for asked in (True, False):
        placed = Placed(params, PROMPTS)
        advance = placed.slots.advance

        def advancing(result, placed=placed, asked=asked, advance=advance):
            if syncs_kept is not None and not asked:
                placed.slots.unread_bytes = syncs_kept * result.states.nbytes
            advance(result)

        placed.slots.advance = advancing
        for _ in range(8):
            result = placed.decode(2)
            tree = placed.draft() if asked else None
        assert placed.head.metrics()["head/absorbed_early"] == (0 if asked else early)
        trees[asked] = tree if asked else placed.draft()
    assert result.active[0] and trees[True].tree.valid[0].all()  # the other one has ended on the way
    jax.tree.map(np.testing.assert_array_equal, trees[True], trees[False])


def test_drafts_are_those_of_a_head_that_reads_the_largest_bucket(params):
    """Over a decode state whose cache grows on the way; token for token."""
    prompts, trees = [tuple(range(2, 52)), tuple(range(3, 30))], []
    for lengths in (GROWING.cache, GROWING.cache[-1:]):
        placed = Placed(params, prompts, 70, 64, buckets=GROWING, attended=lengths)
        trees.append([])
        for step in range(10):
            if step == 3:
                placed.state = placed.engine.grow(placed.state)
            placed.decode(3)
            trees[-1].append(placed.draft().tree)
    assert all(tree.valid.any() for tree in trees[0])
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_the_lengths_that_are_read_about_double():
    assert attended_lengths((128, 192, 256, 384, 512, 768, 1024, 1536)) == (128, 256, 512, 1024, 1536)
    assert attended_lengths((256,)) == (256,)
    assert attended_lengths((256, 4096)) == (256, 4096)


def test_a_new_request_has_nothing_of_the_one_before_it(params):
    """Unread features of a request that has left its slot are skipped."""
    trees = []
    for asked in (True, False):
        placed = Placed(params, [*PROMPTS, (8, 3, 4, 1)])
        for visit in range(4):
            if visit == 2:
                placed.place([(8, 3, 4, 1)], [0])
            result = placed.decode(2)
            if asked:
                placed.draft()
        trees.append(placed.draft())
    assert result.active[:2].all() and trees[0].tree.valid[:2].all()
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_in_a_wider_state_slots_draft_as_before(params):
    """What the last host sync sampled included; the new slots know nothing."""
    trees = []
    for batch in (2, 4):
        placed = Placed(params, PROMPTS, batch=2, buckets=Buckets((2, 4), (128,), (16,), 7))
        placed.decode(3)
        placed.state = placed.engine.widen(placed.state, batch)
        placed.slots.widen(batch)
        trees.append(placed.draft().tree)
    narrow, wide = trees
    assert narrow.valid.all() and not wide.valid[2:].any()
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other[:2]), narrow, wide)


def test_a_resumed_head_goes_on_as_it_was(params, requests, tmp_path):
    # What is trained in a tail depends on the time.
    first = make_speculator(train_below=0, save_dir=str(tmp_path / "head"))
    completions, _ = roll_out(first, params, requests)
    first.learn(outcomes(requests, completions))
    first.drafters["eagle"]._saver.wait()
    _, saved = load_head(tmp_path / "head", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, saved, first.drafters["eagle"].trainer.params)
    second = make_speculator(seed=1, train_below=0)
    second.load_state(first.state())
    moved = jax.tree.map(jnp.copy, params)
    for speculator in (first, second):
        speculator.drafters["eagle"].refresh(moved)
        speculator.learn([])  # trains on what is left in the buffer
    for name, array in first.state().items():
        np.testing.assert_array_equal(array, second.state()[name], name)
    # One that only drafts has its weights, and nothing to train them by.
    third = make_speculator(seed=2, train_below=0).drafters["eagle"]
    third.freeze()
    third.load_state({name.removeprefix("eagle/"): array for name, array in first.state().items()})
    third.refresh(moved)
    third.learn([])
    assert third.trained and isinstance(third.trainer, FrozenHead)
    jax.tree.map(np.testing.assert_array_equal, third.trainer.params, first.drafters["eagle"].trainer.params)
    with pytest.raises(CheckpointError, match=r"train\.params\.\S+ is .* give the run the policy and head"):
        third.load_state({"step": 1, "train.params.fc": np.zeros((3, 3))})
