"""RhymeRL's and SpecActor's routers with a coordinator: what each worker gets, and that no token is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.cluster.fabric import LocalFabric
from rljax.cluster.messages import Decode, Pieces, Tick, Withdraw
from rljax.cluster.router import Balancing, SharedQueue, WorkerLoad
from rljax.papers.rhymerl.histopipe import Migrating, OutlierRule, RankedQueues
from rljax.papers.specactor.racing import Racing
from tests.cluster.scripted import Driver, ScriptedWorker, make_requests, response_to
from tests.cluster.test_coordinator import assert_whole, whole
from tests.cluster.test_router import begun, check_tokens
from tests.cluster.trouble import DOUBLED, LATEST, LOST, SEEDS


def history():
    """Every prompt of `make_requests` had a length of its own."""
    return {(7, i): [1 + i % 5] for i in range(40)}


def ranked(places=3):
    return RankedQueues(places, history)


ROUTERS = {
    "ranked": ranked,
    "ranked, more places than workers": lambda: ranked(7),
    "ranked, fewer": lambda: ranked(1),
    "migrating": lambda: Migrating(ranked(), lambda: OutlierRule(1.0, 1.1)),
    "racing": lambda: Racing(Balancing(ranked(), 2), ["ngram", "srt"], 2, catch_up=1),
}


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(ROUTERS)), SEEDS, st.sampled_from([1, 2, 3]), LOST, DOUBLED, LATEST)
def test_no_router_and_no_order_of_messages_changes_a_token(router, seed, workers, lost, doubled, latest):
    check_tokens(ROUTERS[router](), seed, workers, lost, doubled, latest)


def test_a_step_that_is_added_is_ranked_and_waits_behind_the_last_one():
    """In a rollout that does not end, each worker has its part of both steps, the second one's in reverse."""
    router = ranked(2)
    router.begin(make_requests(20, step=1))
    router.add(make_requests(20, first=20, step=2))
    assert router.waiting("a") and router.waiting("b")
    given = router.take(WorkerLoad("a", 40, 0), 40)
    assert sorted(key // 20 for key in given) == [0] * 10 + [1] * 10
    lengths = [[history()[7, key % 20 // 2][0] for key in given if key // 20 == step] for step in (0, 1)]
    assert max(lengths[0]) <= 3 <= min(lengths[1])


def raced(count):
    """A coordinator in which worker-0 has a copy of worker-1's first request, which has one token."""
    coordinator, work = begun(Racing(SharedQueue(), ["ngram", "srt"], 1, catch_up=2), count=count, slots=2)
    slow = work["worker-1"][0]
    coordinator.on(Pieces("worker-1", 1, (whole(slow, 0, 1),)), 0.5)
    commands = []
    for key in work["worker-0"]:
        commands += coordinator.on(Pieces("worker-0", 1, (whole(key),)), 1.0)
    (copy,) = [command for command in commands if isinstance(command, Decode) and command.work]
    assert (copy.worker, copy.drafter) == ("worker-0", "ngram")
    assert [(key, len(partial.tokens)) for key, _, partial in copy.work] == [(slow, 1)]
    return coordinator, slow, len(response_to(slow)[0])


def test_copies_race_and_the_longest_counts():
    coordinator, slow, tokens = raced(3)
    # The copy is ahead of what the first one has said: where that is now, nobody knows.
    assert coordinator.on(Pieces("worker-0", 1, (whole(slow, 1, 5),)), 2.0) == []
    (behind,) = coordinator.on(Pieces("worker-1", 1, (whole(slow, 1, 2),)), 2.5)
    assert (behind.worker, behind.work[0][0], len(behind.work[0][2].tokens)) == ("worker-1", slow, 5)
    # What it said before that reached it is known already; the end withdraws the other copy.
    assert coordinator.on(Pieces("worker-1", 1, (whole(slow, 2, 3),)), 2.6) == []
    commands = coordinator.on(Pieces("worker-0", 1, (whole(slow, 5, tokens),)), 3.0)
    assert Withdraw("worker-1", 1, (slow,)) in commands
    assert coordinator.done


def test_a_response_on_a_fuller_worker_is_not_given_up_for_its_copy():
    """All of the worker would wait for its prefill, so it goes on as it is, and may still end first."""
    coordinator, slow, tokens = raced(4)
    assert coordinator.on(Pieces("worker-0", 1, (whole(slow, 1, 4),)), 2.0) == []
    assert coordinator.on(Pieces("worker-1", 1, (whole(slow, 1, 2),)), 2.5) == []
    commands = coordinator.on(Pieces("worker-1", 1, (whole(slow, 2, tokens),)), 3.0)
    assert [each for each in commands if isinstance(each, Withdraw)] == [Withdraw("worker-0", 1, (slow,))]


def test_outliers_of_short_groups_go_to_the_longest_group():
    router = Migrating(ranked(2), lambda: OutlierRule(0.5, 1.1))
    coordinator, work = begun(router, slots=8, count=20)
    # In the group of the short ones the longest was 3 tokens before.
    short = [key for key in work["worker-0"] if len(response_to(key)[0]) > 6]
    for key in work["worker-0"]:
        if key != short[0]:
            coordinator.on(Pieces("worker-0", 1, (whole(key),)), 1.0)
    coordinator.on(Pieces("worker-0", 1, (whole(short[0], 0, 2),)), 1.0)
    assert not [c for c in coordinator.on(Tick(), 1.1) if isinstance(c, Withdraw)]
    coordinator.on(Pieces("worker-0", 1, (whole(short[0], 2, 6),)), 1.2)
    withdraw, decode = coordinator.on(Tick(), 1.3)
    assert withdraw == Withdraw("worker-0", 1, (short[0],))
    assert (decode.worker, len(decode.work[0][2].tokens)) == ("worker-1", 6)


def test_a_ranked_rollout_of_any_size_is_given_out_whole():
    for count in (1, 3, 17):
        driver = Driver(LocalFabric(ScriptedWorker), 3, router=ranked(3))
        requests = make_requests(count)
        assert_whole(driver.run(requests), requests)
