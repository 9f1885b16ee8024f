"""Spot training: who leads, who prepares, and what goes on elsewhere."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from drafters.eagle.drafter import HeadOnWorkers
from drafters.small_model_training import SmallModelOnWorkers, trained_params
from drafters.training import TrainingLimits
from rljax.cluster.messages import Begin, Died, End, Piece, Pieces, Status, Tick
from rljax.papers.tlt import SpotConfig
from rljax.papers.tlt.messages import Prepare, Prepared, StopTraining, TrainDrafter, Trained, TrainingData
from rljax.papers.tlt.spot import SpotRule, SpotTraining
from rljax.papers.tlt.spot_driver import SpotDriver
from tests.cluster.same_run import differences
from tests.cluster.scripted import NUMERICS, length_of, make_requests, response_to
from tests.cluster.test_coordinator import begun, whole
from tests.cluster.test_drafters import FEW
from tests.cluster.turns import local_run

RULE = SpotRule(idle=1, save_every=2, updates=6, tokens=60, batch_tokens=20, retry=1.0)
HEAD = {"variant": "eagle", "train_below": 0, "rows": 1, "pack_length": 128, "depths": [2]}
HEAD |= {"unrolled_steps": 1}
SUMS = ("sessions", "updates", "samples", "joined", "seconds")
SPOT = (TrainDrafter, Prepare, TrainingData, StopTraining)


def trained_by(workers, idle=1, **rule):
    """A coordinator with a rollout in progress on workers of four slots, four requests each."""
    coordinator, work = begun(workers, count=4 * workers)
    coordinator.idle_work = SpotTraining(SpotRule(**(vars(RULE) | {"idle": idle} | rule)))
    return coordinator, work


def ends(coordinator, work, name, now=1.0, but=0):
    """A worker ends its requests but the last ones; returns what is told about training."""
    keys = work[name][: len(work[name]) - but]
    commands = coordinator.on(Pieces(name, 1, tuple(map(whole, keys))), now)
    return [command for command in commands if isinstance(command, SPOT)]


def spot(coordinator, event, now=1.5):
    return [command for command in coordinator.on(event, now) if isinstance(command, SPOT)]


def test_the_first_idle_worker_leads_once_enough_are_idle_and_the_others_prepare():
    coordinator, work = trained_by(4, idle=2)
    assert not ends(coordinator, work, "worker-2")
    assert coordinator.states()["worker-2"] == "idle"
    lead, prepare = ends(coordinator, work, "worker-1")
    assert lead == TrainDrafter("worker-2", 1, 0, updates=6, save_every=2)
    assert (prepare.worker, prepare.batch, prepare.version) == ("worker-1", 1, 0)
    assert 0 < sum(len(ids) for sample in prepare.samples for ids in sample) <= 20
    prompt, response = prepare.samples[0]
    assert (prompt, len(response)) == ((7, work["worker-2"][0] // 2), length_of(work["worker-2"][0]))
    assert coordinator.states()["worker-2"] == coordinator.states()["worker-1"] == "training"
    feed, more = spot(coordinator, Prepared("worker-1", 1, "features", 0.5))
    assert feed == TrainingData("worker-2", 1, {1: "features"})
    assert (more.worker, more.batch) == ("worker-1", 2)
    counts = coordinator.idle_work.counts
    assert (counts.sessions, counts.joined, counts.seconds) == (1, len(prepare.samples), 0.5)


def test_a_session_is_halted_with_its_rollout_and_the_next_begins_with_what_came_last():
    coordinator, work = trained_by(2, tokens=40)
    ends(coordinator, work, "worker-0")
    (halt,) = ends(coordinator, work, "worker-1", 2.0)
    assert halt == StopTraining("worker-0", 1)
    assert not coordinator.idle_work.settled
    assert not spot(coordinator, Trained("worker-0", 1, 3, False, 0.25, 0.5), 3.0)
    assert coordinator.idle_work.settled
    counts = coordinator.idle_work.counts
    assert (counts.updates, counts.seconds, counts.delay) == (3, 0.25, 0.5)
    coordinator.on(End(1, tuple(range(8))), 4.0)
    coordinator.on(Begin(2, 1, make_requests(8, first=8)), 5.0)
    for name in ("worker-0", "worker-1"):
        commands = coordinator.on(Status(name, NUMERICS, 4, 1), 6.0)
        assert not any(isinstance(command, SPOT) for command in commands)
    keys = list(coordinator._workers["worker-0"].holds)
    ended = tuple(Piece(key, 1, 0, *response_to(key, 1), "eos") for key in keys)
    lead, prepare = (c for c in coordinator.on(Pieces("worker-0", 2, ended), 7.0) if isinstance(c, SPOT))
    # Half of the tokens are for responses of the last rollout: the longest that nobody has trained on.
    longest = max(work["worker-1"], key=length_of)
    assert lead.session == 2
    assert prepare.samples[0] == ((7, longest // 2), response_to(longest)[0])
    assert prepare.samples[1][1] == response_to(keys[0], 1)[0]  # the second longest has no room


def test_a_leader_that_is_lost_is_followed_by_another_one():
    coordinator, work = trained_by(3)
    ends(coordinator, work, "worker-0")
    ends(coordinator, work, "worker-1", but=1)
    coordinator.on(Prepared("worker-0", 1, None), 1.5)
    spot(coordinator, Trained("worker-0", 1, 4, True, head={}), 2.0)
    # Its last response ends: worker-1 joins, and when the leader dies, leads, with the updates that are left.
    ends(coordinator, {"worker-1": work["worker-1"][-1:]}, "worker-1", 2.5)
    lead, *others = spot(coordinator, Died("worker-0", "of a test"), 3.0)
    assert lead == TrainDrafter("worker-1", 2, 0, updates=2, save_every=2)
    more = spot(coordinator, Prepared("worker-1", 2, None), 3.1)
    assert [each.batch for each in (*others, *more)] == [1]  # the features of the first batch are gone
    assert (coordinator.idle_work.counts.sessions, coordinator.idle_work.counts.moved) == (2, 1)


def test_a_leader_that_is_needed_halts_and_another_one_waits_for_its_head():
    coordinator, work = trained_by(3)
    ends(coordinator, work, "worker-0")
    ends(coordinator, work, "worker-1")
    assert coordinator.idle_work.leader == "worker-0"
    halts = spot(coordinator, Died("worker-2", "of a test"), 2.0)  # its requests go to the idle ones
    assert StopTraining("worker-0", 1) in halts
    assert not any(isinstance(each, TrainDrafter) for each in halts)
    assert coordinator.states()["worker-0"] == "decoding"


def test_joiners_train_on_responses_of_their_own():
    coordinator, work = trained_by(4, joiners_train=True, tokens=1000, retry=100.0)
    lead, prepare = ends(coordinator, work, "worker-0")
    assert (lead.worker, prepare.worker) == ("worker-0", "worker-0")
    join, theirs = ends(coordinator, work, "worker-1")
    assert join == TrainDrafter("worker-1", 2, 0, updates=6, save_every=2)
    assert theirs.worker == "worker-1" and not set(theirs.samples) & set(prepare.samples)
    assert coordinator.states()["worker-0"] == coordinator.states()["worker-1"] == "training"
    more = spot(coordinator, Prepared("worker-1", theirs.batch, None))  # it keeps them
    assert more and all(isinstance(each, Prepare) and each.worker == "worker-1" for each in more)
    spot(coordinator, Trained("worker-1", 2, 4, True), 2.0)
    counts = coordinator.idle_work.counts
    assert (counts.sessions, counts.moved, counts.updates) == (2, 0, 4)
    assert counts.joined == len(theirs.samples)
    # The others go on without a leader that is lost; one that has done its updates does not join again.
    lost = spot(coordinator, Died("worker-0", "of a test"))
    assert not any(isinstance(each, TrainDrafter) for each in lost)
    another, given = ends(coordinator, work, "worker-2", 3.0)
    assert another == TrainDrafter("worker-2", 3, 0, 6, 2)
    assert not set(given.samples) & set(theirs.samples)  # which worker-1 still has
    assert not spot(coordinator, Trained("worker-1", 2, 6, False), 3.1)
    assert not spot(coordinator, Tick(), 3.2)
    assert ends(coordinator, work, "worker-3", 3.3) == [StopTraining("worker-2", 3)]


@pytest.mark.parametrize(("joiners", "expected"), [("train", 3.25), ("prepare", 4.0)])
def test_the_driver_hands_on_the_mean_of_a_group_by_its_updates_or_the_last(joiners, expected):
    adopted, stored = [], []
    training = SimpleNamespace(
        limits=TrainingLimits(6, 60, 20), adopt=lambda head, metrics: adopted.append(head)
    )
    config = SimpleNamespace(spot=SpotConfig(idle=1, joiners=joiners))
    driver = SpotDriver(config, training, lambda value: stored.append(value) or value)
    driver.takes = lambda event: True
    for session, value, updates in ((1, 0.0, 1), (1, 1.0, 2), (2, 4.0, 6)):
        head = {"w": np.full(2, value, np.float32), "updates": np.asarray(updates, np.int32)}
        driver.on(Trained(f"worker-{session}", session, updates, True, head=head), 0.0)
    assert driver.adopt() and not driver.adopt()
    for head in (*adopted, stored[-1]):
        assert head["w"].tolist() == [expected] * 2 and head["w"].dtype == np.float32
        assert head["updates"] == 6


def test_silence_is_answered_by_sending_again():
    coordinator, work = trained_by(2)
    ends(coordinator, work, "worker-0")
    again = spot(coordinator, Tick(), 2.5)
    assert [type(each) for each in again] == [TrainDrafter, Prepare]
    ends(coordinator, work, "worker-1", 3.0)
    assert spot(coordinator, Tick(), 3.5) == []
    assert spot(coordinator, Tick(), 4.5) == [StopTraining("worker-0", 1)]


def test_what_is_old_is_not_taken():
    coordinator, work = trained_by(2)
    ends(coordinator, work, "worker-0")
    takes = coordinator.idle_work.takes
    assert takes(Trained("worker-0", 1, 2, True))
    coordinator.on(Trained("worker-0", 1, 4, True), 2.0)
    assert not takes(Trained("worker-0", 1, 2, True))
    assert not takes(Trained("worker-1", 1, 6, True))
    assert not takes(Trained("worker-0", 2, 6, True))


def test_some_steps_are_left_out():
    for every, sessions in ((1, 1), (2, 0)):
        coordinator, work = trained_by(2, every=every)  # the requests are of step 1
        ends(coordinator, work, "worker-0")
        assert coordinator.idle_work.counts.sessions == sessions


# -- the tiny run ------------------------------------------------------------------------------------------


def test_a_head_that_workers_train_goes_on_elsewhere_and_to_all(world, alone, monkeypatch, drafts_always):
    """Four workers; the first leader is lost in mid-session, behind a save."""
    workers, lost, begins = {}, [], []
    session = HeadOnWorkers.session

    def noted(training, params, saved):
        begins.append(0 if saved is None else int(saved["train.updates"]))
        return session(training, params, saved)

    def interfere(fabric):
        workers.update(fabric.workers)
        for name, worker in list(fabric.workers.items()):
            spot = worker._idle_worker
            if not lost and spot is not None and spot._lead is not None and spot._updates == 3:
                lost.append(name)
                fabric.kill(name)

    monkeypatch.setattr(HeadOnWorkers, "session", noted)
    clustered, turns = local_run(
        world,
        "spot",
        monkeypatch,
        "cluster.workers=4",
        "cluster.spot={idle: 1, save_every: 2}",
        "speculation.drafter=eagle",
        f"speculation.args={HEAD | {'slices': 6}}",
        *FEW,
        interfere=interfere,
    )
    assert lost
    assert not differences(alone, clustered)
    assert begins[0] == 0
    assert begins[1] == 2  # what the lost leader had saved
    assert begins[1:] == sorted(begins[1:])
    steps = clustered.steps
    total = {name: sum(line[f"cluster/spot_{name}"] for line in steps) for name in SUMS}
    assert total["sessions"] == len(begins)
    assert total["updates"] > 2
    assert total["samples"] > total["joined"] > 0
    assert total["seconds"] > 0

    decoder = turns.decoders[0]
    driver = decoder._scheduler.speculator.drafters["eagle"]
    assert driver.trainer.updates == total["updates"] > begins[-1]
    last = max(worker._version for worker in workers.values() if worker._version is not None)
    for worker in workers.values():
        if worker._version == last:  # what evaluates last drafts with the newest head
            head = worker._scheduler.speculator.drafters["eagle"].trainer
            assert head.updates == driver.trainer.updates


@pytest.mark.long  # above, a head
def test_workers_train_a_small_model(world, alone, monkeypatch, drafts_always, small_model):
    """TLT, Table 8: its samples are tokens alone, and what comes of them is every worker's."""
    workers, begins, caches = {}, [], []
    session = SmallModelOnWorkers.session

    def look(fabric):
        workers.update(fabric.workers)
        for worker in fabric.workers.values():
            if worker._idle_worker is not None and worker._idle_worker._lead is not None:
                caches.append(worker.loop is not None and worker.loop.slots.state is not None)

    def noted(training, params, saved):
        begins.append(0 if saved is None else int(saved["train.updates"]))
        return session(training, params, saved)

    monkeypatch.setattr(SmallModelOnWorkers, "session", noted)
    clustered, turns = local_run(
        world,
        "spot_small",
        monkeypatch,
        "cluster.workers=4",
        "cluster.spot={idle: 1, save_every: 2, joiners: train}",
        "speculation.drafter=small_model",
        f"speculation.args={{path: {small_model}, slices: 4, learning_rate: 0.01}}",
        *FEW,
        interfere=look,
    )
    assert not differences(alone, clustered)
    assert caches and not any(caches)  # who trains has released the policy's keys and values
    steps = clustered.steps
    updates = sum(line["cluster/spot_updates"] for line in steps)
    assert begins[0] == 0 and begins == sorted(begins) and updates > 2
    assert sum(line["cluster/spot_sessions"] for line in steps) == len(begins) > len(steps)
    assert steps[-1]["speculation/sft/loss"] > 0

    driver = turns.decoders[0]._scheduler.speculator.drafters["small_model"]
    assert driver.training._trainer is None  # workers train
    state = driver.state()
    assert 0 < state["train.updates"] < updates  # of several workers at a time
    last = max(worker._version for worker in workers.values() if worker._version is not None)
    current = [worker for worker in workers.values() if worker._version == last]
    assert current
    for worker in current:  # what evaluates last drafts with the newest weights
        drafter = worker._scheduler.speculator.drafters["small_model"]
        load = drafter._companion.engine.load_params
        params = drafter._companion.params if drafter._newest is None else load(drafter._newest)
        expected = load(trained_params(state))
        assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(expected)))
