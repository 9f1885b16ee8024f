"""Runs whose rollouts are decoded with older weights: the same bits, however they came about."""

import json

import pytest

from rljax.assembly.saved_policy import _checkpoints, load_saved_policy
from rljax.cluster.decoder import ClusterDecoder
from rljax.run_directory import RunDirectory
from rljax.training import loop
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


def test_two_workers_decode_while_the_trainer_updates(world, stale_alone, monkeypatch):
    """They end the next step's rollout before the update does, and the run is the same."""
    honest, in_flight, decoders = Learner.learn, [], []

    def learn(self, *args):
        coordinator = decoders[0].coordinator
        number = max(coordinator.rollouts.open, default=None)
        if number is not None:
            rollout = coordinator.rollouts.open[number]
            for _ in range(2000):
                if rollout.done:
                    break
                loop.time.sleep(0.01)
            in_flight.append((rollout.version, rollout.done))
        return honest(self, *args)

    monkeypatch.setattr(Learner, "learn", learn)
    overrides = (STALE, "cluster.weights=files", f"cluster.weights_dir={world}/weights")
    clustered, _ = local_run(world, "stale_two", monkeypatch, *overrides, steps=3, decoders=decoders)
    assert not differences(stale_alone, clustered)
    assert in_flight == [(0, True), (1, True)]


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
        for _ in range(12):  # a part of what is in progress, whatever the time
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
