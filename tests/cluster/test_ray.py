"""Runs whose workers are processes under Ray; and what ends a run before anything long begins."""

import json
import os
import signal
import socket
import sys
import time
import types

import pytest

from rljax.cluster import ray_fabric
from rljax.cluster.messages import Decode, Load, Pieces, Prefetch
from rljax.config.cluster import ClusterConfig
from rljax.errors import ClusterError
from tests.cluster.same_run import differences, run
from tests.cluster.test_drafters import FEW
from tests.fork_server import output_of
from tests.training.tiny_run import ONE_PASS


@pytest.fixture(scope="module")
def nodes():
    """Ray's own test cluster on this machine, which all tests here share: a head without room, and two nodes
    with room for a worker each.
    """
    ray = pytest.importorskip("ray", reason="the cluster extra is not installed")
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.ray
def test_two_processes_make_the_same_run(world, alone, nodes):
    """With a drafter that learns, and one of the user's. In test_drafters.py the driver trains a head."""
    mine = "speculation.others={mine: {kind: 'tests.cluster.test_drafters:Repeats'}}"
    clustered = run(world, "ray_two", "cluster.workers=2", "speculation.drafter=srt", mine, *FEW)
    assert not differences(alone, clustered)
    assert all(line["speculation/history_tokens"] > 0 for line in clustered.steps)
    assert [line["cluster/workers"] for line in clustered.steps] == [2, 2]


@pytest.mark.ray
@pytest.mark.long  # beyond one case; tests/cluster/test_staleness.py has it in one process
def test_with_staleness_two_processes_make_the_run_of_none(world, stale_alone, nodes, monkeypatch):
    """They decode while the trainer updates. One that stands still at the second step's rollout, until newer
    weights are announced to it, copies these to its host before it loads them.
    """
    send, still = ray_fabric.RayFabric.send, {}

    def interfere(fabric, worker, order):
        if isinstance(order, Decode) and order.rollout == 3 and not still:
            still[worker] = fabric.facts[worker].pid
            os.kill(still[worker], signal.SIGSTOP)
        send(fabric, worker, order)
        if isinstance(order, Prefetch) and worker in still:
            os.kill(still[worker], signal.SIGCONT)

    monkeypatch.setattr(ray_fabric.RayFabric, "send", interfere)
    overrides = ("rollout.staleness=1", "cluster.workers=2", "cluster.weights=files")
    clustered = run(world, "ray_stale", *overrides, "cluster.lease_seconds=60", steps=3)
    assert still
    assert not differences(stale_alone, clustered)
    assert [line["cluster/workers"] for line in clustered.steps] == [2, 2, 2]
    assert sum(line["cluster/prefetched"] for line in clustered.steps) >= 1


def is_middle(fabric, event, rollout):
    """Whether a worker has told of responses of a rollout that go on."""
    is_here = isinstance(event, Pieces) and event.worker in fabric.facts
    return is_here and event.rollout == rollout and not any(piece.ending for piece in event.pieces)


@pytest.mark.ray
@pytest.mark.long  # beyond one case; test_local_run.py loses workers in one process
def test_a_process_killed_and_one_stopped_change_nothing(world, alone, nodes, monkeypatch):
    """kill -9 in the first training rollout, SIGSTOP when requests of the second are on their way: a third
    and fourth worker go on. Weights come from shared memory.
    """
    receive, send, hit = ray_fabric.RayFabric.receive, ray_fabric.RayFabric.send, {}

    def hurt(fabric, worker, how):
        hit[how] = fabric.facts[worker].pid
        os.kill(hit[how], how)

    def kill(fabric, seconds):
        events = receive(fabric, seconds)
        for event in events:
            if signal.SIGKILL not in hit and is_middle(fabric, event, 2):
                hurt(fabric, event.worker, signal.SIGKILL)
        return events

    def stop(fabric, worker, order):
        if isinstance(order, Decode) and order.rollout == 3 and signal.SIGSTOP not in hit:
            hurt(fabric, worker, signal.SIGSTOP)
        send(fabric, worker, order)

    monkeypatch.setattr(ray_fabric.RayFabric, "receive", kill)
    monkeypatch.setattr(ray_fabric.RayFabric, "send", stop)
    # The stopped one is waited for as long; a busy machine must not make the other ones silent for so long.
    overrides = (
        "cluster.workers=2",
        "cluster.lease_seconds=30",
        "cluster.weights=files",
        "speculation.drafter=srt",
        *ONE_PASS,
    )
    troubled = run(world, "ray_trouble", *overrides)
    assert hit.keys() == {signal.SIGKILL, signal.SIGSTOP}
    assert not differences(alone, troubled)
    steps = troubled.steps
    assert sum(line["cluster/restarts"] for line in steps) == 2
    assert sum(line["cluster/migrations"] for line in steps) >= 1
    for _ in range(100):  # it would keep its core
        if not os.path.exists(f"/proc/{hit[signal.SIGSTOP]}"):
            return
        time.sleep(0.1)
    pytest.fail("a stopped process is still there")


@pytest.mark.ray
@pytest.mark.long  # beyond one case; above, processes end and others come
def test_a_node_that_goes_and_one_that_comes(world, alone, nodes, monkeypatch):
    """The node of one worker goes in the first training rollout, and another one comes; in the second, the
    other worker is killed with the weights in flight. So the one on the new node ends the run.
    """
    receive, send, done = ray_fabric.RayFabric.receive, ray_fabric.RayFabric.send, {}

    def interfere(fabric, seconds):
        events = receive(fabric, seconds)
        for event in events:
            if "gone" not in done and is_middle(fabric, event, 2):
                gone = fabric._nodes[event.worker]
                nodes.remove_node(next(node for node in nodes.worker_nodes if node.node_id == gone))
                done["gone"] = event.worker
                done["new"] = nodes.add_node(num_cpus=1).node_id
        return events

    def kill(fabric, worker, order):
        send(fabric, worker, order)
        fetches = isinstance(order, Load) and order.version == 1
        if fetches and "gone" in done and "killed" not in done and fabric._nodes[worker] != done["new"]:
            os.kill(fabric.facts[worker].pid, signal.SIGKILL)
            done["killed"] = worker

    monkeypatch.setattr(ray_fabric.RayFabric, "receive", interfere)
    monkeypatch.setattr(ray_fabric.RayFabric, "send", kill)
    # Ray says that a process is gone: no lease decides it, however busy the machine is.
    troubled = run(world, "ray_nodes", "cluster.workers=2", "cluster.lease_seconds=300")
    assert done.keys() == {"gone", "new", "killed"}
    assert not differences(alone, troubled)
    assert sum(line["cluster/restarts"] for line in troubled.steps) == 2


@pytest.mark.ray
def test_more_workers_than_there_is_room_for(nodes):
    said = []
    with pytest.raises(
        ClusterError, match=r"^cluster.workers: 3 workers of 1 CPU each, .* room for 2; lower"
    ):
        ray_fabric.connect(ClusterConfig(workers=3), said.append)
    needed = ClusterConfig(workers=1, resources_per_worker={"rollout": 1.0})
    with pytest.raises(ClusterError, match=r"1 workers of 1 CPU and 1 rollout each, .* room for 0"):
        ray_fabric.connect(needed, said.append)
    assert not said
    # One that is joined may grow.
    ray_fabric.connect(ClusterConfig(workers=3, address=nodes.address), said.append)
    ray_fabric.connect(needed.model_copy(update={"address": nodes.address}), said.append)
    assert said[0].endswith("room for 2; the others join as nodes do")
    assert said[1].endswith("room for 0; waiting for up to 300 seconds for nodes that have")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"^cluster.workers: 2 needs Ray; pip install 'rljax\[cluster\]'"):
        ray_fabric.connect(ClusterConfig(workers=2), print)


@pytest.fixture
def no_ray(monkeypatch):
    """Ray is not started, whatever other tests have done."""
    ray = pytest.importorskip("ray", reason="the cluster extra is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("nobody is there to be joined"))


def test_an_address_where_nobody_answers_or_something_else(no_ray, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=rf"^cluster.address: nobody answers at {address} within 2 sec"
        ):
            ray_fabric.connect(ClusterConfig(workers=1, address=address, connect_seconds=2.0), print)
    monkeypatch.setattr(ray_fabric, "_ASKING", 1.0)
    with socket.socket() as silent:  # it takes the connection, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"{address} is no Ray cluster that this version can join"):
            ray_fabric.connect(ClusterConfig(workers=1, address=address, connect_seconds=1.0), print)


class WithoutProcesses:
    """What a fabric needs of Ray to exist, where `head` is the address of its head."""

    def __init__(self, head):
        self.head = head
        self.remote = lambda **options: lambda kind: kind
        self.method = lambda **options: lambda function: function

    def get_runtime_context(self):
        return types.SimpleNamespace(gcs_address=self.head)

    def shutdown(self):
        pytest.fail("it would wait for the head")


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_head_that_has_ended_is_one_line(monkeypatch, address):
    """Not before it has been silent for a while, and Ray is asked for nothing any more."""
    now = iter(range(0, 1000, 3))
    clock = types.SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda seconds: None)
    monkeypatch.setattr(ray_fabric, "time", clock)
    at_exit = []
    monkeypatch.setattr(
        ray_fabric, "atexit", types.SimpleNamespace(register=at_exit.append, unregister=at_exit.append)
    )
    with socket.create_server(("127.0.0.1", 0)) as head:
        ray = WithoutProcesses(f"127.0.0.1:{head.getsockname()[1]}")
        fabric = ray_fabric.RayFabric(ray, ClusterConfig(workers=1, address=address), owns=True)
        for _ in range(20):
            assert fabric.receive(0.0) == []
    assert fabric.receive(0.0) == []
    with pytest.raises(ClusterError) as lost:
        for _ in range(20):
            fabric.receive(0.0)
    said = str(lost.value)
    assert (
        said.startswith(f"cluster: the head of the Ray cluster, {ray.head}, has ended (") and "\n" not in said
    )
    assert said.endswith(" run the same command again") and ("start Ray there again" in said) == bool(address)
    fabric.close()
    assert at_exit[-2:] == [ray.shutdown, ray_fabric._leave]  # in the place of what Ray does at the end


_ENDS = """
import atexit, json, os, signal, sys
from rljax.cluster.ray_fabric import _say_if_killed as say
said = []
for way in sys.argv[1:]:
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 2), os.close(read), os.close(write)
        atexit._clear()  # of the process that is forked
        end = say()
        exec(way)
        atexit._run_exitfuncs(), os._exit(0)  # as Python ends
    os.close(write)
    said.append(open(read).read())
print(json.dumps(said))
"""


def test_a_process_that_ends_without_a_word_is_spoken_for():
    """As Ray ends the driver from C++ when its own process on this machine has died."""
    ends = {
        "os.kill(os.getpid(), signal.SIGKILL)": True,
        "os._exit(1)": True,
        "end(); end(); os._exit(2)": False,
        "": False,
    }
    for said, is_said in zip(json.loads(output_of(_ENDS, *ends)), ends.values(), strict=True):
        assert said.count("\n") == is_said and ("run the same command again" in said) == is_said
