"""Rollouts that the policy drafts for itself, with fewer bits: the tokens of plain decoding."""

import itertools

import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.shapes import warm_up_plain
from rljax.rollout.collector import Scheduler
from rljax.speculation import draft_length
from rljax.speculation.acceptance import ChainAcceptance
from rljax.speculation.draft_length import best_length
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import SLOTS, FixedTimes, assert_same, make_engine, make_params

BUCKETS = Buckets((2, 4), (128,), (8, 32), 7)


@pytest.fixture(scope="module")
def engine(params):
    """Every program is compiled here; no test may compile another one."""
    engine = make_engine(buckets=BUCKETS)
    warm_up_plain(engine, params, SLOTS, prompt_length=64)
    Speculator(engine, {"quantized": make_drafter("quantized")}, SLOTS).warm_up(params)
    compiled = len(engine.pool)
    yield engine
    assert len(engine.pool) == compiled


CHEAP = FixedTimes({0: 1.0, 8: 1.1, 16: 1.2, 32: 1.4}, draft=0.1)
DEAR = FixedTimes({0: 1.0, 8: 1.1, 16: 1.2, 32: 1.4}, draft=1.0)


def speculate(engine, params, requests, times, lengths=None, overlap=False):
    speculator = Speculator(engine, {"quantized": make_drafter("quantized")}, SLOTS, times=times)
    if lengths is not None:
        turns = itertools.cycle(lengths)
        (proposer,) = speculator.proposers
        proposer.choose_length = lambda shape, slots, wanted: ((length := next(turns)), 1e9 * length)
    completions, statistics = Scheduler(engine, SLOTS, None, speculator, overlap).run(params, requests)
    return completions, statistics, speculator


@pytest.mark.parametrize(("lengths", "overlap"), [(None, True), ([7, 3, 0, 1, 5], False)], ids=str)
def test_the_tokens_are_those_of_plain_decoding(engine, params, requests, expected, lengths, overlap):
    completions, statistics, speculator = speculate(engine, params, requests, CHEAP, lengths, overlap)
    assert_same(completions, expected)
    assert statistics.drafted == sum(completion.drafted for completion in completions)
    assert statistics.accepted > 0.8 * statistics.drafted > 0  # 8 bits are close to the policy
    assert speculator.metrics(statistics)["speculation/draft_share"] > 0
    assert statistics.draft_seconds > 0 and statistics.host_seconds > 0


def test_where_drafting_costs_as_much_as_decoding_it_decodes(engine, params, requests, expected):
    """And rounds no weights."""
    completions, statistics, speculator = speculate(engine, params, requests, DEAR)
    assert_same(completions, expected)
    assert statistics.verified == statistics.drafted == 0
    drafter = speculator.drafters["quantized"]
    assert drafter.metrics()["refresh_seconds"] == 0.0
    drafter.policy_weights.weights()
    assert drafter.metrics()["refresh_seconds"] > 0.0 == drafter.policy_weights.pending_seconds


def test_it_follows_the_policy(engine, params, requests, expected):
    """The weights are rounded anew when the policy changes, and only then."""
    speculator = Speculator(engine, {"quantized": make_drafter("quantized")}, SLOTS, times=CHEAP)
    scheduler = Scheduler(engine, SLOTS, None, speculator)
    other = make_params(1)
    scheduler.run(other, requests)
    before = np.asarray(speculator.drafters["quantized"].policy_weights.weights()["layers"][0]["q"].values)
    completions, statistics = scheduler.run(params, requests)
    assert_same(completions, expected)
    assert statistics.accepted > 0.8 * statistics.drafted > 0
    weights = speculator.drafters["quantized"].policy_weights.weights()
    assert make_drafter("srt").policy_weights is None
    assert (before != np.asarray(weights["layers"][0]["q"].values)).any()
    scheduler.run(params, requests[:1])
    assert speculator.drafters["quantized"].policy_weights.weights() is weights


def test_drafting_begins_once_it_would_have_saved_what_beginning_takes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(draft_length.time, "perf_counter", lambda: now[0])
    start = draft_length.WorthStarting()
    assert start.allows(0.0, 0.0)
    answers = []
    for saving in (0.5, 0.5, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25):
        answers.append(start.allows(2.0, saving))
        now[0] += 1.0
    # 0.5 a second for two seconds, then nothing, then a quarter
    assert answers == [False] * 8
    assert start.allows(2.0, 0.25)
    assert not start.allows(2.1, 0.0)


def test_a_margin_is_asked_of_what_takes_time(engine, params, requests):
    """A pass of 8 rows and 1 step, of two slots: nearly twice the tokens, in nearly twice the time."""

    def drafted(step):
        times = FixedTimes({0: 1.0, 8: 1.0, 16: 99.0, 32: 99.0}, draft=step)
        speculator = Speculator(engine, {"quantized": make_drafter("quantized")}, SLOTS, times=times)
        speculator.proposers[0]._acceptance.add(10**9, 10**9)
        speculator.proposers[0].forget = lambda: None
        return Scheduler(engine, SLOTS, None, speculator).run(params, requests)[1].drafted

    assert drafted(0.90) > 0
    assert drafted(0.97) == 0


def test_the_length_of_the_highest_expected_rate_is_chosen():
    def choose(acceptance, times, slots=4):
        length, rate = best_length("quantized", acceptance, slots, slots, BUCKETS, times, 4, 64)
        return length if rate > times.plain_rate(slots, 4, 64) else 0

    assert choose(0.99, CHEAP) == 7
    assert choose(0.99, DEAR) == 0
    assert choose(0.0, CHEAP) == 0
    # Two slots may have chains of 3 in 8 rows, of 7 in 16.
    slow = FixedTimes(CHEAP.by_rows | {16: 9.0, 32: 9.0}, CHEAP.draft_seconds)
    assert choose(0.9, slow, slots=2) == 3
    assert 1 <= choose(0.6, CHEAP) < 7
    lengths = [choose(rate, CHEAP) for rate in np.linspace(0, 1, 21)]
    assert lengths == sorted(lengths)


def test_acceptance_starts_hopeful_and_ends_at_what_happened():
    acceptance = ChainAcceptance()
    assert acceptance.rate == pytest.approx(0.8)
    acceptance.add(4000, 1000)
    assert acceptance.rate == pytest.approx(0.25, abs=0.01)
    acceptance.forget()
    assert acceptance.rate == pytest.approx(0.25, abs=0.01)
    acceptance.add(0, 0)
    for _ in range(20):
        acceptance.forget()
    assert acceptance.rate == pytest.approx(0.8, abs=0.01)
