"""Routers decide who decodes what, and never a token: none is lost, doubled or out of order, and none waits
for ever."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.cluster.coordinator import Coordinator, Limits
from rljax.cluster.messages import Arrived, Begin, Pieces, Status, Tick, Withdraw
from rljax.cluster.router import Balancing, Move, SharedQueue, WorkerLoad
from tests.cluster.scripted import FACTS, NUMERICS, Driver, ScriptedWorker, make_requests
from tests.cluster.test_coordinator import assert_whole, whole
from tests.cluster.trouble import DOUBLED, LATEST, LOST, SEEDS, troubled_fabric

LIMITS = Limits(lease=10, patience=60, retry=5)


def test_the_last_waiting_requests_are_given_out_one_by_one():
    """Else they would wait until a worker has nothing left, which then decodes them alone."""

    def given(requests, held, waiting):
        router = SharedQueue()
        router.begin(make_requests(requests, 1))
        router.take(WorkerLoad("w", 64, 0), requests - waiting)
        return len(router.take(WorkerLoad("w", 64, held), waiting + held))

    assert given(84, held=79, waiting=4) == 1
    assert given(84, held=70, waiting=4) == 4
    assert given(200, held=79, waiting=120) == 0  # too few to mention
    assert given(200, held=72, waiting=120) == 8


class Restless(SharedQueue):
    """Moves and copies something at every look."""

    mobile, catch_up = True, 1

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)

    def moves(self, state):
        names = [worker.name for worker in state.workers]
        return [
            Move(key, self.random.choice(names), self.random.random() < 0.5)
            for key in sorted(state.holders)
            if names and self.random.random() < 0.3
        ]


ROUTERS = {
    "shared": lambda seed: SharedQueue(),
    "balancing": lambda seed: Balancing(SharedQueue(), 2),
    "restless": Restless,
}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(ROUTERS)), SEEDS, st.sampled_from([1, 2, 3]), LOST, DOUBLED, LATEST)
def test_no_router_and_no_order_of_messages_changes_a_token(router, seed, workers, lost, doubled, latest):
    check_tokens(ROUTERS[router](seed), seed, workers, lost, doubled, latest)


def check_tokens(router, seed, workers, *trouble):
    """Two rollouts are whole, however workers fare and messages travel."""
    driver = Driver(troubled_fabric(ScriptedWorker, seed, *trouble), workers, router=router)
    for version in range(2):
        requests = make_requests(10, first=10 * version)
        assert_whole(driver.run(requests, version), requests, version)


def begun(router, workers=2, slots=4, count=8, first=0):
    """A coordinator with a rollout in progress, and what each worker was given."""
    coordinator = Coordinator(workers, FACTS, LIMITS, NUMERICS, router=router)
    coordinator.on(Tick(), 0.0)
    coordinator.build(0.0)
    for name in coordinator.workers():
        coordinator.on(Arrived(name, FACTS), 0.0)
        coordinator.on(Status(name, NUMERICS, slots, 0), 0.0)
    work = {}
    for command in coordinator.on(Begin(1, 0, make_requests(count, first=first)), 0.0):
        work.setdefault(command.worker, []).extend(key for key, *_ in command.work)
    return coordinator, work


def test_a_free_worker_takes_half_of_the_fullest_ones():
    coordinator, work = begun(Balancing(SharedQueue(), 2), count=8)
    commands = []
    for key in work["worker-0"]:
        commands += coordinator.on(Pieces("worker-0", 1, (whole(key),)), 1.0)
    withdraw, decode = commands[-2:]
    assert withdraw == Withdraw("worker-1", 1, tuple(work["worker-1"][2:]))
    assert (decode.worker, [key for key, *_ in decode.work]) == ("worker-0", work["worker-1"][2:])
    assert coordinator.counts.migrations == 2
