"""Tokens that nobody samples: behind them decoding goes on as if they stood in the prompt, bit for bit."""

import numpy as np
import pytest

from rljax.engine import appending
from rljax.engine.appending import ROWS, WIDTH, Continuation
from rljax.engine.buckets import Buckets
from rljax.engine.host_sync import Assignment
from rljax.engine.shapes import warm_up_plain
from rljax.numerics.rows import Numerics
from rljax.sampling.noise import request_key
from tests.tiny_policy import VOCAB, make_engine, make_params

STEPS = 6


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request):
    return make_engine(None, Buckets((4,), (64, 128)), (), STEPS, Numerics(True, request.param))


def prompt(seed, length):
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def start(engine, params, prompts, limit=40):
    state = engine.init_state(4, max(map(len, prompts)) + STEPS + 1)
    prefix = engine.prefill(params, prompts)
    keys = [request_key(0, slot) for slot in range(len(prompts))]
    return engine.bulk_insert(
        prefix, state, [Assignment(row, row, key, limit) for row, key in enumerate(keys)]
    )


@pytest.mark.parametrize("counts", [(1, 0, 5), (15, 16, 17), (40, 40, 40), (0, 33, 0)], ids=str)
def test_decoding_goes_on_as_behind_a_prompt(engine, params, counts):
    params = engine.load_params(params)
    prompts = [prompt(slot, length) for slot, length in enumerate((3, 9, 20))]
    answers = [prompt(100 + slot, count) for slot, count in enumerate(counts)]
    whole = [own + more for own, more in zip(prompts, answers, strict=True)]
    _, expected = engine.generate(params, start(engine, params, whole))

    state = start(engine, params, prompts)
    while state.cache.length < max(map(len, whole)) + STEPS:
        state = engine.grow(state)
    # All have sampled, and all of it is forgotten; who gets nothing is stopped meanwhile, and loses nothing.
    untouched = [slot for slot, count in enumerate(counts) if not count]
    state = engine.free_resource(state, untouched)
    state, _ = engine.generate(params, state)
    state = engine.append(
        params,
        state,
        [
            Continuation(slot, len(prompts[slot]) - 1, [prompts[slot][-1], *answers[slot]], 40)
            for slot, count in enumerate(counts)
            if count
        ],
    )
    assert np.asarray(state.active).tolist() == [count > 0 for count in counts] + [False]
    state = state.replace(active=state.active.at[np.asarray(untouched, int)].set(True))
    _, found = engine.generate(params, state)
    np.testing.assert_array_equal(found.tokens[:3], expected.tokens[:3])
    np.testing.assert_array_equal(found.logprobs[:3], expected.logprobs[:3])
    np.testing.assert_array_equal(found.lengths[:3], [len(own) - 1 + STEPS for own in whole])


def test_a_response_ends_where_its_limit_says(engine, params):
    params = engine.load_params(params)
    own = prompt(0, 4)
    state = start(engine, params, [own], limit=1)
    state, _ = engine.generate(params, state)  # it is over: an answer makes it go on
    assert not np.asarray(state.active).any()
    state = engine.append(params, state, [Continuation(0, 3, [own[-1], 7, 8], 2)])
    state, result = engine.generate(params, state)
    assert (result.tokens[0] >= 0).sum() == 2 and not np.asarray(state.active).any()


@pytest.mark.parametrize("counts", [(1,), (WIDTH + 1,), (64, 3), (WIDTH,) * 4, (50, 1, 17, 16)], ids=str)
def test_passes_commit_every_token_once(counts):
    given = [
        Continuation(slot, 10 * slot, [100 * slot + i for i in range(count + 1)], 5)
        for slot, count in enumerate(counts)
    ]
    committed = {slot: [] for slot in range(len(counts))}
    for chunk, rows in appending.chunks(4, given):
        assert rows.rows in ROWS and rows.rows >= chunk.counts.sum() > 0
        for slot, count in enumerate(chunk.counts):
            if not count:
                continue
            own, before = committed[slot], 10 * slot
            assert chunk.lengths[slot] == before + len(own)
            own.extend(chunk.tokens[slot, :count].tolist())
            assert chunk.following[slot] == given[slot].tokens[len(own)]
            assert chunk.complete[slot] == (len(own) == len(given[slot].tokens) - 1)
    for slot, own in committed.items():
        assert own == given[slot].tokens[:-1]


def test_what_does_not_fit_is_refused(engine, params):
    state = engine.init_state(4, 64)
    with pytest.raises(ValueError, match="up to position 65 of 64"):
        engine.append(params, state, [Continuation(0, 60, [1, 2, 3, 4, 5], 1)])
    with pytest.raises(ValueError, match="cannot append"):
        engine.append(params, state, [Continuation(0, 3, [1], 1)])


def test_nothing_compiles_after_warm_up(params):
    engine = make_engine(None, Buckets((4,), (64,)), (), STEPS)
    warm_up_plain(engine, params, 4, 64, appends=True)
    compiled = len(engine.pool)
    assert sum(key[0] == "append" for key in engine.pool.bytes()) == len(ROWS)
    state = engine.init_state(4, 64)
    engine.append(params, state, [Continuation(slot, 0, list(range(2, 40)), 1) for slot in range(4)])
    assert len(engine.pool) == compiled
