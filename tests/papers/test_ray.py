"""SpecActor's copies on workers that are processes under Ray."""

import time

import pytest

from rljax.cluster import ray_fabric
from rljax.cluster.coordinator import Coordinator
from rljax.cluster.messages import Decode, Pieces
from tests.cluster import test_ray
from tests.cluster.same_run import differences, run
from tests.papers.test_routed_run import RACE

nodes = test_ray.nodes


@pytest.mark.ray
@pytest.mark.long  # beyond one case; test_routed_run.py has it in one process
def test_copies_of_stragglers_race_and_change_nothing(world, alone, nodes, monkeypatch):
    """A worker whose pieces are long on their way: the other one ends what is left and races with copies."""
    copies, late, enough = [], [], time.monotonic() + 90
    honest, receive = Coordinator.on, ray_fabric.RayFabric.receive

    def on(self, event, now):
        commands = honest(self, event, now)
        copies.extend(each for each in commands if isinstance(each, Decode) and each.drafter is not None)
        return commands

    def delay(fabric, seconds):
        events = receive(fabric, seconds)
        late.extend(each for each in events if isinstance(each, Pieces) and each.worker == "worker-1")
        events = [each for each in events if each not in late]
        if copies or time.monotonic() > enough:
            events, late[:] = late + events, []
        return events

    monkeypatch.setattr(Coordinator, "on", on)
    monkeypatch.setattr(ray_fabric.RayFabric, "receive", delay)
    clustered = run(world, "ray_race", *RACE, "cluster.workers=2", "cluster.race=2")
    assert not differences(alone, clustered)
    assert copies and {each.drafter for each in copies} <= {"srt", "prompt_lookup"}
