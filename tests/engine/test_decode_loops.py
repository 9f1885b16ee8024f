"""A loop of fixed length, and results that are read while the next steps run: the same tokens."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest

from rljax.engine.loop_choice import choose_loop
from rljax.numerics.rows import Numerics
from rljax.rollout.collector import Scheduler
from rljax.rollout.decode_loop import LoopPolicy
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import open_loop, open_slots
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.distribution import SamplingParams
from tests.tiny_policy import SLOTS, assert_same, make_engine, make_params, make_requests, spell

PLAIN, PENALTIES = SamplingParams(), SamplingParams(presence_penalty=1.5, frequency_penalty=0.5)


@functools.cache
def engine_of(dtype, sampling=PLAIN, hidden_layers=None):
    return make_engine(sampling, numerics=Numerics(compute_dtype=dtype), hidden_layers=hidden_layers)


def run(engine, gain=0.0, overlap=False, stop=None):
    """Responses that end inside of calls, by EOS and limits, in caches that fill and batches that shrink.

    Args:
      gain: what a step of a fixed loop gains; with `math.inf` every loop is fixed.
    """
    engine.fixed_gain = gain
    try:
        scheduler = Scheduler(engine, SLOTS, stop, overlap=overlap)
        return scheduler.run(engine.load_params(make_params()), make_requests())[0]
    finally:
        engine.fixed_gain = 0.0


@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [("bfloat16", PLAIN), ("float32", PENALTIES), ("float32", PLAIN), ("bfloat16", PENALTIES)],
    ids=["bfloat16", "float32, penalties", "float32", "bfloat16, penalties"],
)
def test_rollouts_are_the_same(dtype, sampling):
    engine = engine_of(dtype, sampling)
    expected = run(engine)
    for gain, overlap in ((math.inf, False), (0.0, True), (math.inf, True)):
        assert_same(run(engine, gain, overlap), expected)


def test_a_stop_string_ends_a_response_in_either_loop():
    engine, stop = engine_of("float32"), StopStrings(("ab", "cdc"), spell)
    expected = run(engine, stop=stop)
    assert any(each.finish_reason == "stop" for each in expected)
    for gain in (0.0, math.inf):
        assert_same(run(engine, gain, True, stop), expected)


@pytest.mark.parametrize(("steps", "until_active"), [(None, 0), (None, 1), (16, 3)])
def test_states_of_a_fixed_loop_are_the_same(steps, until_active):
    """Bit for bit, also what is handed out, where slots are full or few; so is the number of steps."""
    engine = engine_of("float32", hidden_layers=(0,))
    params, results = engine.load_params(make_params()), []
    for fixed in (False, True):
        loop = open_loop(open_slots(engine, params), SLOTS)
        loop.submit([LiveResponse(each) for each in make_requests((3, 60, 8, 62), (5, 60, 64, 60))[::3]])
        loop._fill()
        engine.fixed_gain = math.inf if fixed else 0.0
        state, calls = loop.slots.state, []
        for _ in range(2):
            state, result = engine.generate(params, state, steps, until_active)
            features = np.asarray(result.states)[:, : result.steps]
            sampled = (result.tokens >= 0)[..., None, None]
            calls.append((result.tokens, result.logprobs, result.steps, np.where(sampled, features, 0)))
        visible = jax.device_get(dataclasses.replace(state, cache=None))
        rows = state.batch * (16 if fixed else result.steps)
        assert result.rows == rows
        results.append((calls, visible))
        engine.fixed_gain = 0.0
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert results[0][0][0][2] < 16  # it ends early


def test_a_call_behind_one_that_ended_early_ends_as_soon_as_it_may(monkeypatch):
    """With a gain of 1.1 a fixed loop of 16 steps pays where 15 of them are not in vain."""
    engine, calls = engine_of("float32"), []
    finish = engine.finish

    def noted(pending):
        result = finish(pending)
        calls.append((result.steps, pending.fixed))
        return result

    monkeypatch.setattr(engine, "finish", noted)
    mixed = run(engine, 1.1)
    assert {fixed for _, fixed in calls} == {False, True}
    assert all(fixed == (steps >= 15) for (steps, _), (_, fixed) in itertools.pairwise(calls))
    assert_same(mixed, run(engine))


def test_a_response_is_cancelled_while_a_call_is_in_flight():
    engine = engine_of("float32")
    expected = run(engine)
    chosen = [2, 8, 15]
    responses = [LiveResponse(make_requests()[i]) for i in chosen]
    loop = open_loop(
        open_slots(engine, engine.load_params(make_params())), SLOTS, policy=LoopPolicy(reads_later=True)
    )
    loop.submit(responses)
    loop.step()
    assert loop.slots.in_flight and not responses[0].tokens  # nothing is read yet
    loop.cancel(responses[:1])
    assert responses[0].ending == "cancelled" and responses[0].tokens and not loop.slots.in_flight
    while loop.live:
        loop.step()
    assert_same([each.completion(False) for each in responses[1:]], [expected[i] for i in chosen[1:]])


def test_the_faster_loop_is_chosen_and_kept(tmp_path, monkeypatch):
    engine, params = make_engine(), make_params()
    choose_loop(engine, params, (2, 4), 20, str(tmp_path))
    (file,) = (tmp_path / "loops").iterdir()
    file.write_text("[1.2, 1.1]")
    choose_loop(engine, params, (2, 4), 20, str(tmp_path))
    assert engine.fixed_gain == 1.1
    file.write_text("[1.2, 0.9]")
    choose_loop(engine, params, (2, 4), 20, str(tmp_path))
    assert not engine.fixed_gain
