"""Workers with a mesh of several devices each: how many there are, and one that is lost, change no token."""

import pytest

from tests.devices import run_on_devices

_RUNS = """
import json, pathlib, sys, types
import pytest
from tests.cluster.same_run import differences, lucky_world
from tests.cluster.turns import local_run, losing

lost = {}
directory = types.SimpleNamespace(mktemp=lambda name: pathlib.Path(sys.argv[1]))
with lucky_world(directory) as world, pytest.MonkeyPatch.context() as patch:
    mesh = ("cluster.mesh.data=2", "engine.row_invariant=warn", "cluster.numerics=warn", "warm_start=null")
    one, _ = local_run(world, "one", patch, *mesh, "cluster.workers=1")
    two, _ = local_run(world, "two", patch, *mesh, interfere=losing(lost, 1))
# Devices that share cores compute other last bits of logprobs from run to run, and so other updates.
tokens = ("step 0: ", "step 1: reward", "step 1: rollout/", "step 1: response")
other = [name for name in differences(one, two) if name.startswith(tokens)]
print("FOUND" + json.dumps([*lost.values(), other]))
"""


@pytest.mark.long  # tests/training/test_loop.py has a run on a mesh, test_local_run.py one with workers
def test_workers_with_two_devices_each(tmp_path):
    assert run_on_devices(_RUNS, 2, tmp_path) == [2, []]
