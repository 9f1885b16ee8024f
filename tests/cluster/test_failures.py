"""Runs that lose something at the worst moment end with the parameters of the undisturbed one."""

import pytest

from rljax.cluster.messages import Load
from rljax.cluster.weights import ObjectStore
from rljax.errors import ConfigError
from tests.cluster.same_run import differences
from tests.cluster.turns import local_run


def test_workers_lost_as_they_fetch_and_weights_that_come_damaged(world, alone, monkeypatch):
    """One is killed with the weights of a step in flight; to another they come damaged twice."""
    hit, damaged = [], []

    def interfere(fabric):
        for name, worker in list(fabric.workers.items()):
            fetches = any(isinstance(order, Load) and order.version == 1 for order in worker._orders)
            if fetches and not hit:
                hit.append(name)
                fabric.kill(name)
            elif fetches and len(damaged) < 2:
                damaged.append(name)
                honest = worker._get

                def once(reference, honest=honest, worker=worker):
                    value = honest(reference)
                    worker._get = honest
                    first = value[0]
                    value[0] = (*first[:3], first[3] ^ 1)
                    return value

                worker._get = once

    clustered, turns = local_run(world, "fetch", monkeypatch, interfere=interfere)
    assert len(hit) == 1 and damaged
    assert not differences(alone, clustered)
    assert f"cluster: {hit[0]} is lost: it was killed" in turns.said
    assert sum(line.get("cluster/restarts", 0) for line in clustered.metrics) == 1


def test_a_driver_that_dies_as_it_publishes(world, alone, monkeypatch):
    """Behind the copy in the store: the same command goes on from the checkpoint."""
    honest = ObjectStore.publish

    class Gone(BaseException):
        """As if the process had ended."""

    def dies(self, version, *arguments):
        copy = honest(self, version, *arguments)
        if version == 1:
            raise Gone
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "publish", dies)
        with pytest.raises(Gone):
            local_run(world, "publish", patch)
    resumed, _ = local_run(world, "publish", monkeypatch, resumes=True)
    assert not differences(alone, resumed)


def test_lost_doubled_late_and_reordered_messages_in_a_run(world, alone, monkeypatch):
    """Every third message is late, every seventh comes twice, every eleventh not at all."""
    count = 0

    def network(data):
        nonlocal count
        count += 1
        if count % 11 == 0:
            return ()
        return (0, 5) if count % 7 == 0 else (count % 4,) if count % 3 == 0 else (0,)

    clustered, _ = local_run(world, "network", monkeypatch, network=network)
    assert not differences(alone, clustered)
    steps = clustered.steps
    assert sum(line["cluster/pieces_late"] for line in steps) > 0


def test_a_config_that_a_worker_cannot_hold(world, monkeypatch):
    with pytest.raises(ConfigError, match=r"^cluster.mesh: 2 devices, but worker-\d has 1; lower it"):
        local_run(world, "mesh", monkeypatch, "cluster.mesh.data=2", "cluster.numerics=warn")
