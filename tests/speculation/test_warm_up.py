"""Verifying passes compiled while responses are decoded: the same tokens, whenever they are ready."""

import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.rollout.collector import Scheduler
from rljax.speculation import warm_up
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import SLOTS, CheapTimes, assert_same, make_engine

BUCKETS = Buckets((2, 4), (64, 128), (16, 32), 7)


def speculator_of(engine, **others):
    return Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=CheapTimes(), **others)


def test_tokens_are_those_of_plain_decoding_whenever_passes_become_ready(
    params, requests, expected, held_back
):
    engine = make_engine(buckets=BUCKETS)
    with speculator_of(engine) as speculator:
        speculator.warm_up_in_background(params, SLOTS, prompt_length=64)
        assert speculator.compiling == 4
        finished = 0

        def release(tokens, ended):
            nonlocal finished
            finished = ended
            if ended >= len(requests) // 3 and not held_back.is_set():
                held_back.set()
                speculator.decoder.compiler.thread.join()  # so that the rest of the rollout verifies

        scheduler = Scheduler(engine, SLOTS, speculator=speculator, overlap=True)
        plain, statistics = scheduler.run(params, requests, lambda *_: None)
        assert statistics.verified == 0  # nothing is ready
        assert not any(key[0] == "verify" for key in engine.pool.bytes())
        assert_same(plain, expected)
        completions, statistics = scheduler.run(params, requests, release)
        assert_same(completions, expected)
        assert statistics.verified > 0 and finished == len(requests)
        compiled = len(engine.pool)
        completions, statistics = scheduler.run(params, requests)
        assert_same(completions, expected)
        assert statistics.verified > 0 and len(engine.pool) == compiled and speculator.compiling == 0
        metrics = speculator.metrics(statistics)
        assert metrics["engine/compiled_in_background"] == 6 and metrics["time/compiled_in_background"] > 0


@pytest.mark.parametrize(
    ("slots", "prompts", "shapes"),
    [
        (SLOTS, {"prompt_length": 100, "first_prompts": [70, 100]}, {(2, 128), (4, 128)}),
        (2, {"prompt_length": 64}, {(2, 64), (2, 128)}),
    ],
    ids=["long prompts", "few slots"],
)
def test_only_shapes_that_can_be_reached_are_compiled(params, slots, prompts, shapes):
    engine = make_engine(buckets=BUCKETS)
    with speculator_of(engine) as speculator:
        speculator.warm_up_in_background(params, slots, **prompts)
        speculator.decoder.compiler.wait()
    assert {key[1:3] for key in engine.pool.bytes() if key[0] == "verify"} == shapes


def test_a_rollout_goes_on_plainly_where_compiling_fails(params, requests, expected, monkeypatch):
    def fail(*_):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(DecodeEngine, "compile_verify", fail)
    engine = make_engine(buckets=BUCKETS)
    with speculator_of(engine) as speculator, pytest.warns(UserWarning, match="cannot allocate") as warned:
        speculator.warm_up_in_background(params, SLOTS, prompt_length=64)
        completions, statistics = Scheduler(engine, SLOTS, speculator=speculator).run(params, requests)
        speculator.decoder.compiler.wait()
    assert_same(completions, expected)
    assert statistics.verified == 0 and len(warned) == 4


def test_a_pass_that_does_not_fit_is_left_out(params, monkeypatch):
    engine = make_engine(buckets=BUCKETS)
    shapes = engine.param_shapes(params)
    (*_, (rows, nodes)) = BUCKETS.passes(4)
    largest = engine.compile_verify(shapes, 4, 128, rows, nodes)
    monkeypatch.setattr(warm_up, "free_bytes", lambda: largest - 1)
    engine.buckets.too_large.clear()
    with speculator_of(engine) as speculator, pytest.warns(UserWarning, match="32 tokens of 4 responses"):
        speculator.warm_up_in_background(params, SLOTS, prompt_length=64)
        assert (4, 32) not in engine.buckets.too_large  # a pass in progress may be one of these
        speculator.decoder.compiler.wait()
    assert (4, 32) in engine.buckets.too_large
    engine.buckets.too_large.clear()


def test_times_that_were_never_measured_are_those_of_neighbours():
    times = PassTimes()
    assert times.verify(4, 64, 16) == times.plain(4, 64) > times.draft(4, 64, "quantized") > 0
    times.add_plain(4, 64, 2.0)
    assert times.plain(2, 128) == 2.0 and times.verify(4, 64, 16) == 2.0
    times.add_verify(4, 64, 12, 4.0)
    assert times.verify(4, 64, 12) == 4.0
    assert times.verify(4, 64, 8) == 3.0  # between a plain step, which has 4 rows, and 12 rows
    assert times.verify(4, 64, 32) == 4.0
    assert times.verify(4, 128, 12) == 4.0
    times.add_plain(2, 64, 1.0)
    assert times.plain(2, 128) == 1.0
    times.add_draft(4, 64, "quantized", 0.5)
    assert times.draft(2, 64, "quantized") == 0.5 and times.draft(2, 64, "other") == 0.5
    times.forget_passes()
    assert not times.has_plain(4, 64) and times.draft(4, 64, "quantized") == 0.5


def test_the_first_run_of_a_pass_does_not_count(params, requests, expected):
    """It takes longer than those that follow."""
    engine, times = make_engine(buckets=BUCKETS), PassTimes()
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=times)
    with speculator:
        speculator.warm_up_in_background(params, SLOTS, prompt_length=64)
        speculator.decoder.compiler.wait()
        runs = {}
        verify = DecodeEngine.verify

        def counting(self, params, state, tree, rows=None, proposal=None):
            shape = (state.batch, state.cache.length, rows.rows)
            assert times.has_verify(*shape) <= (runs.get(shape, 0) > 1)
            runs[shape] = runs.get(shape, 0) + 1
            return verify(self, params, state, tree, rows, proposal)

        engine.verify = counting.__get__(engine)
        for _ in range(2):
            completions, _ = Scheduler(engine, SLOTS, speculator=speculator).run(params, requests)
            assert_same(completions, expected)
    assert runs
