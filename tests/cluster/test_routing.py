"""What the router of a run learns from rollouts."""

import numpy as np
import pytest

from rljax.cluster.histopipe import Migrating, RankedQueues
from rljax.cluster.racing import Racing
from rljax.cluster.router import Balancing, SharedQueue
from rljax.cluster.routing import RolloutHistory, make_router
from rljax.config.cluster import ClusterConfig
from rljax.requests import Completion, DecodeStatistics, Request


def rollout(lengths, training=True):
    """Requests of two responses a prompt, and completions of these lengths."""
    pairs = [(prompt, length) for prompt, each in lengths.items() for length in each]
    requests = [Request((prompt,), np.zeros(2, np.uint32), 99, training) for prompt, _ in pairs]
    return requests, [Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "eos") for _, n in pairs]


def test_lengths_of_the_last_group_and_their_growth():
    history = RolloutHistory()
    history.learn(*rollout({1: [4, 8], 2: [10, 10]}))
    assert (history.lengths, history.growth) == ({(1,): [4, 8], (2,): [10, 10]}, 1.1)
    history.learn(*rollout({1: [12, 12]}))
    history.learn(*rollout({2: [99]}, training=False))  # an evaluation says nothing of training
    assert (history.lengths, history.growth) == ({(1,): [12, 12], (2,): [10, 10]}, 2.0)


def test_seconds_of_a_pass_are_fitted_to_what_workers_measured():
    history = RolloutHistory()
    assert history.pass_seconds(3, 0.0) == 1.0
    counted = lambda steps, rows: DecodeStatistics(steps=steps, rows=rows)  # noqa: E731
    history.measure({"a": (counted(10, 20), 10 * 0.5 + 20 * 0.1), "b": (DecodeStatistics(), 0.0)})
    history.measure({"a": (counted(10, 80), 10 * 0.5 + 80 * 0.1)})
    assert history.pass_seconds(4, 0.0) == pytest.approx(0.5 + 4 * 0.1)
    slower = RolloutHistory()
    slower.measure({"a": (counted(10, 20), 9.0), "b": (counted(10, 80), 3.0)})
    assert slower.pass_seconds(4, 0.0) == pytest.approx(
        12.0 / 20
    )  # a pass is not quicker for having more rows


def test_a_resumed_run_knows_what_its_rollouts_were_like():
    history = RolloutHistory(train_seconds=2.5)
    history.learn(*rollout({1: [4, 8], 2: [10, 10], 3: [5, 5]}))
    history.learn(*rollout({1: [12, 12], 2: [10]}))
    history.measure({"a": (DecodeStatistics(steps=10, rows=20), 7.0)})
    resumed = RolloutHistory()
    resumed.load_state(history.state())
    assert resumed == history
    assert list(resumed.lengths) == [(3,), (1,), (2,)]  # the oldest one is forgotten first
    fresh = RolloutHistory()
    fresh.load_state(RolloutHistory().state())
    fresh.load_state({})  # of a run without workers
    assert fresh == RolloutHistory()


def test_keys_make_routers():
    def router(**keys):
        return make_router(ClusterConfig(workers=4, **keys), ["srt", "prompt_lookup"], 8, RolloutHistory())

    assert type(router()) is SharedQueue
    assert type(router(pipe="ranked")) is RankedQueues
    assert type(router(pipe="two_tiers", migration=True)) is Migrating
    both = router(balance=8, race=2)
    assert (type(both), type(both.inner)) == (Racing, Balancing)


@pytest.mark.parametrize("pipe, workers", [("ranked", [2, 2]), ("two_tiers", [1, 3])])
def test_two_tiers_give_long_groups_more_workers(pipe, workers):
    history = RolloutHistory()
    requests, completions = rollout({1: [4] * 6, 2: [400] * 6})
    history.learn(requests, completions)
    history.measure({"a": (DecodeStatistics(steps=10, rows=20), 7.0)})
    config = ClusterConfig(workers=4, pipe=pipe, pipe_groups=2)
    router = make_router(config, ["srt"], 1, history)
    router.begin(dict(enumerate(requests)))
    groups = [router.group_of_worker(f"worker-{number}") for number in range(4)]
    assert [groups.count(0), groups.count(1)] == workers
