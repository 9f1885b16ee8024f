"""What a worker does while it trains: one thing a turn, nothing once it is needed, and the same whatever
becomes of messages and of other workers.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.training import TrainingLimits
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.messages import Decode
from rljax.papers.tlt import SpotConfig
from rljax.papers.tlt.messages import Prepare, Prepared, StopTraining, TrainDrafter, Trained, TrainingData
from rljax.papers.tlt.spot_driver import SpotDriver
from rljax.papers.tlt.spot_worker import SpotWorker
from tests.cluster.scripted import Driver, ScriptedWorker, length_of, make_requests
from tests.cluster.test_coordinator import assert_whole
from tests.cluster.trouble import DOUBLED, LATEST, LOST, SEEDS, troubled_fabric
from tests.papers.test_spot import RULE, SPOT

UPDATES = itertools.count(1)


class Leaf(np.ndarray):
    """An array that comes to the host when a test lets it."""

    here = True

    def is_ready(self):
        return Leaf.here


class Session:
    """Its head has the number of every update, of all sessions that went before it, too; then zeros."""

    def __init__(self, saved):
        self.head = saved["head"].copy() if saved else np.zeros(99, int)
        self.data = []

    @property
    def updates(self):
        return np.count_nonzero(self.head)

    def add(self, prepared):
        self.data.append(prepared)

    def update(self):
        if not self.data:
            return None
        self.head[self.updates] = next(UPDATES)
        return {"loss": float(self.updates)}

    def copy(self):
        return {"head": self.head.copy().view(Leaf)}


class Drafter:
    def prepare(self, params, samples):
        return f"features of {len(samples)}"

    def session(self, params, saved):
        self.trained = Session(saved)
        return self.trained


def gone(reference):
    if reference == "gone":
        raise KeyError(reference)
    return reference


def worker():
    drafter = Drafter()
    return SpotWorker("w", drafter, gone, lambda value: value), drafter


def turns(spot, count):
    return [event for _ in range(count) for event in spot.work("params", alone=True)]


SAMPLES = (((1, 2), (3,)),)


def test_a_leader_updates_and_saves_in_slices_and_stops_when_it_is_needed():
    spot, drafter = worker()
    assert spot.idle
    (begun,) = spot.take(TrainDrafter("w", 1, 0, updates=99, save_every=3), "params", 0)
    assert (begun.training, begun.updates) == (True, 0)
    assert turns(spot, 2) == []
    assert spot.take(TrainingData("w", 1, {1: "gone", 2: "features"}), "params", 0) == []
    assert drafter.trained.data == ["features"]
    (saved,) = turns(spot, 4)
    assert (saved.updates, saved.training, np.count_nonzero(saved.head["head"])) == (3, True, 3)
    turns(spot, 1)  # in the middle of a slice
    assert spot.stop() == []
    (last,) = spot.work("params", alone=False)  # beside decoding
    assert (last.updates, last.training, np.count_nonzero(last.head["head"])) == (5, False, 5)
    assert last.delay > 0
    assert turns(spot, 2) == []
    assert drafter.trained.updates == 5
    assert spot.idle


def test_what_is_saved_is_waited_for_only_without_anything_else_to_do():
    spot, _ = worker()
    spot.take(TrainDrafter("w", 1, 0, 99, 1), "params", 0)
    spot.take(TrainingData("w", 1, {1: "features"}), "params", 0)
    try:
        Leaf.here = False
        assert turns(spot, 3) == []
        spot.stop()
        assert spot.work("params", alone=False) == []
        assert not spot.idle
        (last,) = spot.work("params", alone=True)
    finally:
        Leaf.here = True
    assert (last.updates, last.training) == (3, False)  # earlier ones are not sent behind a later one


def test_a_session_goes_on_from_what_was_saved_and_ends_with_its_last_update():
    spot, _ = worker()
    spot.take(TrainDrafter("w", 4, 0, 2, 9, head={"head": np.arange(99) < 7}), "params", 0)
    spot.take(TrainingData("w", 4, {1: "features"}), "params", 0)
    (last,) = turns(spot, 4)
    assert (last.updates, last.training, np.count_nonzero(last.head["head"])) == (2, False, 9)
    assert last.metrics == {"loss": 9.0}
    # It does not begin again when its order comes twice, nor when it comes behind the order to halt.
    ended = [Trained("w", 4, 0, False)]
    assert spot.take(TrainDrafter("w", 4, 0, 2, 9), "params", 0) == ended
    assert spot.take(StopTraining("w", 5), "params", 0) == [Trained("w", 5, 0, False)]
    assert spot.take(TrainDrafter("w", 5, 0, 2, 9), "params", 0) == [Trained("w", 5, 0, False)]
    # Of another policy.
    assert spot.take(TrainDrafter("w", 6, 1, 2, 9), "params", 0) == [Trained("w", 6, 0, False)]
    assert spot.take(TrainDrafter("w", 7, 0, 2, 9, head="gone"), "params", 0) == [Trained("w", 7, 0, False)]


def test_joiners_hand_features_over_and_leaders_keep_them():
    spot, drafter = worker()
    spot.take(Prepare("w", 1, 0, SAMPLES), "params", 0)
    spot.take(Prepare("w", 1, 0, SAMPLES), "params", 0)
    spot.take(Prepare("w", 2, 1, SAMPLES), "params", 0)  # for another policy
    (done,) = turns(spot, 3)
    assert isinstance(done, Prepared)
    assert (done.batch, done.features) == (1, "features of 1")
    spot.take(TrainDrafter("w", 1, 0, 99, 9), "params", 0)
    spot.take(Prepare("w", 3, 0, SAMPLES * 2), "params", 0)
    (kept,) = turns(spot, 2)
    assert (kept.batch, kept.features, drafter.trained.data) == (3, None, ["features of 2"])
    assert drafter.trained.updates == 1
    spot.take(Prepare("w", 4, 0, SAMPLES), "params", 0)
    spot.stop()
    assert not any(isinstance(event, Prepared) for event in turns(spot, 2))


class TrainingWorker(ScriptedWorker):
    """A scripted worker that trains as real ones do."""

    def __init__(self, name, get=None):
        super().__init__(name, get)
        self.spot = SpotWorker(name, Drafter(), lambda value: value, lambda value: value)

    def turn(self):
        mine = [order for order in self.orders if isinstance(order, SPOT)]
        self.orders = [order for order in self.orders if not isinstance(order, SPOT)]
        needed, version = any(isinstance(order, Decode) and order.work for order in self.orders), self.version
        events = super().turn()
        if needed or self.version != version:
            events += self.spot.stop()
        for order in mine:
            events += self.spot.take(order, "params", self.version)
        decodes = any(len(versions) < length_of(key) for key, versions in self.at.items())
        return events + self.spot.work("params", alone=not decodes)


class Run(Driver):
    """A driver of rollouts and training; it keeps every head that was saved."""

    def __init__(self, fabric, workers, joiners):
        super().__init__(fabric, workers)
        self.heads = []
        config = SimpleNamespace(spot=SpotConfig(joiners=joiners))
        training = SimpleNamespace(limits=TrainingLimits(6, 60, 20), saved=lambda: None)
        self.spot = SpotDriver(config, training, lambda head: self.heads.append(head["head"]) or head)
        self.spot.rule = dataclasses.replace(RULE, joiners_train=joiners == "train")
        self.coordinator.idle_work = self.spot

    def do(self, commands):
        super().do([self.spot.completed(each) if isinstance(each, SPOT) else each for each in commands])

    def train(self, samples, version):
        """A rollout of so many requests, and what goes on behind it; the sessions end with it."""
        requests = make_requests(samples, first=samples * version, step=version)
        assert_whole(self.run(requests, version), requests, version)
        for _ in range(600):
            if self.spot.settled:
                break
            self.listen()
        assert self.spot.settled


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([2, 3, 4]), LOST, DOUBLED, LATEST, st.sampled_from(["prepare", "train"]))
def test_no_order_of_messages_changes_a_token_or_begins_the_head_anew(
    seed, workers, lost, doubled, latest, joiners
):
    fabric = troubled_fabric(TrainingWorker, seed, lost, doubled, latest)
    run = Run(fabric, workers, joiners)
    for version in range(4):
        run.train(10, version)
        heard = [worker for name, worker in fabric.workers.items() if name not in fabric._silent]
        assert not any(worker.spot._lead for worker in heard)
    counts = run.spot.counts
    if joiners == "train":
        assert counts.updates <= counts.sessions * RULE.updates
        return
    for before, after in itertools.pairwise(run.heads):
        assert (after[before > 0] == before[before > 0]).all()  # it goes on from what was saved
    assert counts.updates <= 4 * RULE.updates
    if not lost and not doubled and not latest:
        assert counts.updates and np.count_nonzero(run.heads[-1]) <= counts.updates


@pytest.mark.parametrize(("joiners", "workers"), [("prepare", 3), ("train", 4)])
def test_these_workers_train_a_head(joiners, workers):
    run = Run(LocalFabric(TrainingWorker), workers, joiners)
    for version in range(3):
        run.train(16, version)
    counts = run.spot.counts
    assert counts.joined
    if joiners == "train":
        assert counts.sessions > 3 + counts.moved  # more than have led
    else:
        assert counts.sessions >= 3 and np.count_nonzero(run.heads[-1]) == counts.updates > 3
