"""Tokens that nobody samples: behind them decoding goes on as if they stood in the prompt, bit for bit."""

import functools

import numpy as np
import pytest

from rljax.engine.appending import ROWS, WIDTH, Continuation
from rljax.engine.buckets import Buckets
from rljax.engine.host_sync import Assignment
from rljax.engine.shapes import warm_up_plain
from rljax.numerics.rows import Numerics
from rljax.sampling.noise import request_key
from tests.tiny_policy import VOCAB, make_engine, make_params

STEPS = 6


@functools.lru_cache
def policy_of(dtype):
    """An engine and its weights."""
    engine = make_engine(None, Buckets((4,), (64, 128)), (), STEPS, Numerics(True, dtype))
    return engine, engine.load_params(make_params())


def prompt(seed, length):
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def start(engine, params, prompts, limit=40):
    state = engine.init_state(4, max(map(len, prompts)) + STEPS + 1)
    prefix = engine.prefill(params, prompts)
    keys = [request_key(0, slot) for slot in range(len(prompts))]
    return engine.bulk_insert(
        prefix, state, [Assignment(row, row, key, limit) for row, key in enumerate(keys)]
    )


@pytest.mark.default_cases("bfloat16-(40, 40, 40)")
@pytest.mark.parametrize(
    ("dtype", "counts"),
    [
        ("float32", (1, 0, 5)),
        ("float32", (WIDTH - 1, WIDTH, WIDTH + 1)),
        ("bfloat16", (40, 40, 40)),  # more than a pass has rows for
        ("bfloat16", (0, 33, 0)),
    ],
    ids=str,
)
def test_decoding_goes_on_as_behind_a_prompt(dtype, counts):
    engine, params = policy_of(dtype)
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


def test_a_response_ends_where_its_limit_says():
    engine, params = policy_of("bfloat16")
    own = prompt(0, 4)
    state = start(engine, params, [own], limit=1)
    state, _ = engine.generate(params, state)  # it is over: an answer makes it go on
    assert not np.asarray(state.active).any()
    state = engine.append(params, state, [Continuation(0, 3, [own[-1], 7, 8], 2)])
    state, result = engine.generate(params, state)
    assert (result.tokens[0] >= 0).sum() == 2 and not np.asarray(state.active).any()


def test_what_does_not_fit_is_refused():
    engine, params = policy_of("bfloat16")
    state = engine.init_state(4, 64)
    with pytest.raises(ValueError, match="up to position 65 of 64"):
        engine.append(params, state, [Continuation(0, 60, [1, 2, 3, 4, 5], 1)])
    with pytest.raises(ValueError, match="cannot append"):
        engine.append(params, state, [Continuation(0, 3, [1], 1)])


def test_nothing_compiles_after_warm_up():
    engine, params = make_engine(None, Buckets((4,), (64,)), (), STEPS), make_params()
    warm_up_plain(engine, params, 4, 64, appends=True)
    compiled = len(engine.pool)
    assert sum(key[0] == "append" for key in engine.pool.bytes()) == len(ROWS)
    state = engine.init_state(4, 64)
    engine.append(params, state, [Continuation(slot, 0, list(range(2, 40)), 1) for slot in range(4)])
    assert len(engine.pool) == compiled
