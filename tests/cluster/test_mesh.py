"""Workers with a mesh of several devices each: how many there are, and one that is lost, change no token."""

from tests.devices import run_on_devices

_RUNS = """
import json, pathlib, sys, types
import pytest
from tests.cluster.same_run import differences, lucky_world
from tests.cluster.turns import in_the_middle, local_run

lost, devices = [], set()

def interfere(fabric):
    for name, worker in list(fabric.workers.items()):
        if not lost and worker._rollout > 1 and in_the_middle(worker):
            lost.append(name)
            devices.update(worker._params["embed"].sharding.device_set)
            fabric.kill(name)

directory = types.SimpleNamespace(mktemp=lambda name: pathlib.Path(sys.argv[1]))
with lucky_world(directory) as world, pytest.MonkeyPatch.context() as patch:
    mesh = ("cluster.mesh.data=2", "engine.row_invariant=warn", "cluster.numerics=warn", "warm_start=null")
    one, _ = local_run(world, "one", patch, *mesh, "cluster.workers=1")
    two, _ = local_run(world, "two", patch, *mesh, interfere=interfere)
# Devices that share cores compute other last bits of logprobs from run to run, and so other updates.
tokens = ("step 0: ", "step 1: reward", "step 1: rollout/", "step 1: response")
other = [name for name in differences(one, two) if name.startswith(tokens)]
print("FOUND" + json.dumps([len(lost), len(devices), other]))
"""


def test_workers_with_two_devices_each(tmp_path):
    assert run_on_devices(_RUNS, 2, tmp_path) == [1, 2, []]
