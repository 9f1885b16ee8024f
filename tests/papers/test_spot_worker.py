"""What a worker does while it trains: one thing a turn, and nothing once it is needed."""

import numpy as np

from rljax.papers.tlt.messages import Prepare, Prepared, StopTraining, TrainDrafter, Trained, TrainingData
from rljax.papers.tlt.spot_worker import SpotWorker


class Leaf(np.ndarray):
    """An array that comes to the host when a test lets it."""

    here = True

    def is_ready(self):
        return Leaf.here


class Session:
    def __init__(self, saved):
        self.head = int(saved["head"]) if saved else 0
        self.data = []

    def add(self, prepared):
        self.data.append(prepared)

    def update(self):
        if not self.data:
            return None
        self.head += 1
        return {"loss": float(self.head)}

    def copy(self):
        return {"head": np.asarray([self.head]).view(Leaf)}


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
    assert (saved.updates, saved.training, int(saved.head["head"][0])) == (3, True, 3)
    turns(spot, 1)  # in the middle of a slice
    assert spot.stop() == []
    (last,) = spot.work("params", alone=False)  # beside decoding
    assert (last.updates, last.training, int(last.head["head"][0])) == (5, False, 5)
    assert last.delay > 0
    assert turns(spot, 2) == []
    assert drafter.trained.head == 5
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
    spot.take(TrainDrafter("w", 4, 0, 2, 9, head={"head": np.asarray(7)}), "params", 0)
    spot.take(TrainingData("w", 4, {1: "features"}), "params", 0)
    (last,) = turns(spot, 4)
    assert (last.updates, last.training, int(last.head["head"][0])) == (2, False, 9)
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
    assert drafter.trained.head == 1
    spot.take(Prepare("w", 4, 0, SAMPLES), "params", 0)
    spot.stop()
    assert not any(isinstance(event, Prepared) for event in turns(spot, 2))
