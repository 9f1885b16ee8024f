"""The decode loop as several workers use it: responses move between loops, and weights are swapped."""

import jax
import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.assembly import decoding as assembly
from rljax.engine.buckets import Buckets
from rljax.requests import PartialResponse
from rljax.rollout.collector import Scheduler
from rljax.rollout.decode_loop import LoopPolicy
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import PLAIN, open_loop, open_slots
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.speculator import Speculator
from tests.configs import experiment
from tests.rollout.test_penalties import BUCKETS
from tests.rollout.test_penalties import SAMPLING as PENALTIES
from tests.tiny_policy import EOS, SLOTS, CheapTimes, assert_same, make_engine, make_params

SERVER = LoopPolicy(sync_at_every_ending=True, most_steps=3)


@pytest.fixture(scope="module", params=[SamplingParams(), PENALTIES], ids=["plain", "penalties"])
def any_engine(request):
    return make_engine(request.param, BUCKETS)


@pytest.fixture(scope="module")
def engine():
    return make_engine(buckets=BUCKETS)


def finish(loop):
    while loop.live:
        loop.step()


def make_loop(engine, params, drafts, overlap=False):
    speculator = PLAIN
    if drafts:
        speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=CheapTimes())
    return open_loop(open_slots(engine, params, speculator, overlap), SLOTS, policy=SERVER)


@pytest.mark.default_cases("penalties-True-True")
@pytest.mark.parametrize(("drafts", "overlap"), [(False, False), (True, True)])
def test_responses_move_between_loops_while_others_go_on(any_engine, params, requests, drafts, overlap):
    """Every response is taken out of a loop after a few host syncs and put into the other, repeatedly."""
    engine = any_engine
    expected = Scheduler(engine, SLOTS).run(params, requests)[0]
    loops = [make_loop(engine, params, drafts, overlap) for _ in range(2)]
    responses, where = [LiveResponse(request) for request in requests], [0] * len(requests)
    loops[0].submit(responses)
    moves = 0
    for turn in range(10_000):
        if all(response.ending for response in responses):
            break
        for loop in loops:
            if loop.live:
                loop.step()
        index = turn % len(requests)
        response = responses[index]
        if response.ending is None:
            partial = loops[where[index]].withdraw(response)
            if partial is not None:
                where[index] ^= 1
                responses[index] = LiveResponse.resume(requests[index], partial)
                loops[where[index]].submit([responses[index]])
                moves += len(partial.tokens) > 0
    assert moves > 10
    assert_same([response.completion(False) for response in responses], expected)
    assert all(response.versions == [(0, 0)] for response in responses)
    assert not any(loop.slots.responses or loop.slots.state for loop in loops)


def test_a_loop_that_expects_more_keeps_its_slots(engine, params, requests, expected):
    """And compacts once nothing more is expected."""
    loop = make_loop(engine, params, drafts=False)
    loop.expects_more = True
    chosen = [0, 3, 6, 15]  # the last one is the longest
    responses = [LiveResponse(requests[i]) for i in chosen]
    loop.submit(responses)
    while len(loop.slots.running) != 1:
        loop.step()
    loop.step()
    assert loop.slots.batch == SLOTS
    loop.expects_more = False
    loop.step()
    assert loop.slots.batch == 2
    finish(loop)
    assert_same([response.completion(False) for response in responses], [expected[i] for i in chosen])


def resume(engine, params, request, whole, count):
    """Resumes a response after so many of its tokens: it ends as it did."""
    tokens, logprobs = whole.response_ids[:count].tolist(), whole.logprobs[:count].tolist()
    response = LiveResponse.resume(request, PartialResponse(tuple(tokens), tuple(logprobs)))
    loop = open_loop(open_slots(engine, params), 2, policy=SERVER)
    loop.submit([response])
    finish(loop)
    assert_same([response.completion(False)], [whole])


def test_a_resumed_response_compiles_nothing_where_requests_may_bring_tokens(requests):
    """In a cache that grows, under penalties, for which what a request brings counts."""
    buckets, config = Buckets((2,), (64, 128)), experiment(rollout={"max_prompt_length": 20})
    engine, warm = (make_engine(PENALTIES, buckets) for _ in range(2))
    params, longest = engine.load_params(make_params()), max(requests, key=lambda each: each.max_response)
    (whole,), _ = Scheduler(engine, 2).run(params, [longest])
    assembly.warm_up(Scheduler(warm, 2), params, config, requests_join=True, resumes=True)
    before = len(warm.pool)
    for count in range(1, len(whole.response_ids), 9):
        resume(warm, params, longest, whole, count)
    assert len(warm.pool) == before


def test_weights_are_swapped_between_two_host_syncs(engine, params, requests):
    """A response that begins after the swap is one of the new weights; one in progress records where."""
    other = engine.load_params(make_params(1))
    expected = Scheduler(engine, SLOTS).run(other, requests[3:5])[0]
    loop = make_loop(engine, params, drafts=True)
    refreshed, (proposer,) = [], loop.slots.speculator.proposers
    proposer.refresh = refreshed.append
    running = LiveResponse(requests[-1])
    loop.submit([running])
    while len(running.tokens) < 4:
        loop.step()
    swapped = len(running.tokens)
    loop.load_params(other, 7)
    later = [LiveResponse(request) for request in requests[3:5]]
    loop.submit(later)
    finish(loop)
    assert_same([response.completion(False) for response in later], expected)
    assert later[0].completion(False).versions == ((0, 7),)
    assert running.completion(False).versions == ((0, 0), (swapped, 7))
    assert refreshed == [params, other]


def test_prompts_that_wait_prefilled_are_prefilled_by_the_new_weights(engine, params, requests):
    other = engine.load_params(make_params(1))
    expected = Scheduler(engine, SLOTS).run(other, requests)[0]
    loop = make_loop(engine, params, drafts=True)
    responses = [LiveResponse(request) for request in requests]
    loop.submit(responses)
    loop.step()
    assert loop._queue._ready
    loop.load_params(other, 1)
    finish(loop)
    new = [i for i, response in enumerate(responses) if response.versions == [(0, 1)]]
    assert len(new) >= len(requests) - SLOTS
    assert_same([responses[i].completion(False) for i in new], [expected[i] for i in new])


def test_loaded_copies_survive_donation(engine):
    trained = jax.tree.map(lambda leaf: leaf + 0, make_params())
    shared, copied = engine.load_params(trained), engine.load_params(trained, copy=True)
    for leaf in jax.tree.leaves(trained):
        leaf.delete()  # as the donation of an update does
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(shared))
    before = engine.load_params(make_params())
    jax.tree.map(np.testing.assert_array_equal, copied, before)


def test_ended_responses_are_refused(engine, params, requests):
    loop = open_loop(open_slots(engine, params), SLOTS)
    ended = PartialResponse((5, EOS), (0.0, 0.0))
    with pytest.raises(ValueError, match="has ended"):
        loop.submit([LiveResponse.resume(requests[0], ended)])
    with pytest.raises(ValueError, match="logprobs"):
        PartialResponse((5,), ())
