"""Workers come and go while a run goes on."""

from rljax.cluster.desired_workers import DesiredWorkersFile
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.messages import (
    Arrived,
    Begin,
    Decode,
    DesiredWorkers,
    Load,
    Pieces,
    Say,
    Spawn,
    Status,
    Stop,
    Tick,
)
from tests.cluster.scripted import FACTS, NUMERICS, Driver, ScriptedWorker, make_requests, response_to
from tests.cluster.test_coordinator import begun, started, whole


def test_the_file_is_read_when_it_has_changed(tmp_path):
    said = []
    desired = DesiredWorkersFile(tmp_path, said.append)
    assert desired.changed(0.0) is None
    (tmp_path / "workers").write_text("4\n")
    assert desired.changed(0.5) is None  # a second after the last look
    assert desired.changed(1.0) == 4
    assert desired.changed(2.0) is None
    (tmp_path / "workers").write_text("many")
    assert desired.changed(3.0) is None
    (tmp_path / "workers").write_text("0")
    assert desired.changed(4.0) is None
    (tmp_path / "workers").write_text("1")
    assert desired.changed(5.0) == 1
    file = tmp_path / "workers"
    assert said == [
        f"{file}: 4 workers are kept running from now on",
        f"{file}: 'many' is no number of workers from 1 on, and changes nothing",
        f"{file}: '0' is no number of workers from 1 on, and changes nothing",
        f"{file}: 1 workers are kept running from now on",
    ]


def test_more_are_started_and_the_newest_are_let_go():
    coordinator, _ = begun(count=8)
    assert coordinator.on(DesiredWorkers(3), 1.0) == [Spawn("worker-2")]
    coordinator.on(Pieces("worker-1", 1, (whole(4, 0, 2),)), 2.0)
    stops = [c for c in coordinator.on(DesiredWorkers(2), 3.0) if isinstance(c, Stop)]
    assert stops == [Stop("worker-2")]  # it had built nothing
    stop, said, decode = coordinator.on(DesiredWorkers(1), 4.0)
    assert (stop, said) == (Stop("worker-1"), Say("cluster: worker-1 is let go"))
    assert (decode.worker, decode.work[0][0], len(decode.work[0][2].tokens)) == ("worker-0", 4, 2)
    assert coordinator.counts.restarts == 0
    assert not [c for c in coordinator.on(Tick(), 5.0) if isinstance(c, Spawn)]


def test_one_that_joins_in_mid_rollout_gets_its_share():
    coordinator = started(workers=1)
    coordinator.on(Begin(1, 0, make_requests(20)), 0.0)
    coordinator.on(Status("worker-0", NUMERICS, 4, 0), 0.0)
    assert coordinator.on(DesiredWorkers(2), 1.0) == [Spawn("worker-1")]
    coordinator.on(Arrived("worker-1", FACTS), 2.0)
    assert coordinator.on(Status("worker-1", NUMERICS, 4, None), 3.0) == [Load("worker-1", 0)]
    (decode,) = coordinator.on(Status("worker-1", NUMERICS, 4, 0), 4.0)
    assert isinstance(decode, Decode)
    assert len(decode.work) == 5
    assert coordinator.states() == {"worker-0": "decoding", "worker-1": "decoding"}


def test_those_without_room_wait_for_it():
    fabric = LocalFabric(ScriptedWorker)
    fabric.most = 1
    driver = Driver(fabric, workers=3)
    requests = make_requests(8)
    assert driver.run(requests) == {key: response_to(key) for key in requests}
    assert list(fabric.workers) == ["worker-0"]
    fabric.most = 3
    more = make_requests(8, first=8)
    assert driver.run(more) == {key: response_to(key) for key in more}
    assert len(fabric.workers) == 3
    assert driver.coordinator.counts.restarts == 0
