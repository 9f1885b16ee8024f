"""What the router of a run learns from rollouts."""

import numpy as np
import pytest

from rljax.assembly.checkpoint import ROUTING
from rljax.cluster.router import Balancing, SharedQueue, WorkerLoad
from rljax.cluster.routing import make_router, make_routings
from rljax.config.cluster import ClusterConfig
from rljax.config.speculation import SpeculationConfig
from rljax.papers.rhymerl.histopipe import Migrating, RankedQueues
from rljax.papers.rhymerl.history import RolloutHistory
from rljax.papers.specactor.racing import Racing
from rljax.requests import Completion, DecodeStatistics, Request

DRAFTS = SpeculationConfig(drafter="srt", others={"prompt_lookup": {}})


def router_of(config, slots, history):
    """The router of a run that knows this history."""
    routings = make_routings(config)
    routings[0].history = history
    return make_router(config, routings, DRAFTS, slots)


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


def measured(*counts, **drafts):
    """A history of (steps, rows, cached tokens, seconds) of workers, with counts of drafts."""
    history = RolloutHistory()
    for steps, rows, cached, seconds in counts:
        counted = DecodeStatistics(steps=steps, rows=rows, cached_tokens=cached, **drafts)
        history.measure({"a": (counted, seconds), "b": (DecodeStatistics(), 0.0)})
    return history


def test_seconds_of_a_token_are_fitted_to_what_workers_measured():
    assert RolloutHistory().token_seconds(0)(3, 0.0) == 1.0
    seconds = measured((10, 20, 0, 10 * 0.5 + 20 * 0.1), (10, 80, 0, 10 * 0.5 + 80 * 0.1)).token_seconds(0)
    assert seconds(4, 0.0) == pytest.approx(0.5 + 4 * 0.1)
    slower = measured((10, 20, 0, 9.0), (10, 80, 0, 3.0)).token_seconds(0)
    assert slower(4, 0.0) == pytest.approx(12.0 / 20)  # a pass is not quicker for having more rows


def test_seconds_of_a_token_grow_with_the_cache():
    work = [(10, 20, 1_000), (10, 80, 3_000), (10, 40, 9_000)]
    history = measured(*((*each, 10 * 0.5 + each[1] * 0.1 + each[2] * 1e-4) for each in work))
    assert history.token_seconds(0)(4, 500.0) == pytest.approx(0.5 + 4 * 0.1 + 500 * 1e-4)


def test_drafts_count_where_workers_draft_and_it_pays():
    """A pass takes 1 second whatever it computes. 40 slots were verified in 20 passes, of four rows each, and
    got two tokens more: a third of a pass a token, and the drafting.
    """
    drafts = {"verified": 20, "verified_slots": 40, "verified_rows": 160, "accepted": 80}
    history = measured((20, 160, 0, 20.0), **drafts)
    assert history.token_seconds(max_batch=2)(2, 0.0) == pytest.approx(1 / 3)
    assert history.token_seconds(max_batch=2)(3, 0.0) == pytest.approx(1.0)
    slow = measured((20, 160, 0, 20.0 + 10.0), draft_seconds=10.0, **drafts)
    assert slow.token_seconds(max_batch=2)(2, 0.0) == pytest.approx(1.5 / 3)
    dear = measured((20, 160, 0, 20.0 + 60.0), draft_seconds=60.0, **drafts)
    assert dear.token_seconds(max_batch=2)(2, 0.0) == pytest.approx(1.0)  # the manager would not draft


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
    before = history.state()
    del before[ROUTING + "work"]
    resumed.load_state(before | {ROUTING + "passes": np.ones((1, 3))})  # as they once were
    assert (resumed.lengths, resumed.token_seconds(0)(1, 0.0)) == (history.lengths, 1.0)


def test_keys_make_routers():
    def router(**keys):
        return router_of(ClusterConfig(workers=4, **keys), 8, RolloutHistory())

    assert type(router()) is SharedQueue
    assert type(router(pipe="ranked")) is RankedQueues
    assert type(router(pipe="two_tiers", migration=True)) is Migrating
    both = router(balance=8, race=2)
    assert (type(both), type(both.inner)) == (Racing, Balancing)


def sized(workers, groups, lengths, **keys):
    """Number of workers of each ranking group in the second epoch."""
    history = RolloutHistory()
    requests, completions = rollout(lengths)
    history.learn(requests, completions)
    history.measure({"a": (DecodeStatistics(steps=10, rows=20), 7.0)})
    config = ClusterConfig(workers=workers, pipe_groups=groups, **keys)
    router = router_of(config, 1, history)
    router.begin(dict(enumerate(requests)))
    found = [router.group_of_worker(f"worker-{number}") for number in range(workers)]
    return [found.count(group) for group in range(groups)]


@pytest.mark.parametrize("pipe, workers", [("ranked", [4, 4, 4, 4]), ("two_tiers", [1, 3, 4, 8])])
def test_two_tiers_give_long_groups_more_workers(pipe, workers):
    assert sized(16, 4, FOUR, pipe=pipe) == workers


FOUR = {prompt: [length] * 16 for prompt, length in enumerate([4, 40, 100, 400])}


def test_the_fewest_and_the_most_workers_of_a_group_are_keys():
    assert sized(16, 4, FOUR, pipe="two_tiers", pipe_min_workers=3) == [3, 4, 3, 6]
    assert sized(16, 4, FOUR, pipe="two_tiers", pipe_max_workers=6) == [6, 2, 2, 6]
    long = {prompt: [4] * 9 for prompt in range(15)} | {15: [4000] * 90}
    assert sized(32, 16, long, pipe="two_tiers")[-1] == 8  # four times an even share
    assert sized(32, 16, long, pipe="two_tiers", pipe_max_workers=9)[-1] == 9


def test_the_first_epoch_has_no_ranking_groups():
    """As long as most prompts are new, every worker takes the next ones (RhymeRL, section 6.2)."""
    history = RolloutHistory()
    router = router_of(ClusterConfig(workers=2, pipe="ranked"), 4, history)
    requests, completions = rollout({prompt: [prompt] * 2 for prompt in range(1, 9)})
    epoch = dict(enumerate(requests))

    def begun():
        router.begin(epoch)
        return len(router.longest), router.take(WorkerLoad("a", 16, 0), 16)

    assert begun() == (0, list(epoch))  # one worker alone gets all that there is
    history.learn(requests[:6], completions[:6])  # three of eight
    assert begun() == (0, list(epoch))
    history.learn(requests[6:8], completions[6:8])
    groups, given = begun()
    assert groups == 2 and len(given) == 8  # its own part
