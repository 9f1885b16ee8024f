"""Run-ahead on idle workers: the run without, with drafts from what idle workers have sampled before."""

from types import SimpleNamespace

import pytest

from rljax.config import ExperimentConfig
from rljax.papers.srt.ahead import AheadDriver, AheadWorker, SampleAhead, SampledAhead
from rljax.papers.srt.plans import PlansAhead
from rljax.papers.srt.run_ahead import RunAhead
from rljax.requests import Request
from rljax.sampling.noise import request_key
from rljax.training import loop
from rljax.training.learner import Learner
from tests.cluster.same_run import differences, run
from tests.cluster.scripted import make_requests
from tests.cluster.turns import local_run
from tests.speculation.speculators import make_engine

AHEAD = (
    "speculation.drafter=srt",
    "speculation.run_ahead_below=1",
    "speculation.verify_buckets=[16]",
    "speculation.max_drafts=3",
)


def counts(clustered, name):
    return [line[f"speculation/run_ahead_{name}"] for line in clustered.metrics if line["step"]]


def some_are_sampled(decoders, monkeypatch):
    """An update takes until idle workers have sampled something ahead, if there is something to sample."""
    honest = Learner.learn

    def learn(self, *args):
        driver = decoders[0].coordinator.idle_work
        for _ in range(2000):
            if not (driver._waiting or driver._at_work) or driver._sampled > 20:
                break
            loop.time.sleep(0.01)
        return honest(self, *args)

    monkeypatch.setattr(Learner, "learn", learn)


@pytest.fixture
def plans(monkeypatch):
    """Of each round that begins: the run's step, and the steps of the requests that may be sampled ahead."""
    plans, honest = [], PlansAhead.before_round

    def before_round(self, round_):
        honest(self, round_)
        plans.append((self._run.state.step, {request.step for request in self._run_ahead.upcoming}))

    monkeypatch.setattr(PlansAhead, "before_round", before_round)
    return plans


def test_idle_workers_sample_ahead_what_others_draft(world, alone, monkeypatch, verifies_always):
    ahead, _ = local_run(world, "ahead_idle", monkeypatch, *AHEAD, "cluster.workers=3")  # two prompts
    assert not differences(alone, ahead)
    sampled, offered, accepted = (counts(ahead, name) for name in ("tokens", "offered", "accepted"))
    assert sampled[0] > 0 == offered[0]
    assert 0 < accepted[1] <= offered[1] <= sum(sampled)  # some are sampled between the two steps


def test_with_staleness_they_sample_the_step_behind_the_next(
    world, stale_alone, monkeypatch, verifies_always, plans
):
    decoders = []
    some_are_sampled(decoders, monkeypatch)
    stale = ("rollout.staleness=1", *AHEAD)
    ahead, _ = local_run(world, "ahead_stale", monkeypatch, *stale, steps=3, decoders=decoders)
    assert not differences(stale_alone, ahead)
    assert plans == [(0, {2}), (1, set()), (2, set())]
    assert counts(ahead, "tokens")[0] > 0
    assert counts(ahead, "offered")[:2] == [0, 0] < counts(ahead, "offered")[2:]
    assert counts(ahead, "accepted")[2] > 0


def test_idle_slots_sample_ahead_what_has_begun(world, stale_alone, plans):
    """The next step's requests, which have begun with older weights than it will have: they are drafts."""
    keys = ("speculation.run_ahead_below=3", "speculation.run_ahead_share=1.0")
    ahead = run(world, "stale_ahead", "rollout.staleness=1", *AHEAD, *keys, steps=3)
    assert not differences(stale_alone, ahead)
    assert plans == [(0, {1}), (1, {2}), (2, set())]
    assert sum(counts(ahead, "tokens")) > 0
    assert sum(counts(ahead, "offered")) > 0


def test_what_has_begun_is_planned_with_its_own_requests():
    """Not those behind it, where the run's position in the data is."""
    ahead = RunAhead(3, 1.0)
    requests = [Request((1, 2), request_key(0, 0, 1, 0, sample), 8, step=1) for sample in range(2)]
    begun = {1: SimpleNamespace(requests=requests)}
    config = ExperimentConfig.model_construct(algorithm=SimpleNamespace(dynamic_sampling=False))
    state = SimpleNamespace(step=0, begun=begun, data_position=4)
    PlansAhead(SimpleNamespace(config=config, state=state, cluster=None), ahead).before_round(0)
    assert list(ahead.upcoming) == requests


# -- the parts ---------------------------------------------------------------------------------------------


def snapshot(*idle, step=0, version=5):
    rollouts = {1: SimpleNamespace(requests=make_requests(1, step=step))}
    return SimpleNamespace(idle=dict.fromkeys(idle, version), rollouts=rollouts)


@pytest.fixture
def driver():
    run_ahead = RunAhead(1, 1.0)
    requests = list(make_requests(6, step=1).values())
    run_ahead.plan(requests)
    return AheadDriver(run_ahead, slots=4), run_ahead, requests


def test_who_is_idle_gets_as_many_as_it_has_slots(driver):
    driver, run_ahead, requests = driver
    first, second = driver.direct(snapshot("a", "b"), 0.0)
    assert first == SampleAhead("a", 1, 5, tuple(requests[:4]))
    assert second == SampleAhead("b", 2, 5, tuple(requests[4:]))
    assert not driver.direct(snapshot("a", "b", "c"), 1.0)
    assert not driver.adopt()
    driver.on(SampledAhead("a", 1, ((3,), (4, 5), (), (6,)), False), 2.0)
    driver.on(SampledAhead("a", 1, ((3,), (4,), (), (6, 7)), False), 2.0)  # came late
    assert driver.metrics() == {"speculation/run_ahead_tokens": 5}
    assert [order.worker for order in driver.direct(snapshot("a", "b"), 6.0)] == ["b"]  # without a word
    assert driver.adopt() and not driver.adopt()
    known = [run_ahead.recall(request.noise_key) for request in requests]
    known = [None if tokens is None else list(tokens) for tokens in known]
    assert known == [[3], [4, 5], None, [6, 7], None, None]


def test_what_was_sampled_stays_known_for_the_step_that_is_decoded(driver):
    driver, run_ahead, requests = driver
    driver.direct(snapshot("a"), 0.0)
    driver.on(SampledAhead("a", 1, ((3,), (4,), (5,), (6,)), True), 1.0)
    later = [Request((7, 8), request_key(0, 0, 2, 8, sample), 16, step=2) for sample in range(2)]
    run_ahead.plan(later)
    (order,) = driver.direct(snapshot("a", step=1), 2.0)
    assert order.requests == tuple(later)
    driver.on(SampledAhead("a", 1, ((3, 3),) * 4, True), 2.5)  # of an earlier plan
    driver.on(SampledAhead("a", 2, ((7,), (8,)), False), 3.0)
    assert driver.adopt()
    assert list(run_ahead.recall(requests[0].noise_key)) == [3]
    assert list(run_ahead.recall(later[1].noise_key)) == [8]


def test_nothing_is_given_of_a_step_that_has_begun(driver):
    driver, *_ = driver
    assert driver.direct(snapshot("a"), 0.0)
    assert not driver.direct(snapshot("a", "b", step=1), 1.0)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def test_a_worker_samples_the_tokens_of_the_run_until_it_is_needed(engine, params, requests, expected):
    worker = AheadWorker("a", engine)
    loaded = engine.load_params(params)
    assert worker.take(SampleAhead("a", 1, 5, tuple(requests)), loaded, 4) == []  # of other weights
    assert worker.idle
    assert worker.take(SampleAhead("a", 1, 5, tuple(requests)), loaded, 5) == []
    assert not worker.idle
    assert worker.work(loaded, alone=False) == []
    (event,) = worker.work(loaded, alone=True)
    assert any(event.tokens) and not event.ended
    while not event.ended:
        (event,) = worker.work(loaded, alone=True)
    assert event.tokens == tuple(tuple(each.response_ids) for each in expected)
    assert worker.idle
    assert worker.take(SampleAhead("a", 1, 5, tuple(requests)), loaded, 5) == [event]  # sent again

    worker.take(SampleAhead("a", 2, 5, tuple(requests)), loaded, 5)
    (begun,) = worker.work(loaded, alone=True)
    assert worker.stop() == [] and worker.idle
    assert worker.work(loaded, alone=True) == []
    (known,) = worker.take(SampleAhead("a", 2, 5, tuple(requests)), loaded, 5)
    assert (known.tokens, known.ended) == (begun.tokens, True)
    assert worker.take(SampleAhead("a", 1, 5, tuple(requests)), loaded, 5) == []  # comes late
