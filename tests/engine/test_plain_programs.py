"""Plain decoding while a thread compiles: the same tokens, and the thread that decodes compiles nothing."""

import threading

import pytest

from rljax.engine.background import CompilerThread
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.plain_programs import PlainPrograms
from rljax.engine.shapes import Shapes, warm_up_plain
from rljax.rollout.collector import Scheduler
from tests.tiny_policy import SLOTS, assert_same, make_engine, make_params, make_requests

SHORT = make_requests((3, 20, 8, 1, 5), (40, 30, 7, 1, 44))  # fit the smallest cache
REQUESTS = make_requests((3, 20, 8, 1, 30), (60, 40, 7, 1, 98))


def compile_in_background(engine, params, requests, slots=SLOTS, longest=128, **others):
    prompts = [len(prompt) for prompt in dict.fromkeys(request.prompt_ids for request in requests)]
    thread = CompilerThread(engine.buckets, (slots, longest))
    shapes = Shapes(engine.buckets, slots, 64, longest, first_prompts=prompts, **others)
    engine.background = PlainPrograms(engine, params, thread, shapes)
    return engine.background


def compilations(engine):
    """Programs that were compiled by the thread that decodes."""
    return len(engine.pool) - engine.pool.background_programs


def batches_of(engine, monkeypatch):
    """The batches of all decode steps from now on, by a list that grows."""
    seen, begin = [], DecodeEngine.begin

    def spy(self, params, state, *args):
        seen.append(state.batch)
        return begin(self, params, state, *args)

    monkeypatch.setattr(engine, "begin", spy.__get__(engine))
    return seen


@pytest.fixture(scope="module")
def params():
    return make_engine().load_params(make_params())


@pytest.fixture(scope="module")
def plain(params):
    """What requests get where everything is compiled when it is needed."""
    engine = make_engine()
    return lambda requests: Scheduler(engine, SLOTS).run(params, requests)[0]


def test_a_state_stays_wide_until_smaller_ones_are_compiled(params, plain, held_back, monkeypatch):
    engine = make_engine()
    background = compile_in_background(engine, params, SHORT)
    compiled, batches = compilations(engine), batches_of(engine, monkeypatch)
    completions, _ = Scheduler(engine, SLOTS).run(params, SHORT)
    assert_same(completions, plain(SHORT))
    assert set(batches) == {4} and background.seconds_waited == 0
    assert compilations(engine) == compiled and engine.pool.background_programs == 0 and background.left > 0
    held_back.set()
    background.wait()
    assert engine.pool.background_programs > 0 and background.left == 0
    later = engine.pool.background_programs
    completions, _ = Scheduler(engine, SLOTS).run(params, SHORT)
    assert_same(completions, plain(SHORT))
    assert set(batches) == {2, 4}
    assert compilations(engine) == compiled and engine.pool.background_programs == later


def test_growth_waits_for_the_programs_and_counts_the_seconds(params, plain, held_back):
    engine = make_engine()
    background = compile_in_background(engine, params, REQUESTS)
    compiled = compilations(engine)
    release = threading.Timer(0.2, held_back.set)
    release.start()
    completions, _ = Scheduler(engine, SLOTS).run(params, REQUESTS)
    release.join()
    assert_same(completions, plain(REQUESTS))
    assert background.seconds_waited > 0 and compilations(engine) == compiled
    background.wait()
    waited = background.seconds_waited
    assert_same(Scheduler(engine, SLOTS).run(params, REQUESTS)[0], plain(REQUESTS))
    assert background.seconds_waited == waited


def test_a_rollout_begins_in_a_longer_cache_that_is_ready(params, plain):
    engine = make_engine()
    background = compile_in_background(engine, params, make_requests((70,), (10,)))
    assert background.start_length(4, 64) == 128  # and asks for the shorter one
    assert_same(Scheduler(engine, SLOTS).run(params, SHORT)[0], plain(SHORT))
    background.wait()
    assert background.start_length(4, 64) == 64
    compiled = len(engine.pool)
    state = engine.grow(engine.init_state(4, 64))  # so nobody has to compile the move either
    assert state.cache.length == 128 and len(engine.pool) == compiled


def test_shorter_prompts_than_the_first_are_padded_until_their_programs_are_compiled(params, plain):
    engine = make_engine()
    background = compile_in_background(engine, params, make_requests((40,), (10,)))
    background.wait()
    prefilled = lambda: {key[2] for key in engine.pool._programs if key[0] == "prefill"}  # noqa: E731
    assert prefilled() == {64}
    requests, compiled = make_requests((3,), (5,)), compilations(engine)
    assert_same(Scheduler(engine, SLOTS).run(params, requests)[0], plain(requests))
    assert compilations(engine) == compiled
    background.wait()
    assert prefilled() == {16, 64}


def test_only_shapes_that_will_be_used_are_compiled(params):
    buckets = make_buckets(SLOTS, 192, True, (2, 4, 8), (64, 128, 192))
    engine = make_engine(None, buckets)
    compile_in_background(engine, params, SHORT, longest=100).wait()
    shapes = [key[1:3] for key in engine.pool.bytes() if key[0] in ("generate", "prefill")]
    assert {batch for batch, _ in shapes} == {2, 4} and max(length for _, length in shapes) == 128
    before = make_engine(None, buckets)
    warm_up_plain(before, params, 4, 64, longest=100)
    shapes = [key[1:3] for key in before.pool.bytes() if key[0] == "generate"]
    assert {batch for batch, _ in shapes} == {2, 4} and max(length for _, length in shapes) == 128
    assert set(engine.pool.bytes()) == set(before.pool.bytes())


def test_prompts_are_padded_to_a_prefill_that_is_ready(params, held_back):
    engine = make_engine()
    background = compile_in_background(engine, params, SHORT)  # four short prompts together, and a longer one
    assert background.prefill_shape(4, 16) == (4, 16) and background.prefill_shape(2, 32) == (2, 32)
    assert background.prefill_shape(2, 16) == (2, 32)
    held_back.set()
    background.wait()
    assert background.prefill_shape(2, 16) == (2, 16)


def test_similar_prompts_share_a_prefill_at_first(params):
    engine = make_engine()
    compile_in_background(engine, params, make_requests((3, 20, 60), (10, 10, 10)))
    engine.close()
    shapes = {key[1:3] for key in engine.pool.bytes() if key[0] == "prefill"}
    assert shapes == {(2, 64), (2, 16)}  # 32 fits into 64; 16 would be padded to four times its length


def test_a_shape_that_cannot_be_compiled_stops_only_what_needs_it(params, plain, monkeypatch):
    compile_plain = DecodeEngine.compile_plain

    def fail(self, params, batch, length, appends=False):
        if (batch, length) != (4, 64):
            raise MemoryError("cannot allocate")
        compile_plain(self, params, batch, length, appends)

    monkeypatch.setattr(DecodeEngine, "compile_plain", fail)
    engine = make_engine()
    with pytest.warns(UserWarning, match="cannot allocate"):
        compile_in_background(engine, params, SHORT).wait()
        batches = batches_of(engine, monkeypatch)
        assert_same(Scheduler(engine, SLOTS).run(params, SHORT)[0], plain(SHORT))
        assert set(batches) == {4}
        with pytest.raises(MemoryError, match="cannot allocate"):
            Scheduler(engine, SLOTS).run(params, REQUESTS)
