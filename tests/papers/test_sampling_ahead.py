"""Run-ahead: the next rollout's requests in this one's idle slots, into drafts and nothing else."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.shapes import warm_up_plain
from rljax.papers.srt.run_ahead import RunAhead, SamplingAhead
from rljax.requests import DecodeStatistics, Request
from rljax.rollout.collector import Scheduler
from rljax.sampling.noise import request_key
from rljax.speculation.pass_choice import Candidates, best_rows
from rljax.speculation.pass_times import PassTimes
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import VOCAB, FixedTimes, assert_same, make_engine

MAX_SLOTS = 4


@pytest.fixture(scope="module")
def engine(params):
    engine = make_engine(buckets=Buckets((2, 4), (128,), (16,), 7), steps=3)
    warm_up_plain(engine, params, MAX_SLOTS, 20, late_inserts=True)
    return engine


def make_requests(step, limits=(60, 9, 7, 30)):
    rng = np.random.default_rng(step)
    prompts = [tuple(rng.integers(2, VOCAB, 6 + i).tolist()) for i in range(len(limits))]
    return [
        Request(prompt, request_key(0, 0, step, i, sample), limit, step=step)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for sample in range(2)
    ]


def make_speculator(engine, run_ahead, name="srt"):
    times = FixedTimes({0: 1.0, 8: 1.1, 16: 1.1})  # verifying is cheap: every draft is tried
    return Speculator(engine, {name: make_drafter(name)}, MAX_SLOTS, run_ahead, times)


def ran_ahead(engine, params, later):
    """What is known of later requests, the speculator and its scheduler, after a rollout that ran ahead."""
    run_ahead = RunAhead(below=MAX_SLOTS, max_share=1.0)
    speculator = make_speculator(engine, run_ahead)
    scheduler = Scheduler(engine, MAX_SLOTS, None, speculator)
    run_ahead.plan(later)
    scheduler.run(params, make_requests(0))
    return run_ahead, speculator, scheduler


def recalled(run_ahead, requests):
    return [run_ahead.recall(request.noise_key) for request in requests]


def length_of(kept):
    return sum(len(tokens) for tokens in kept if tokens is not None)


def test_the_next_rollout_finds_its_own_tokens_as_drafts(engine, params):
    plain = Scheduler(engine, MAX_SLOTS)
    run_ahead = RunAhead(below=MAX_SLOTS, max_share=1.0)
    speculator = make_speculator(engine, run_ahead)
    scheduler = Scheduler(engine, MAX_SLOTS, None, speculator)
    now, later = make_requests(0), make_requests(1)
    programs = len(engine.pool)
    run_ahead.plan(later)
    completions, statistics = scheduler.run(params, now)
    expected, plain_statistics = plain.run(params, now)
    assert_same(completions, expected)
    assert statistics.tokens == plain_statistics.tokens == sum(len(one.response_ids) for one in completions)
    assert statistics.ahead_tokens > 0
    kept = recalled(run_ahead, later)
    assert length_of(kept) == statistics.ahead_tokens
    assert not any(run_ahead.completion(request) for request in later)  # the next step takes nothing over
    completions, _ = scheduler.run(params, later)
    assert_same(completions, plain.run(params, later)[0])
    for tokens, completion in zip(kept, completions, strict=True):
        if tokens is not None:  # under the same weights every token comes again
            np.testing.assert_array_equal(tokens, completion.response_ids[: len(tokens)])
    metrics = speculator.drafters["srt"].metrics()
    assert metrics["ahead_agreed"] == metrics["ahead_tokens"] == statistics.ahead_tokens
    assert len(engine.pool) - programs <= 4  # verifying programs; nothing for inserting


def test_what_is_known_survives_a_rollout_without_a_plan(engine, params):
    later = make_requests(1)
    run_ahead, _, scheduler = ran_ahead(engine, params, later)
    known = recalled(run_ahead, later)
    _, statistics = scheduler.run(params, make_requests(7))  # an evaluation, say
    assert statistics.ahead_tokens == 0 < length_of(known)
    jax.tree.map(np.testing.assert_array_equal, known, recalled(run_ahead, later))


def test_it_waits_until_few_are_running_and_stops_at_its_share(engine, params):
    later = make_requests(1)
    for run_ahead in (RunAhead(below=0, max_share=1.0), RunAhead(below=MAX_SLOTS, max_share=1e-9)):
        run_ahead.plan(later)
        speculator = make_speculator(engine, run_ahead)
        _, statistics = Scheduler(engine, MAX_SLOTS, None, speculator).run(params, make_requests(0))
        prompts = {request.prompt_ids for request in later if run_ahead.recall(request.noise_key) is not None}
        assert len(prompts) <= (0 if run_ahead.below == 0 else 1)
        assert (statistics.ahead_tokens > 0) == bool(prompts)


def test_likely_long_ones_come_first():
    run_ahead = RunAhead(1, 0.5)
    requests = make_requests(0)
    prompts = [request.prompt_ids for request in requests[::2]]
    run_ahead.plan(requests)
    # Nothing is known but the prompts.
    first = [request.prompt_ids for request in run_ahead.upcoming[::2]]
    assert first == sorted(prompts, key=len, reverse=True)
    run_ahead.lengths.learn(prompts[1], 50)
    run_ahead.lengths.learn(prompts[1], 70)
    run_ahead.lengths.learn(prompts[2], 4)
    run_ahead.plan(requests)
    # 60 and 4 are known; the others are as much longer than their prompts as those were, and 9 > 6.
    assert [request.prompt_ids for request in run_ahead.upcoming[::2]] == [prompts[i] for i in (1, 3, 0, 2)]


def test_a_response_is_taken_over_by_a_request_of_its_noise_alone():
    """Another of the same prompt finds its tokens as drafts."""
    run_ahead, request, whole = RunAhead(1, 0.5), make_requests(0)[0], object()
    other = dataclasses.replace(request, noise_key=request_key(0, 0, 1, 0, 0))
    run_ahead.keep([(request, [5, 6], whole)])
    run_ahead.match([other, request])
    assert run_ahead.recall(other.noise_key).tolist() == [5, 6]
    assert run_ahead.completion(other) is None and run_ahead.completion(request) is whole


class TimesByBatch(PassTimes):
    """A slot more costs `slot` seconds in a plain step; rows of verifying passes cost nothing."""

    def __init__(self, slot):
        super().__init__()
        self.slot = slot

    def plain(self, batch, length):
        return 1e-6 + self.slot * batch

    def verify(self, batch, length, rows):
        return 1e-7

    def _add(self, seconds, *key):
        assert seconds > 0


@pytest.mark.parametrize(("slot", "wide"), [(1e-9, True), (1e3, False)])
def test_the_batch_stays_wide_where_tokens_ahead_save_more_than_it_costs(engine, params, slot, wide):
    run_ahead = RunAhead(below=MAX_SLOTS, max_share=1.0)
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, MAX_SLOTS, run_ahead, TimesByBatch(slot))
    scheduler = Scheduler(engine, MAX_SLOTS, None, speculator)
    start, weights = speculator.decoder.start, []

    def weighing_start(params, state, active):
        weights.append(active.ahead_weight)
        return start(params, state, active)

    speculator.decoder.start = weighing_start
    sampled = []
    for step in range(3):
        assert step > 0 or not any(weights)
        run_ahead.plan(make_requests(step + 1))
        completions, statistics = scheduler.run(params, make_requests(step))
        assert_same(completions, Scheduler(engine, MAX_SLOTS).run(params, make_requests(step))[0])
        sampled.append(statistics.ahead_tokens)
    assert run_ahead.accepted_share > 0.25  # the weights stay the same
    assert 0 < max(weights) < 1
    assert statistics.ahead_saved_seconds > 0
    # The last rollout again, with nothing measured: its batch shrinks as soon as it can.
    fresh = RunAhead(below=MAX_SLOTS, max_share=1.0)
    fresh.load_state({key: array for key, array in run_ahead.state().items() if key != "ahead_accepted"})
    unmeasured = Speculator(engine, {"srt": make_drafter("srt")}, MAX_SLOTS, fresh, TimesByBatch(slot))
    fresh.plan(make_requests(3))
    _, conservative = Scheduler(engine, MAX_SLOTS, None, unmeasured).run(params, make_requests(2))
    assert (sampled[-1] > conservative.ahead_tokens) == wide
    assert conservative.ahead_pass_seconds == 0
    assert (statistics.ahead_pass_seconds > 0) == wide
    metrics, spent = speculator.metrics(statistics), statistics.ahead_seconds + statistics.ahead_pass_seconds
    assert metrics["speculation/run_ahead_seconds"] == spent
    assert metrics["speculation/run_ahead_saved"] == statistics.ahead_saved_seconds


def sampling_ahead(run_ahead, seconds):
    """What fills idle slots, where an accepted token saves so many seconds, and a slot more costs 0.1 s."""
    speculator = SimpleNamespace(decoder=SimpleNamespace(times=TimesByBatch(0.1)))
    ahead = SamplingAhead(run_ahead, speculator, takes_over=True)
    ahead._saved_per_token = lambda slots: seconds
    return ahead


def test_the_widest_batch_that_pays():
    buckets = Buckets((2, 4, 8, 16), (64,), (32,), 7)
    engine, statistics, run_ahead = SimpleNamespace(buckets=buckets), DecodeStatistics(), RunAhead(16, 1.0)

    def batch(seconds, available=16, running=3, present=16):
        decoded = {"running": [0] * running, "yielding": [0] * available}
        slots = SimpleNamespace(engine=engine, statistics=statistics, batch=present, length=64, **decoded)
        return sampling_ahead(run_ahead, seconds).batch(slots, buckets.batch_for(running))

    assert batch(1e9) == 4  # nothing is measured
    run_ahead._offered, run_ahead._accepted = 100 - 16, 50
    assert run_ahead.accepted_share == 0.5
    assert batch(0.21) == 16 and batch(0.19) == 4  # a slot more costs 0.1 s, and brings half of the seconds
    assert batch(1.0, available=1) == 4 and batch(1.0, available=5) == 8
    assert batch(1.0, present=8) == 8
    assert batch(1.0, running=16, available=0) == 16
    # A wide pass must have room for as many drafts as passes verified: 7 a response with 4 slots, 3 with 16.
    statistics.drafted, statistics.verified_slots = 70, 10
    assert batch(1.0) == 8


def test_a_node_of_a_request_sampled_ahead_is_worth_what_it_saves_later():
    probability = np.asarray([[0.9, 0.5, 0.1], [0.9, 0.8, 0.7]])
    current = np.asarray([True, False])

    def candidates(weight):
        usable = np.ones((2, 3), bool)
        return Candidates.from_nodes(usable, probability, current, ahead_weight=weight)

    # Three nodes fit. Without a measured value they are the current request's, whatever their chance.
    assert candidates(0.0).take(5, 3).tolist() == [[True] * 3, [False] * 3]
    assert candidates(0.0).take(7, 3).tolist() == [[True] * 3, [True] * 2 + [False]]  # the room that is left
    assert candidates(0.5).take(5, 3).tolist() == [[True, True, False], [True, False, False]]
    assert candidates(0.5).expected(5, 3) == pytest.approx(1 + 1.4)  # current tokens alone
    assert candidates(0.5).value(5, 3) == pytest.approx(1 + 1.4 + 0.5 * (1 + 0.9))
    assert candidates(0.0).value(5, 3) == candidates(0.0).expected(5, 3) == pytest.approx(1 + 1.5)
    # The larger pass pays for what it samples ahead: (1 + 1.5 + 0.5 * (1 + 2.4)) / 1.2 = 3.5 against 3.35.
    buckets, times = Buckets((2,), (64,), (5, 8), 3), FixedTimes({0: 1.0, 5: 1.0, 8: 1.2})
    assert best_rows(candidates(0.0), buckets, times, 2, 64) == 5
    assert best_rows(candidates(0.5), buckets, times, 2, 64) == 8


def test_the_weight_is_the_expected_saving_of_a_token():
    run_ahead = RunAhead(4, 1.0)
    ahead = sampling_ahead(run_ahead, 0.08)
    statistics = DecodeStatistics(tokens=100, device_seconds=8.0, host_seconds=2.0)
    slots = SimpleNamespace(statistics=statistics, yielding=[0])
    assert ahead.weight(slots) == 0.0
    run_ahead._offered, run_ahead._accepted = 100 - 16, 50
    assert ahead.weight(slots) == pytest.approx(0.5 * 0.08 / 0.1)
    assert ahead.weight(SimpleNamespace(statistics=DecodeStatistics(), yielding=[0])) == 0.0
    assert ahead.weight(SimpleNamespace(statistics=statistics, yielding=[])) == 0.0


def in_further_round(requests):
    """The requests as `RunAhead.plan` gets them when a further round of step 0 is expected."""
    return [dataclasses.replace(request, step=0) for request in requests]


def test_a_further_round_takes_over_what_was_sampled_to_its_end(engine, params):
    later = in_further_round(make_requests(1))
    run_ahead, speculator, scheduler = ran_ahead(engine, params, later)
    complete = [run_ahead.completion(request) for request in later]
    tokens = sum(len(one.response_ids) for one in complete if one is not None)
    assert 0 < sum(one is not None for one in complete) < len(later)
    finished = {}
    completions, statistics = scheduler.run(params, later, on_finished=finished.__setitem__)
    expected, plain = Scheduler(engine, MAX_SLOTS).run(params, later)
    assert_same(completions, expected)
    assert [one.versions for one in completions] == [one.versions for one in expected]
    assert_same([finished[place] for place in range(len(later))], expected)
    assert statistics.ahead_final == tokens and statistics.tokens == plain.tokens
    # What was only begun is drafted, and agrees.
    metrics = speculator.metrics(statistics)
    assert metrics["speculation/run_ahead_final"] == tokens
    assert metrics["speculation/run_ahead_offered"] == metrics["speculation/ahead_agreed"] > 0
    assert 0 < metrics["speculation/run_ahead_accepted"] <= metrics["speculation/run_ahead_offered"]
    assert statistics.ahead_saved_seconds > 0


def test_nothing_is_taken_over_once_the_weights_have_changed(engine, params):
    """The tokens are drafts, and some of them are wrong."""
    later = in_further_round(make_requests(1))
    run_ahead, speculator, scheduler = ran_ahead(engine, params, later)
    known = recalled(run_ahead, later)
    run_ahead.weights_change()
    moved = jax.tree.map(lambda leaf: leaf * 1.1, params)
    completions, statistics = scheduler.run(moved, later)
    assert statistics.ahead_final == 0 and statistics.ahead_offered == length_of(known)
    assert_same(completions, Scheduler(engine, MAX_SLOTS).run(moved, later)[0])
    metrics = speculator.drafters["srt"].metrics()
    assert 0 < metrics["ahead_agreed"] < metrics["ahead_tokens"]


def test_with_other_noise_it_is_found_by_prompt_and_sample_also_when_resumed(engine, params):
    ahead = make_requests(1)
    run_ahead, speculator, _ = ran_ahead(engine, params, ahead)
    state, run_ahead = speculator.state(), RunAhead(below=MAX_SLOTS, max_share=1.0)
    speculator = make_speculator(engine, run_ahead)
    speculator.load_state(state)
    keys = [request_key(1, 0, 1, i, 0) for i in range(len(ahead))]
    later = [dataclasses.replace(one, noise_key=key) for one, key in zip(ahead, keys, strict=True)]
    completions, statistics = Scheduler(engine, MAX_SLOTS, None, speculator).run(params, later)
    assert_same(completions, Scheduler(engine, MAX_SLOTS).run(params, later)[0])
    found = recalled(run_ahead, later)
    jax.tree.map(np.testing.assert_array_equal, found, recalled(run_ahead, ahead))
    assert statistics.ahead_final == 0 and statistics.ahead_offered == length_of(found) > 0


def test_a_round_is_expected_where_it_mostly_followed():
    run_ahead = RunAhead(1, 0.5)
    assert not run_ahead.expects_round(0) and not run_ahead.expects_round(1)
    for _ in range(3):  # always a second round, never a third
        run_ahead.count_round(0, followed=True)
        run_ahead.count_round(1, followed=False)
    assert run_ahead.expects_round(0) and not run_ahead.expects_round(1)
    again = RunAhead(1, 0.5)
    again.load_state(run_ahead.state())
    assert again.expects_round(0) and not again.expects_round(1)
    for _ in range(2):  # later steps count more
        again.count_round(0, followed=False)
    assert not again.expects_round(0)
