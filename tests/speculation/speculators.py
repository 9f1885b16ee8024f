"""Speculators of a tiny policy, drafters that know what they should, and what holds of every manager."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from drafters.base import Drafter
from drafters.registry import make_drafter, states_read
from drafters.training import Training
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftStrategy
from rljax.rollout.collector import Scheduler
from rljax.speculation.device_proposers import DeviceProposer
from rljax.speculation.proposals import ActiveSlots
from rljax.speculation.speculator import Speculator
from tests import tiny_policy
from tests.engines import stored_pool
from tests.tiny_policy import (
    CONFIG,
    SLOTS,
    FixedTimes,
    assert_same,
    make_params,
    make_requests,
    outcomes,
    strategy_choice,
)

BUCKETS = Buckets((2, 4), (128,), (16, 32), 7)
FEW = Buckets((4,), (128,), (16,), 7)  # where drafters on the device have programs for every shape
POOL = stored_pool()
CHEAP = FixedTimes({0: 1.0, 16: 1.1, 32: 1.2}, draft=0.05)
MIXED = strategy_choice("expected", mix=True)


@pytest.fixture(scope="session")
def params():
    return make_params()


@pytest.fixture(scope="session")
def requests():
    return make_requests()


def make_engine(hidden_layers=None, buckets=BUCKETS):
    """An engine that shares its programs with all others from here."""
    return tiny_policy.make_engine(buckets=buckets, pool=POOL, hidden_layers=hidden_layers)


@pytest.fixture(scope="session")
def expected(params, requests):
    """The responses of plain decoding, whatever the buckets."""
    return Scheduler(make_engine(), SLOTS).run(params, requests)[0]


def make_speculator(names, choice, buckets=BUCKETS, **arguments):
    drafters = {name: make_drafter(name, **arguments.get(name, {})) for name in names}
    return Speculator(
        make_engine(states_read(drafters, CONFIG), buckets), drafters, SLOTS, times=CHEAP, strategies=choice
    )


def roll_out(speculator, params, requests, overlap=False):
    return Scheduler(speculator.engine, SLOTS, None, speculator, overlap).run(params, requests)


def learn(speculator, requests, completions):
    speculator.learn(outcomes(requests, completions))


class Altered:
    """SRT, with something done to what it proposes."""

    def __init__(self):
        self.inner = make_drafter("srt", live=False)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Knowing(Altered):
    """Proposes what the responses of some requests will be, and what they will not be for all others: at most
    so many tokens.
    """

    def __init__(self, right, most=BUCKETS.max_drafts):
        super().__init__()
        self.right, self.most = right, most

    def propose(self, queries):
        drafts = self.inner.propose(queries)
        right = np.asarray([int(request) in self.right for request in queries.requests])
        tokens = np.where(right[:, None], drafts.tokens, 1)
        return dataclasses.replace(drafts, tokens=tokens, counts=np.minimum(drafts.counts, self.most))


class Silent(Altered):
    """Proposes nothing."""

    def propose(self, queries):
        return dataclasses.replace(self.inner.propose(queries), counts=np.zeros_like(queries.budgets))


def device_proposer(name, depths=(2,), trained=None):
    """The proposer of a drafter on the device with trees of these depths, as far as a manager looks; it is
    trained unless `trained` is None.
    """
    drafter = Drafter()
    if trained is not None:
        drafter.training = Training()
        drafter.training.trained = trained
    slots = SimpleNamespace(strategies=tuple(DraftStrategy(depth, 2, depth) for depth in depths))
    return DeviceProposer(name, drafter, None, None, SimpleNamespace(on_device={name: slots}, active={name}))


def listen(drafter):
    """The draft nodes of its own that a drafter will hear of, visit by visit."""
    heard, observe = [], drafter.observe
    drafter.observe = lambda sampled: (heard.append(int(sampled.drafted.sum())), observe(sampled))
    return heard


def active_slots(count, inactive=0):
    slots = np.arange(count, dtype=np.int32)
    return ActiveSlots(slots, slots, slots + 100, np.ones(count, bool), inactive)


def check_tokens(params, requests, expected, choice):
    """Three rollouts have the tokens of plain decoding, and what was learned survives a checkpoint."""
    speculator = make_speculator(("srt", "suffix_decoding", "quantized"), choice)
    for _ in range(3):  # all new, then all known
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert statistics.drafted == sum(completion.drafted for completion in completions) > 0
        learn(speculator, requests, completions)
    again = make_speculator(("srt", "suffix_decoding", "quantized"), choice)
    again.load_state(speculator.state())
    assert again.manager.state().keys() == speculator.manager.state().keys()
    for name, array in speculator.manager.state().items():
        np.testing.assert_array_equal(again.manager.state()[name], array)


def check_plainly(params, requests, expected, choice):
    """Passes over 4 tokens: room for a draft of each of 2 slots, and for none of 4."""
    engine = make_engine(buckets=Buckets((2, 4), (128,), (4,), 7))
    times = FixedTimes({0: 1.0, 4: 1.1})
    speculator = Speculator(engine, {"srt": make_drafter("srt")}, SLOTS, times=times, strategies=choice)
    for _ in range(2):
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        learn(speculator, requests, completions)
    assert statistics.verified > 0
    assert {each["batch"] for each in speculator.decisions.take()} == {2}


def check_log(params, requests, choice, overlap):
    """Every token and second of a rollout is in the log."""
    carried_out, recorded = [], []
    speculator = make_speculator(("srt", "quantized"), choice)
    add, record = speculator.decisions.add, speculator.manager.record
    speculator.decisions.add = lambda one: (carried_out.append(one), add(one))
    speculator.manager.record = lambda one: (recorded.append(one), record(one))
    _, statistics = roll_out(speculator, params, requests, overlap)
    log = speculator.decisions.take()
    assert sum(each["tokens"] for each in log) == statistics.tokens
    verifying = [each for each in log if each["rows"]]
    assert sum(each["visits"] for each in verifying) == statistics.verified > 0
    spent = sum(one.choice.draft_seconds + one.seconds for one in carried_out)
    assert sum(each["seconds"] for each in log) == pytest.approx(spent)
    if choice.by != "bandit":
        drafting = sum(one.choice.draft_seconds for one in carried_out)
        assert drafting >= 0.999 * statistics.draft_seconds > 0
    starts = [each["at"] for each in log]
    assert starts == sorted(starts)
    for each in verifying:  # a token of every turn, and one of every node on its path
        assert each["tokens"] == each["turns"] + sum(each["accepted"])
        assert len(each["accepted"]) <= len(each["verified"]) <= BUCKETS.max_drafts
    assert sum(sum(each["verified"]) for each in log) == statistics.drafted
    assert sum(sum(each["accepted"]) for each in log) == statistics.accepted
    if choice.by != "bandit":  # which expects nothing in its first tries
        assert all(each["expected"] > 0 < each["plain"] for each in log)
    # Where halves take turns, what a pass takes is for the responses of both.
    assert max(one.waiting for one in recorded if one.choice.rows) == SLOTS
