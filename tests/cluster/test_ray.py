"""Runs whose workers are processes under Ray; and what ends a run before anything long begins."""

import os
import signal
import socket
import sys
import time

import pytest

from rljax.cluster import ray_fabric
from rljax.cluster.messages import Pieces
from rljax.config.cluster import ClusterConfig
from rljax.errors import ClusterError
from tests.cluster.same_run import differences, run

DRAFTS = ("speculation.drafter=srt", "speculation.verify_buckets=[16]", "speculation.max_drafts=3")


@pytest.fixture(scope="module")
def ray():
    """A Ray on this machine with room for two workers, which all tests here share."""
    ray = pytest.importorskip("ray", reason="the cluster extra is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def steps_of(clustered):
    return [line for line in clustered.metrics if "cluster/workers" in line]


@pytest.mark.ray
@pytest.mark.slow
def test_two_processes_make_the_same_run(world, alone, ray):
    clustered = run(world, "ray_two", "cluster.workers=2")
    assert not differences(alone, clustered)
    assert [line["cluster/workers"] for line in steps_of(clustered)] == [2, 2]


@pytest.mark.ray
@pytest.mark.slow
def test_with_staleness_two_processes_make_the_run_of_none(world, stale_alone, ray):
    """They decode while the trainer updates, and get their weights from shared memory."""
    overrides = ("rollout.staleness=1", "cluster.workers=2", "cluster.weights=files")
    clustered = run(world, "ray_stale", *overrides, steps=3)
    assert not differences(stale_alone, clustered)
    assert [line["cluster/workers"] for line in steps_of(clustered)] == [2, 2, 2]


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_killed_and_one_stopped_in_mid_rollout_change_nothing(world, alone, ray, monkeypatch):
    """kill -9 in the first training rollout, SIGSTOP in the second: a third and fourth worker go on."""
    signals, hit = [signal.SIGKILL, signal.SIGSTOP], []
    receive = ray_fabric.RayFabric.receive

    def interfere(fabric, seconds):
        events = receive(fabric, seconds)
        for event in events:
            middle = isinstance(event, Pieces) and not any(piece.ending for piece in event.pieces)
            if middle and event.rollout == len(hit) + 2 and len(hit) < 2 and event.worker in fabric.facts:
                pid = fabric.facts[event.worker].pid
                os.kill(pid, signals[len(hit)])
                hit.append((event.worker, pid))
        return events

    monkeypatch.setattr(ray_fabric.RayFabric, "receive", interfere)
    overrides = ("cluster.workers=2", "cluster.lease_seconds=3", *DRAFTS)
    troubled = run(world, "ray_trouble", *overrides)
    assert len(hit) == 2
    assert not differences(alone, troubled)
    steps = steps_of(troubled)
    assert sum(line["cluster/restarts"] for line in steps) == 2
    assert sum(line["cluster/migrations"] for line in steps) >= 1
    _, stopped = hit[1]
    for _ in range(100):  # it would keep its core
        if not os.path.exists(f"/proc/{stopped}"):
            return
        time.sleep(0.1)
    pytest.fail("a stopped process is still there")


@pytest.mark.ray
def test_more_workers_than_there_is_room_for(ray):
    with pytest.raises(
        ClusterError, match=r"^cluster.workers: 3 workers of 1 CPU each, .* room for 2; lower"
    ):
        ray_fabric.connect(ClusterConfig(workers=3))
    needed = ClusterConfig(workers=1, resources_per_worker={"rollout": 1.0})
    with pytest.raises(ClusterError, match=r"1 workers of 1 CPU and 1 rollout each, .* room for 0"):
        ray_fabric.connect(needed)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"^cluster.workers: 2 needs Ray; pip install 'rljax\[cluster\]'"):
        ray_fabric.connect(ClusterConfig(workers=2))


@pytest.fixture
def no_ray(monkeypatch):
    """Ray is not started, whatever other tests have done."""
    ray = pytest.importorskip("ray", reason="the cluster extra is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("nobody is there to be joined"))


def test_an_address_where_nobody_answers(no_ray):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=rf"^cluster.address: nobody answers at {address} within 2 sec"
        ):
            ray_fabric.connect(ClusterConfig(workers=1, address=address, connect_seconds=2.0))


def test_an_address_where_something_else_answers(no_ray, monkeypatch):
    """It takes the connection, and says nothing."""
    monkeypatch.setattr(ray_fabric, "_ASKING", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"{address} is no Ray cluster that this version can join"):
            ray_fabric.connect(ClusterConfig(workers=1, address=address, connect_seconds=1.0))
