"""Runs whose rollouts are decoded with older weights: the same bits, however they came about."""

import json
from types import SimpleNamespace

import pytest

from rljax.assembly.saved_policy import _checkpoints, load_saved_policy
from rljax.cluster.decoder import ClusterDecoder
from rljax.config import ExperimentConfig
from rljax.papers.rhymerl.histopipe import OutlierRule, RankedQueues
from rljax.requests import Request
from rljax.run_directory import RunDirectory
from rljax.sampling.noise import request_key
from rljax.speculation.run_ahead import RunAhead
from rljax.training import loop
from rljax.training.extras import PlansAhead
from rljax.training.learner import Learner
from tests.cluster.same_run import differences, run
from tests.cluster.turns import local_run

STALE = "rollout.staleness=1"


def steps_of(clustered):
    return [line for line in clustered.metrics if line["step"]]


def test_with_staleness_a_step_is_sampled_by_the_weights_before(alone, stale_alone):
    steps = steps_of(stale_alone)
    assert [line["rollout/lag_mean"] for line in steps] == [0, 1, 1]
    assert [line["rollout/stale_share"] for line in steps] == [0, 1, 1]
    # The training pass computes the logprobs of the version that sampled them.
    assert [line["mismatch/logprob_abs_max"] for line in steps] == [0, 0, 0]
    # The second step is where the policies differ.
    first, second = steps_of(alone)
    assert first["reward/mean"] == steps[0]["reward/mean"]
    assert second["reward/mean"] != steps[1]["reward/mean"]
    assert steps[1]["policy/ratio_mean"] != 1.0


AHEAD = (
    "speculation.drafter=srt",
    "speculation.run_ahead_below=3",
    "speculation.run_ahead_share=1.0",
    "speculation.verify_buckets=[16]",
    "speculation.max_drafts=3",
)


def test_idle_slots_sample_ahead_what_has_begun(world, stale_alone, monkeypatch):
    """The next step's requests, which have begun with older weights than it will have: they are drafts."""
    plans, honest = [], PlansAhead.before_round

    def before_round(self, round_):
        honest(self, round_)
        plans.append((self._state.step, {request.step for request in self._run_ahead.upcoming}))

    monkeypatch.setattr(PlansAhead, "before_round", before_round)
    ahead = run(world, "stale_ahead", STALE, *AHEAD, steps=3)
    assert not differences(stale_alone, ahead)
    assert plans == [(0, {1}), (1, {2}), (2, set())]
    assert sum(line["speculation/run_ahead_tokens"] for line in steps_of(ahead)) > 0
    assert sum(line["speculation/run_ahead_offered"] for line in steps_of(ahead)) > 0


def test_what_has_begun_is_planned_with_its_own_requests():
    """Not those behind it, where the run's position in the data is."""
    ahead = RunAhead(3, 1.0)
    requests = [Request((1, 2), request_key(0, 0, 1, 0, sample), 8, step=1) for sample in range(2)]
    begun = {1: SimpleNamespace(requests=requests)}
    config = ExperimentConfig.model_construct(algorithm=SimpleNamespace(dynamic_sampling=False))
    state = SimpleNamespace(step=0, begun=begun, data_position=4)
    PlansAhead(ahead, config, state, prompts=None, collector=None).before_round(0)
    assert list(ahead.upcoming) == requests


def test_two_workers_decode_while_the_trainer_updates(world, stale_alone, monkeypatch):
    """They end the next step's rollout before the update does, and the run is the same."""
    honest, under_way, decoders = Learner.learn, [], []

    def learn(self, *args):
        coordinator = decoders[0].coordinator
        number = max(coordinator.rollouts.open, default=None)
        if number is not None:
            rollout = coordinator.rollouts.open[number]
            for _ in range(2000):
                if rollout.done:
                    break
                loop.time.sleep(0.01)
            under_way.append((rollout.version, rollout.done))
        return honest(self, *args)

    monkeypatch.setattr(Learner, "learn", learn)
    overrides = (STALE, "cluster.weights=files", f"cluster.weights_dir={world}/weights")
    clustered, _ = local_run(world, "stale_two", monkeypatch, *overrides, steps=3, decoders=decoders)
    assert not differences(stale_alone, clustered)
    assert under_way == [(0, True), (1, True)]


def test_a_killed_run_goes_on_with_the_same_bits(world, stale_alone, monkeypatch):
    """The third step's responses are decoded again, with the weights of the second."""
    honest = loop.learn

    def learn(run, groups):
        if run.state.step == 2:
            raise RuntimeError("of a test")
        return honest(run, groups)

    monkeypatch.setattr(loop, "learn", learn)
    with pytest.raises(RuntimeError):
        run(world, "stale_killed", STALE, steps=3)
    monkeypatch.setattr(loop, "learn", honest)
    resumed, _ = local_run(world, "stale_killed", monkeypatch, STALE, resumes=True, steps=3)
    assert not differences(stale_alone, resumed)
    saved = load_saved_policy(world / "stale_killed" / "run", step=2)
    assert any(name.startswith("sampled_by/1/") for name in _checkpoints(saved.path).host_arrays(2))
    assert not saved.drafter_state()  # which others read


def schedule_of(world, name):
    return (world / name / "run" / "schedule.jsonl").read_bytes()


def test_batches_in_the_order_of_arrival_are_repeated_from_their_schedule(world, monkeypatch):
    """Once with other workers and another network, once in one process."""
    turns = iter(range(10**9))

    def listening(self):
        for _ in range(12):  # a part of what is under way, whatever the time
            self.listen()
        return loop.failures.contextlib.nullcontext()

    monkeypatch.setattr(ClusterDecoder, "listening", listening)
    lag = "rollout.max_staleness=2"
    slow = lambda data: (next(turns) % 3,)  # noqa: E731
    first, _ = local_run(
        world, "arrival", monkeypatch, lag, "cluster.weights=jax_transfer", steps=3, network=slow, versions=4
    )
    steps = steps_of(first)
    assert [line["mismatch/logprob_abs_max"] for line in steps] == [0, 0, 0]
    assert max(line["rollout/lag_max"] for line in steps) in (1, 2)
    lines = [json.loads(line) for line in schedule_of(world, "arrival").splitlines()]
    groups = [group for line in lines for group in line["groups"]]
    assert len({(group["step"], group["problem"]) for group in groups}) == 6
    assert all(line["step"] - 1 - group["created"] <= 2 for line in lines for group in line["groups"])
    assert any(len(spans) > 1 for group in groups for spans in group["versions"])  # went on under newer ones
    shown = RunDirectory(world / "arrival" / "run").read_rollouts()
    assert any(points for line in shown for points in line["running"])  # how many ran while a step waited

    replay = (lag, f"cluster.replay={world}/arrival/run")
    again, _ = local_run(world, "replayed", monkeypatch, *replay, "cluster.workers=1", steps=3, versions=4)
    assert not differences(first, again)
    assert schedule_of(world, "replayed") == schedule_of(world, "arrival")
    alone = run(world, "replayed_alone", *replay, steps=3)
    assert not differences(first, alone)


def test_outliers_go_on_in_the_next_step(world, monkeypatch):
    """Workers forget the responses of the first group at their fourth token, as long as the first step lasts,
    and these count as outliers. The third group takes their place; they go on in the next step, under its
    weights, and are in its batch. The schedule repeats it.
    """
    held, renewed = [], []
    honest_begin, honest_renew = ClusterDecoder.begin, ClusterDecoder.renew

    def begin(self, params, requests, version, *args, **more):
        begun = honest_begin(self, params, requests, version, *args, **more)
        if more.get("renewed") and not held:
            held.extend(begun.keys)
        return begun

    def renew(self, params, version):
        renewed.extend([version] if version else [])
        return honest_renew(self, params, version)

    def forget(fabric):
        for worker in () if renewed else fabric.workers.values():
            for key in held:
                response = worker._responses.get(key)
                if response is not None and response.ending is None and len(response.tokens) > 3:
                    worker.loop.cancel([worker._responses.pop(key)])

    def outliers(self, running, size, longest):
        return [] if renewed else [key for key in running if key in held]

    monkeypatch.setattr(ClusterDecoder, "begin", begin)
    monkeypatch.setattr(ClusterDecoder, "renew", renew)
    monkeypatch.setattr(OutlierRule, "outliers", outliers)
    lag = ("rollout.max_staleness=2", "cluster.into_next_step=true")
    parked, _ = local_run(world, "parked", monkeypatch, *lag, interfere=forget, steps=3, versions=4)
    assert [line["cluster/parked"] for line in steps_of(parked)] == [1, 0, 0]
    lines = [json.loads(line) for line in schedule_of(world, "parked").splitlines()]
    spans = lines[1]["groups"][0]["versions"]
    assert lines[1]["groups"][0]["created"] == 0
    assert (0, 1) in {tuple(version for _, version in each) for each in spans}

    alone = run(world, "parked_again", lag[0], f"cluster.replay={world}/parked/run", steps=3)
    assert not differences(parked, alone)
    assert schedule_of(world, "parked_again") == schedule_of(world, "parked")


def test_ranking_groups_with_outliers_that_go_into_the_next_step(world, monkeypatch):
    """RhymeRL uses both. The prompts of a step reach the router together, and are ranked from the second
    epoch on, which is a step here; the schedule repeats the run.
    """
    ranked, honest = [], RankedQueues.add

    def add(self, requests):
        honest(self, requests)
        if next(iter(requests.values())).training:
            prompts = len({request.prompt_ids for request in requests.values()})
            ranked.append((prompts, len(requests), len(self.longest)))

    monkeypatch.setattr(RankedQueues, "add", add)
    lag = ("rollout.max_staleness=2", "cluster.into_next_step=true", "cluster.pipe=ranked")
    piped, _ = local_run(world, "piped_lag", monkeypatch, *lag, steps=4, versions=4)
    assert all(prompts > 1 for prompts, _, _ in ranked)
    assert sum(requests for _, requests, _ in ranked) == 4 * 8
    assert (ranked[0][-1], ranked[-1][-1]) == (0, 2)
    alone = run(world, "piped_lag_again", lag[0], f"cluster.replay={world}/piped_lag/run", steps=4)
    assert not differences(piped, alone)
