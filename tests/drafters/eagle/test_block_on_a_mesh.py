"""A block head on four devices: the tokens of plain decoding, and the losses of one device."""

import pytest

from tests.devices import run_on_devices

CHECKS = """
import dataclasses, json
import jax, numpy as np
from drafters.base import Outcome
from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig, init_head, shared_params
from drafters.eagle.objective import HeadTraining
from drafters.eagle.spot_trainer import BufferSettings, HeadTrainer, head_optimizer
from drafters.registry import make_drafter, states_read
from rljax.config import MeshConfig
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.models.rope import rope_table
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.rollout.scheduler import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import make_mesh
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import CONFIG, EOS, CheapTimes, make_requests

ODD = dataclasses.replace(CONFIG, vocab_size=65)
policy = jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, init_params(ODD, 0))
mesh, requests = make_mesh(MeshConfig(fsdp=2, tensor=2)), make_requests((3, 20, 8), (40, 30, 50))
arguments = {"pack_length": 64, "depths": [3], "slices": 1, "train_below": 0, "rows": 4, "block_depth": 2}
found, expected = {"same": []}, None
for drafted in (False, True):
    drafters = {"block": make_drafter("block", **arguments)} if drafted else {}
    engine = DecodeEngine(
        ODD, Numerics(), SamplingParams(), Buckets((8,), (128,), (16,), 5), (EOS,), 4,
        mesh=mesh if drafted else None, hidden_layers=states_read(drafters, ODD),
        weights="fsdp" if drafted else "replicated",
    )
    params = engine.load_params(policy)
    if not drafted:
        expected, _ = Scheduler(engine, 8).run(params, requests)
        continue
    speculator = Speculator(engine, drafters, 8, times=CheapTimes())
    for _ in range(2):
        done, statistics = Scheduler(engine, 8, None, speculator).run(params, requests)
        pairs = list(zip(done, expected, strict=True))
        found["same"].append(all(np.array_equal(a.response_ids, b.response_ids) for a, b in pairs))
        found["accepted"] = statistics.accepted
        speculator.learn([
            Outcome(request.prompt_ids, completion.response_ids, 1.0)
            for request, completion in zip(requests, done, strict=True)
        ])
    found["updates"] = drafters["block"].trainer.updates

head = HeadConfig("block", ODD, vocabulary=DraftVocabulary(np.arange(40)), block=BlockShape(4, 2, 16))
rng, response = np.random.default_rng(0), np.arange(60) > 5
data = [
    (rng.integers(0, 65, 60).astype(np.int32), rng.standard_normal((60, 4, 64), np.float32), response)
    for _ in range(8)
]
found["losses"] = {}
for name, place in (("one", None), ("split", mesh)):
    engine = DecodeEngine(ODD, Numerics(), SamplingParams(), Buckets((8,), (128,)), (EOS,), mesh=place)
    training = HeadTraining(steps=3, sampled_weight=1.0, coupled_weight=1.0, logit_chunk=64)
    trainer = HeadTrainer(
        head, training, head_optimizer(1e-3), rope_table(ODD, 67), Numerics(False),
        BufferSettings(dtype="float32"), 64, 4, 0, init_head(head, policy, 0), mesh=place,
    )
    trainer.begin_step(0)
    for sequence in data:
        trainer.add(*sequence)
    shared = shared_params(engine.load_params(policy), ODD)
    found["losses"][name] = [trainer.slice(shared)["loss"] for _ in range(2)]
    if name == "split":
        leaves = jax.tree.leaves(trainer._state.params["layers"])
        matrices = [x for x in leaves if x.ndim > 1]
        found["largest part"] = max(x.addressable_shards[0].data.size / x.size for x in matrices)
print("FOUND" + json.dumps(found))
"""


def test_a_block_head_drafts_and_learns_on_a_mesh():
    found = run_on_devices(CHECKS, 4)
    assert found["same"] == [True, True]
    assert found["accepted"] > 20 and found["updates"] == 2
    assert found["losses"]["split"] == pytest.approx(found["losses"]["one"], rel=1e-4)
    assert found["losses"]["one"][1] != pytest.approx(found["losses"]["one"][0], rel=1e-3)
    assert found["largest part"] <= 0.5
