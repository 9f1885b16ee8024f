"""The scheduler: every request gets its own tokens, bit for bit, whatever else decodes and in which slots."""

import collections
import dataclasses

import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.shapes import warm_up_plain
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.noise import request_key
from tests.tiny_policy import EOS, assert_same, make_engine, make_requests, spell

BUCKETS = Buckets((2, 4, 8, 16), (64, 128))


@pytest.fixture(scope="module")
def engine():
    return make_engine(buckets=BUCKETS)


@pytest.fixture(scope="module")
def requests():
    return make_requests(lengths=[3, 20, 64, 8, 63, 1, 30], limits=[60, 40, 64, 7, 50, 1, 98])


@pytest.fixture(scope="module")
def expected(engine, params, requests):
    return Scheduler(engine, 16).run(params, requests)[0]


def test_completions_are_what_was_asked_for(requests, expected):
    reasons = collections.Counter()
    for request, completion in zip(requests, expected, strict=True):
        reasons[completion.finish_reason] += 1
        ids = completion.response_ids
        assert ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert len(completion.logprobs) == len(ids) and EOS not in ids[:-1]
        # A response whose last allowed token is EOS did end.
        assert (ids[-1] == EOS) == (completion.finish_reason == "eos")
        assert len(ids) <= request.max_response
        assert len(ids) == request.max_response or completion.finish_reason == "eos"
    assert reasons["eos"] >= 2 and reasons["length"] >= 2 and set(reasons) == {"eos", "length"}
    assert len({tuple(completion.response_ids.tolist()) for completion in expected[:3]}) == 3


@pytest.mark.parametrize("max_slots", [1, 8])
def test_same_bits_whatever_the_number_of_slots_and_the_order(engine, params, requests, expected, max_slots):
    """Results come in the order of the requests."""
    order = np.random.default_rng(0).permutation(len(requests))
    completions, statistics = Scheduler(engine, max_slots).run(params, [requests[i] for i in order])
    assert_same(completions, [expected[i] for i in order])
    assert statistics.tokens == sum(len(completion.response_ids) for completion in expected)
    assert statistics.rows >= statistics.tokens
    assert 0 < statistics.occupancy <= 1


def test_same_bits_whatever_the_steps_per_sync(params, requests, expected):
    small = make_engine(steps=3, buckets=Buckets((2,), (128,)))
    assert_same(Scheduler(small, 2).run(params, requests)[0], expected)


@pytest.mark.parametrize("max_slots", [2, 8])  # fewer slots than a group, and groups that do not divide them
def test_prompts_are_prefilled_once_and_responses_handed_out_as_they_end(
    engine, params, requests, expected, max_slots
):
    """Progress is reported up to the end."""
    seen, handed_out = [], {}

    def look(tokens, ended):
        assert ended == len(handed_out)
        seen.append((tokens, ended))

    def hand_out(index, completion):
        assert index not in handed_out
        handed_out[index] = completion

    _, statistics = Scheduler(engine, max_slots).run(params, requests, look, hand_out)
    assert statistics.prefilled_tokens == sum(map(len, {request.prompt_ids for request in requests}))
    assert len(seen) == statistics.host_syncs and seen == sorted(seen)
    assert seen[-1] == (statistics.tokens, len(requests)) and len({ended for _, ended in seen}) > 2
    assert_same([handed_out[index] for index in range(len(requests))], expected)


@pytest.mark.default_cases("3-*", "16-*")
@pytest.mark.parametrize(
    ("steps", "strings"), [(1, ("dd",)), (3, ("abc", "cab", "ba")), (16, ("abc", "cab", "ba"))], ids=str
)
def test_stop_strings_are_exact_whatever_the_steps_per_sync(
    engine, params, requests, expected, steps, strings
):
    chosen = engine if steps == 16 else make_engine(steps=steps, buckets=Buckets((2,), (128,)))
    completions, statistics = Scheduler(chosen, 2, StopStrings(strings, spell)).run(params, requests)
    reasons = collections.Counter(completion.finish_reason for completion in completions)
    assert reasons["stop"] >= 3
    for mine, whole in zip(completions, expected, strict=True):
        texts = [spell(whole.response_ids[: end + 1]) for end in range(len(whole.response_ids))]
        ends = [i + 1 for i, text in enumerate(texts) if any(string in text for string in strings)]
        end = ends[0] if ends else len(whole.response_ids)
        np.testing.assert_array_equal(mine.response_ids, whole.response_ids[:end])
        np.testing.assert_array_equal(mine.logprobs, whole.logprobs[:end])
        reason = "eos" if whole.response_ids[end - 1] == EOS else "stop" if ends else "length"
        assert mine.finish_reason == reason
    assert statistics.tokens == sum(len(completion.response_ids) for completion in completions)


def test_eos_comes_before_length(engine, params, requests, expected):
    """A response cut exactly where EOS falls ended by EOS; cut one earlier, by its length."""
    index = next(i for i, c in enumerate(expected) if c.finish_reason == "eos" and len(c.response_ids) > 1)
    length = len(expected[index].response_ids)
    cut = [dataclasses.replace(requests[index], max_response=limit) for limit in (length, length - 1)]
    at, before = Scheduler(engine, 2).run(params, cut)[0]
    assert_same([at], [expected[index]])
    assert before.finish_reason == "length"
    np.testing.assert_array_equal(before.response_ids, at.response_ids[:-1])


def test_no_requests_cost_nothing(engine, params):
    completions, statistics = Scheduler(engine, 4).run(params, [])
    assert completions == []
    assert statistics.steps == statistics.host_syncs == statistics.prefilled_tokens == 0
    assert statistics.occupancy == 0.0


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ((), 4, "needs a prompt"),
        ((3, 4), 0, "at least one response token"),
        ((3,) * 100, 29, r"100 \+ 29 .* largest cache bucket, 128"),
    ],
)
def test_impossible_requests_are_refused_before_anything_decodes(engine, params, prompt, limit, message):
    seen = []
    possible = Request((3, 4), request_key(0, 1), 4)
    impossible = Request(prompt, request_key(0, 2), limit)
    with pytest.raises(ValueError, match=message):
        Scheduler(engine, 4).run(params, [possible, impossible], lambda *progress: seen.append(progress))
    assert not seen


def test_nothing_compiles_after_warm_up(params, requests, expected):
    warm = make_engine()
    warm_up_plain(warm, params, slots=4, prompt_length=64)
    compiled = len(warm.pool)
    completions, _ = Scheduler(warm, 4).run(params, requests)
    assert_same(completions, expected)
    assert len(warm.pool) == compiled
