"""Drafters on the device, on 2, 4 and 8 devices: the tokens of plain decoding, and heads that learn as on one.

One process with 8 forced host devices does all of it (see `tests/test_sharding.py`). The vocabulary of 4 and 8
devices is odd, so that embedding and LM head are padded, and the small model has three heads, which two devices
of the tensor axis do not divide.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = """
import dataclasses, itertools, json, tempfile
from pathlib import Path
import jax, numpy as np
from drafters.base import Outcome
from drafters.registry import make_drafter, states_read
from rljax.config import MeshConfig
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.rollout.scheduler import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import make_mesh
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import CONFIG, EOS, CheapTimes, make_requests

SLOTS = 8
ODD = dataclasses.replace(CONFIG, vocab_size=65)
SMALL = dataclasses.replace(ODD, hidden_size=48, num_heads=3, num_kv_heads=1, head_dim=16, mlp_size=64)
requests = make_requests((3, 20, 8), (40, 30, 50))
directory = tempfile.mkdtemp()
save_model(Path(directory), SMALL, init_params(SMALL, 3), dtype="float32")

EAGLE = {"pack_length": 64, "depths": [3], "slices": 2, "train_below": 0, "unrolled_steps": 2}
CASES = [  # mesh, policy, drafters, where the weights lie
    ("1 device", {}, CONFIG, {"eagle": EAGLE | {"variant": "eagle"}}, "replicated"),
    ("2 devices", {"data": 2}, CONFIG, {"eagle": EAGLE | {"variant": "eagle"}}, "replicated"),
    ("1 device, odd", {}, ODD, {"eagle": EAGLE | {"rows": 4}}, "replicated"),
    ("4 devices", {"data": 2, "tensor": 2}, ODD, {"small_model": {"path": directory}}, "replicated"),
    (
        "8 devices",
        {"data": 2, "fsdp": 2, "tensor": 2},
        ODD,
        {"eagle": EAGLE | {"rows": 4}, "quantized": {"bits": 4}, "srt": {}},
        "fsdp",
    ),
]

def tokens_of(completions):
    return [completion.response_ids.tolist() for completion in completions]

expected, found = {}, {"devices": jax.device_count()}
for name, axes, config, arguments, weights in CASES:
    mesh = make_mesh(MeshConfig(**axes))
    drafters = {each: make_drafter(each, **given) for each, given in arguments.items()}
    buckets = Buckets((4, 8), (128,), (16,), 5)
    engine = DecodeEngine(
        config, Numerics(), SamplingParams(), buckets, (EOS,), 16, mesh=mesh,
        hidden_layers=states_read(drafters, config), weights=weights,
    )
    params = engine.load_params(jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, init_params(config, 0)))
    if config not in expected:
        expected[config], _ = Scheduler(engine, SLOTS).run(params, requests)
    turns = itertools.count()
    choice = StrategyChoice(choose_rows=lambda candidates, *_: (16, 0)[next(turns) % 4 == 3])
    speculator = Speculator(engine, drafters, SLOTS, times=CheapTimes(), strategies=choice)
    for proposer in speculator.proposers:  # by turns, whatever they promise
        if proposer.name == "quantized":
            proposer.choose_length = lambda *_: (1 + next(turns) % 5, 1e9 * (next(turns) % 2))
    one = found[name] = {"same": [], "logprobs": [], "accepted": [], "losses": []}
    for rollout in range(2):
        done, statistics = Scheduler(engine, SLOTS, None, speculator, rollout == 1).run(params, requests)
        one["same"].append(tokens_of(done) == tokens_of(expected[config]))
        one["logprobs"].append(max(
            float(np.abs(a.logprobs - b.logprobs).max())
            for a, b in zip(done, expected[config]) if len(a.logprobs) == len(b.logprobs)
        ))
        one["accepted"].append(statistics.accepted)
        speculator.learn([
            Outcome(request.prompt_ids, completion.response_ids, 1.0)
            for request, completion in zip(requests, done)
        ])
        metrics = speculator.metrics(statistics)
        one["losses"].append(metrics.get("speculation/head/loss"))
    one["updates"] = metrics.get("speculation/head/updates")
    one["metrics"] = {key: value for key, value in metrics.items() if "accepted" in key or "by" in key}
    if "small_model" in drafters:
        one["small mesh"] = dict(drafters["small_model"]._companion.engine.mesh.shape)
    if "eagle" in drafters and mesh is not None:
        layer = drafters["eagle"]._trainer._state.params["layer"]
        one["spec of q"] = [str(part) for part in layer["q"].sharding.spec]
        moments = [x for x in jax.tree.leaves(drafters["eagle"]._trainer._state.optimizer_state) if x.ndim > 1]
        one["split moments"] = all(not x.is_fully_replicated for x in moments)
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.split("FOUND")[1])
