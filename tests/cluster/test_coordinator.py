"""The coordinator's rules, and that no order of messages changes what comes out."""

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.messages import (
    Arrived,
    Ask,
    Begin,
    Build,
    Decode,
    Died,
    End,
    Facts,
    Fail,
    FetchFailed,
    Heard,
    Load,
    Piece,
    Pieces,
    Renew,
    Say,
    Spawn,
    Status,
    Stop,
    Tick,
    UnknownRequests,
)
from tests.cluster.scripted import (
    FACTS,
    NUMERICS,
    Driver,
    ScriptedWorker,
    length_of,
    make_requests,
    response_to,
    response_under,
)
from tests.cluster.trouble import DOUBLED, LATEST, LOST, SEEDS, troubled_fabric

LIMITS = Limits(lease=10, patience=60, retry=5)


def started(workers=2, slots=4, limits=LIMITS):
    """A coordinator whose workers have their engines, at time 0."""
    coordinator = Coordinator(workers, FACTS, limits, NUMERICS)
    coordinator.on(Tick(), 0.0)
    coordinator.build(0.0)
    for name in coordinator.workers():
        coordinator.on(Arrived(name, FACTS), 0.0)
        coordinator.on(Status(name, NUMERICS, slots, None), 0.0)
    return coordinator


def begun(workers=2, slots=4, count=8):
    """One with a rollout in progress, and the requests of each worker."""
    coordinator = started(workers, slots)
    loads = coordinator.on(Begin(1, 0, make_requests(count)), 0.0)
    assert loads == [Load(name, 0) for name in coordinator.workers()]
    work = {}
    for name in coordinator.workers():
        for command in coordinator.on(Status(name, NUMERICS, slots, 0), 0.0):
            assert isinstance(command, Decode)
            work.setdefault(command.worker, []).extend(key for key, *_ in command.work)
    return coordinator, work


def whole(key, begin=0, end=None):
    tokens, logprobs = response_to(key)
    end = len(tokens) if end is None else end
    return Piece(key, 0, begin, tokens[begin:end], logprobs[begin:end], "eos" if end == len(tokens) else None)


def test_a_worker_is_started_compared_built_and_given_the_weights():
    coordinator = Coordinator(1, FACTS, LIMITS, NUMERICS)
    assert coordinator.on(Tick(), 0.0) == [Spawn("worker-0")]
    assert coordinator.on(Arrived("worker-0", FACTS), 1.0) == []
    assert coordinator.build(2.0) == [Build("worker-0")]
    assert coordinator.on(Status("worker-0", NUMERICS, 4, None), 3.0) == []
    requests = make_requests(4)
    assert coordinator.on(Begin(1, 5, requests), 4.0) == [Load("worker-0", 5)]
    (decode,) = coordinator.on(Status("worker-0", NUMERICS, 4, 5), 5.0)
    assert [key for key, *_ in decode.work] == [0, 1, 2, 3]
    assert (decode.version, decode.more) == (5, False)


def test_what_is_left_is_shared_and_a_worker_with_room_gets_more():
    """Groups stay together, and the others hear when nothing is left."""
    _, work = begun(count=8)
    assert work == {"worker-0": [0, 1, 2, 3], "worker-1": [4, 5, 6, 7]}
    coordinator, work = begun(count=12)  # as many as slots, and a backlog
    assert [len(keys) for keys in work.values()] == [5, 5]
    (decode,) = coordinator.on(Pieces("worker-0", 1, (whole(0),)), 1.0)[:1]
    assert [key for key, *_ in decode.work] == [10]
    (decode, other) = coordinator.on(Pieces("worker-0", 1, (whole(1),)), 1.0)
    assert [key for key, *_ in decode.work] == [11]
    assert not decode.more
    assert (other.worker, other.work, other.more) == ("worker-1", (), False)


def test_a_dead_workers_requests_go_on_from_the_ledger():
    coordinator, _ = begun()
    coordinator.on(Pieces("worker-0", 1, (whole(0, 0, 2), whole(1))), 1.0)
    stop, said, spawn, decode = coordinator.on(Died("worker-0", "of a test"), 2.0)
    assert stop == Stop("worker-0")
    assert spawn == Spawn("worker-2")
    assert said == Say("cluster: worker-0 is lost: of a test")
    assert decode.worker == "worker-1"
    assert [(key, len(partial.tokens)) for key, _, partial in decode.work][:1] == [(0, 2)]
    assert coordinator.counts.restarts == 1


def test_late_pieces_of_a_lost_worker_are_compared_and_counted():
    coordinator, _ = begun()
    coordinator.on(Pieces("worker-0", 1, (whole(0, 0, 2),)), 1.0)
    coordinator.on(Died("worker-0", "of a test"), 2.0)
    assert coordinator.on(Pieces("worker-0", 1, (whole(0, 0, 2),)), 3.0) == []
    assert coordinator.counts.late == 1
    tokens, logprobs = response_to(0)
    wrong = Piece(0, 0, 0, (9, *tokens[1:2]), logprobs[:2])
    (fail,) = coordinator.on(Pieces("worker-1", 1, (wrong,)), 3.0)
    assert fail.kind == "NumericsError"
    assert "workers worker-0 and worker-1" in fail.message


def test_a_lost_workers_answers_do_not_count():
    """The tool may have said something else to the one that goes on."""
    coordinator, _ = begun()
    coordinator.only_holders = True
    coordinator.on(Died("worker-0", "of a test"), 2.0)
    assert coordinator.on(Pieces("worker-0", 1, (whole(0, 0, 2),)), 3.0) == []
    assert not coordinator.ledger[0].tokens
    assert coordinator.counts.late == 1
    coordinator.on(Pieces("worker-1", 1, (whole(0, 0, 1),)), 4.0)
    assert len(coordinator.ledger[0].tokens) == 1


def test_a_silent_worker_is_lost_at_the_end_of_its_lease_and_not_before():
    """Nor for the silence between two rollouts."""
    coordinator, _ = begun()
    coordinator.on(Heard("worker-1"), 8.0)
    assert not [c for c in coordinator.on(Tick(), 10.0) if isinstance(c, Stop)]
    coordinator.on(Heard("worker-1"), 10.0)
    commands = coordinator.on(Tick(), 10.5)
    assert Stop("worker-0") in commands
    assert coordinator.workers() == ["worker-1"]
    assert coordinator.on(Tick(), 12.5) == [Spawn("worker-2")]

    coordinator, _ = begun()
    coordinator.on(Pieces("worker-0", 1, tuple(map(whole, range(8)))), 1.0)
    assert coordinator.done
    coordinator.on(Begin(2, 1, make_requests(2, first=8)), 1000.0)
    assert not [c for c in coordinator.on(Tick(), 1001.0) if isinstance(c, Stop | Fail)]


def test_without_any_worker_the_run_ends_with_one_line():
    coordinator = Coordinator(1, FACTS, LIMITS, NUMERICS)
    coordinator.on(Tick(), 0.0)
    assert coordinator.on(Tick(), 30.0) == []
    assert coordinator.on(Tick(), 31.0) == [Stop("worker-0"), Spawn("worker-1")]
    assert coordinator.on(Tick(), 60.0) == []
    (fail,) = coordinator.on(Tick(), 60.1)
    assert fail.kind == "ClusterError"
    assert "cluster.patience_seconds: no worker has been there for 60 seconds" in fail.message
    assert "\n" not in fail.message


def test_workers_that_end_at_once_are_started_ever_later_and_then_no_more():
    coordinator, now, starts = Coordinator(1, FACTS, LIMITS, NUMERICS), 0.0, []
    commands = coordinator.on(Tick(), now)
    while not any(isinstance(command, Fail) for command in commands):
        if any(isinstance(command, Spawn) for command in commands):
            starts.append(now)
            name = coordinator.workers()[0]
            coordinator.on(Arrived(name, FACTS), now)
            commands = coordinator.on(Died(name, "it has no memory"), now)
            continue
        now += 1.0
        commands = coordinator.on(Tick(), now)
        assert now < 1000
    assert len(starts) == 5
    assert [b - a for a, b in itertools.pairwise(starts)] == [2, 4, 8, 16]
    assert "5 workers in a row" in commands[-1].message
    assert "it has no memory" in commands[-1].message


def test_another_code_or_jax_is_one_line():
    for facts, said in (
        (Facts("c0de", "0.11.0", "there"), "another JAX (0.11.0) than this process (0.10.2)"),
        (Facts("0ther", "0.10.2", "there"), "another code of rljax (0ther) than this process (c0de)"),
    ):
        coordinator = Coordinator(2, FACTS, LIMITS, NUMERICS)
        coordinator.on(Tick(), 0.0)
        (fail,) = coordinator.on(Arrived("worker-0", facts), 1.0)
        assert fail.kind == "ClusterError"
        assert said in fail.message and "there" in fail.message


def test_other_numerics_are_refused_or_admitted_and_counted():
    coordinator = started(workers=2)
    coordinator.on(Died("worker-0", "of a test"), 0.0)
    coordinator.on(Tick(), 5.0)
    coordinator.on(Arrived("worker-2", FACTS), 5.0)
    stop, said = coordinator.on(Status("worker-2", "ffffffff", 4, None), 5.0)
    assert stop == Stop("worker-2")
    assert "fingerprint ffffffff, here it is 0f0f0f0f" in said.message
    assert coordinator.on(Tick(), 6.0) == []  # another one there would be the same
    coordinator.on(Died("worker-1", "of a test"), 6.0)
    coordinator.on(Tick(), 20.0)
    coordinator.on(Arrived("worker-3", FACTS), 20.0)
    assert isinstance(coordinator.on(Status("worker-3", "ffffffff", 4, None), 20.0)[-1], Fail)

    lenient = Coordinator(1, FACTS, LIMITS, NUMERICS, strict=False)
    lenient.on(Tick(), 0.0)
    lenient.on(Arrived("worker-0", FACTS), 0.0)
    lenient.on(Status("worker-0", "ffffffff", 4, None), 0.0)
    assert (lenient.ready, lenient.counts.other_numerics) == (1, 1)


def test_what_is_not_confirmed_is_sent_again():
    coordinator = started(workers=1)
    coordinator.on(Begin(1, 0, make_requests(2)), 0.0)
    assert coordinator.on(Tick(), 4.0) == []
    assert coordinator.on(Tick(), 5.0) == [Load("worker-0", 0)]
    coordinator.on(Status("worker-0", NUMERICS, 4, 0), 6.0)
    assert coordinator.on(Tick(), 10.0) == []
    assert coordinator.on(Tick(), 11.0) == [Ask("worker-0", 1, ((0, 0), (1, 0)), False)]
    (decode,) = coordinator.on(UnknownRequests("worker-0", 1, (1,)), 11.5)
    assert [key for key, *_ in decode.work] == [1]
    assert coordinator.on(Pieces("worker-0", 1, (whole(0, 2, 3),)), 12.0) == [
        Ask("worker-0", 1, ((0, 0),), False)
    ]


def test_weights_that_do_not_come_cost_the_worker():
    coordinator = started(workers=1)
    coordinator.on(Begin(1, 0, make_requests(2)), 0.0)
    failed = FetchFailed("worker-0", 0, "version 0 of the weights came damaged")
    assert coordinator.on(failed, 1.0) == [Load("worker-0", 0)]
    assert coordinator.on(failed, 2.0) == [Load("worker-0", 0)]
    assert coordinator.on(failed, 3.0)[:2] == [
        Stop("worker-0"),
        Say("cluster: worker-0 is lost: version 0 of the weights came damaged"),
    ]


def assert_whole(answers, requests, version=0):
    assert answers == {key: response_to(key, version) for key in requests}


@settings(max_examples=40, deadline=None)
@given(
    SEEDS,
    st.sampled_from([1, 2, 3]),
    LOST,
    DOUBLED,
    LATEST,
)
@example(5457, 3, 0.0, 0.2, 0)  # a doubled order to load sends a worker back to a version that it needs
def test_no_order_of_messages_changes_a_token(seed, workers, lost, doubled, latest):
    """Messages are lost, doubled and late; workers crash and hang."""
    fabric = troubled_fabric(ScriptedWorker, seed, lost, doubled, latest)
    driver = Driver(fabric, workers)
    for version in range(2):
        requests = make_requests(10, first=10 * version)
        assert_whole(driver.run(requests, version), requests, version)
    # With staleness: the next rollout begins, under newer weights, while the one before is decoded.
    requests = make_requests(10, first=20)
    number = driver.begin(requests, 2)
    for version in range(3, 6):
        following = make_requests(10, first=10 * version)
        next_number = driver.begin(following, version)
        assert_whole(driver.finish(number, requests), requests, version - 1)
        number, requests = next_number, following
    assert_whole(driver.finish(number, requests), requests, 5)
    assert not driver.coordinator.rollouts.open
    assert not driver.coordinator.ledger.entries


def test_a_free_worker_goes_on_with_the_next_rollout_and_comes_back_for_what_is_lost():
    coordinator, work = begun(count=8)
    assert not coordinator.on(Begin(2, 1, make_requests(8, first=8)), 0.5)  # nobody is free
    commands = coordinator.on(Pieces("worker-0", 1, tuple(map(whole, work["worker-0"]))), 1.0)
    assert commands == [Load("worker-0", 1)]
    decode, *_ = coordinator.on(Status("worker-0", NUMERICS, 4, 1), 2.0)
    assert (decode.worker, decode.rollout, decode.version) == ("worker-0", 2, 1)
    assert [key for key, *_ in decode.work] == [8, 9, 10, 11]
    # What worker-1 leaves of the first rollout waits first.
    assert not [c for c in coordinator.on(Died("worker-1", "of a test"), 3.0) if isinstance(c, Decode | Load)]
    ended = tuple(Piece(key, 1, 0, *response_to(key, 1), "eos") for key in (8, 9, 10, 11))
    assert coordinator.on(Pieces("worker-0", 2, ended), 4.0) == [Load("worker-0", 0)]
    decode, *_ = coordinator.on(Status("worker-0", NUMERICS, 4, 0), 5.0)
    assert (decode.rollout, decode.version) == (1, 0)
    assert [key for key, *_ in decode.work] == work["worker-1"]


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([1, 2, 3]), LOST, st.integers(0, 8))
def test_responses_that_go_on_under_newer_weights_know_which_sampled_what(seed, workers, lost, latest):
    """Weights come at any moment; messages are lost and late, workers crash and hang."""
    rng = random.Random(seed)
    fabric = troubled_fabric(ScriptedWorker, seed, lost, 0.0, latest)
    driver, number = Driver(fabric, workers), None
    waiting = []
    for version in range(4):
        if version:
            driver.do(driver.coordinator.on(Renew(version), fabric.now()))
        requests = make_requests(8, first=8 * version)
        number = driver.begin(requests, version, renewed=True, rollout=number)
        waiting += requests
        for _ in range(rng.randint(0, 30)):
            driver.listen()
    driver.wait(waiting)
    spans = set()
    for key in waiting:
        entry = driver.coordinator.ledger[key]
        begins = [*entry.versions, (len(entry.tokens), None)]
        versions = [v for (a, v), (b, _) in itertools.pairwise(begins) for _ in range(a, b)]
        assert versions == sorted(versions)
        assert versions[0] >= key // 8
        assert (tuple(entry.tokens), tuple(entry.logprobs)) == response_under(key, versions)
        assert len(versions) == length_of(key)
        spans.add(len(entry.versions))
    driver.do(driver.coordinator.on(End(number, tuple(waiting)), fabric.now()))
    assert not driver.coordinator.ledger.entries


def test_the_network_of_these_tests_can_break_it():
    """Without sending again, what is lost would stay lost."""
    fabric = LocalFabric(ScriptedWorker, lambda data: () if b"Decode" in data else (0,))
    with pytest.raises(AssertionError):
        Driver(fabric, limits=Limits(1e6, 1e6, 1e6)).run(make_requests(4), most_turns=50)
