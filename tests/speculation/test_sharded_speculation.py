"""Speculative rollouts on 2 and on 4 devices: the tokens of plain decoding on one.

As in `tests/test_sharding.py`, devices are forced on the host platform, in a process of their own. Logprobs
need not have the same bits there (docs/sharding.md), so tokens are the same but for near-ties, and here there
are none.
"""

import json

import pytest

from tests.devices import run_on_devices

MESHES = {"2 devices": {"data": 2}, "4 devices": {"data": 2, "tensor": 2}}

CHECKS = """
import itertools, json, sys
import jax, numpy as np
from drafters.base import Outcome
from drafters.registry import make_drafter
from rljax.config import MeshConfig
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.sampling.distribution import SamplingParams
from rljax.numerics.rows import Numerics
from rljax.rollout.scheduler import Scheduler
from rljax.speculation.speculator import Speculator
from rljax.sharding import make_mesh
from tests.tiny_policy import CONFIG, EOS, by_rows, make_params, make_requests

SLOTS = 8
requests = make_requests()

def make_engine(mesh):
    buckets = Buckets((4, 8), (128,), (16, 32), 7)
    engine = DecodeEngine(CONFIG, Numerics(), SamplingParams(), buckets, (EOS,), 16, mesh=mesh)
    params = engine.load_params(make_params())
    return engine, params

def tokens_of(completions):
    return [completion.response_ids.tolist() for completion in completions]

def largest_difference(completions):
    return max(
        float(np.abs(one.logprobs - other.logprobs).max())
        for one, other in zip(completions, expected) if len(one.logprobs) == len(other.logprobs)
    )

engine, params = make_engine(None)
expected, _ = Scheduler(engine, SLOTS).run(params, requests)
outcomes = [
    Outcome(request.prompt_ids, completion.response_ids, 1.0)
    for request, completion in zip(requests, expected)
]
found = {"devices": jax.device_count(), "tokens": sum(map(len, tokens_of(expected)))}
mesh = make_mesh(MeshConfig(**json.loads(sys.argv[1])))
engine, params = make_engine(mesh)
plain, _ = Scheduler(engine, SLOTS).run(params, requests)
found["plain"] = tokens_of(plain) == tokens_of(expected)
turns = itertools.count()
shapes = set()

def choose(candidates, buckets, times, batch, length):
    sizes = [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)] + [0]
    rows = sizes[next(turns) % len(sizes)]
    shapes.add((batch, length, rows))
    return rows

choice, name = by_rows(choose), sys.argv[2]
speculator = Speculator(engine, {name: make_drafter(name)}, SLOTS, strategies=choice)
speculator.warm_up(params)
(proposer,) = speculator.proposers
proposer.choose_length = lambda *_: (1 + next(turns) % 7, 1e9)  # of a self-drafter
for overlap in (False, True):
    done, statistics = Scheduler(engine, SLOTS, None, speculator, overlap).run(params, requests)
    found["overlapping" if overlap else "in turn"] = {
        "same": tokens_of(done) == tokens_of(expected),
        "logprobs": largest_difference(done),
        "accepted": statistics.accepted,
        "shapes": sorted(shapes),
    }
    speculator.learn(outcomes)
print("FOUND" + json.dumps(found))
"""


@pytest.mark.long  # one batch, with drafters of every kind, is in `test_drafters_on_a_mesh.py`
@pytest.mark.parametrize(
    ("mesh", "drafter"), [("2 devices", "srt"), ("4 devices", "srt"), ("4 devices", "quantized")]
)
def test_drafts_change_no_token_on_a_mesh(mesh, drafter):
    found = run_on_devices(CHECKS, 4, json.dumps(MESHES[mesh]), drafter)
    assert found["devices"] == 4 and found["tokens"] > 500
    assert found["plain"]
    for one in (found["in turn"], found["overlapping"]):
        assert one["same"] and one["logprobs"] < 1e-5
        assert one["accepted"] > 50
        batches, _, rows = (set(sizes) for sizes in zip(*one["shapes"], strict=True))
        assert batches == {4, 8} and rows == {0, 16, 32}
