"""Decoding with the vocabulary split over devices: the same tokens, and no logits between devices.

Eight devices are forced on the host platform, which must happen before JAX starts: the checks run in one
separate process, and the tests here read its results.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels.noisy_argmax import base
from rljax.numerics.rows import Numerics
from rljax.sampling import split
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from tests.devices import run_on_devices

NUMERICS = Numerics()
DISTRIBUTIONS = {
    "plain": SamplingParams(),
    "top-k": SamplingParams(temperature=1.4, top_k=9),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "small top-p": SamplingParams(top_p=0.01),
    "min-p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01),
    "greedy": SamplingParams(temperature=0.0),
}


def make_logits(rows=64, vocab_size=520, scale=3.0):
    return np.random.default_rng(0).normal(0, scale, (rows, vocab_size)).astype(np.float32)


def with_ties(logits):
    """Rounds logits to bfloat16 and further, so that many are equal; some are 0 and -0."""
    return np.round(logits).astype(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize(("limit", "kept"), [(0.5, 1), (0.75, 2), (0.7500001, 4), (0.875, 4), (1.0, 4)])
def test_top_p_at_a_boundary_and_among_equals(limit, kept):
    """Probabilities 1/2, 1/4, 1/8, 1/8 have exact sums: a token stays if the mass before it is below top_p,
    and so do its equals.
    """
    probs = np.array([[0.125, 0.5, 0.125, 0.25]], np.float32)
    logs = np.log2(probs)
    assert int((logs >= lowest_kept(logs, probs, np.float32(limit))).sum()) == kept


@jax.jit
def lowest_kept(scaled, probs, limit):
    return split._threshold(split._levels(scaled), probs, limit)


@functools.cache
def program(function, params):
    return jax.jit(lambda *args: function(*args, params, NUMERICS))


def both(logits, params):
    """(tokens, logprobs) by the split vocabulary's sampling, and by the reference."""
    keys = np.stack([request_key(0, row) for row in range(len(logits))])
    positions = np.arange(len(logits), dtype=np.int32)
    for function in (split.noisy_argmax, base.noisy_argmax):
        yield program(function, params)(logits, keys, positions)


@pytest.mark.default_cases("all-*", "plain-*")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "logits") for name in DISTRIBUTIONS),
        ("all", "ties"),
        ("greedy", "ties"),
        ("plain", "nan"),
        ("all", "nan"),
    ],
)
def test_the_same_token_as_the_reference(name, kind):
    """A row with NaN is told as by it."""
    logits = with_ties(make_logits()) if kind == "ties" else make_logits()
    if kind == "nan":
        logits[0, 5] = np.nan
    (tokens, logprobs), (expected, expected_logprobs) = both(logits, DISTRIBUTIONS[name])
    np.testing.assert_array_equal(np.isnan(logprobs), np.isnan(expected_logprobs))
    assert 0 <= int(tokens[0]) < logits.shape[1]
    first = 1 if kind == "nan" else 0
    np.testing.assert_array_equal(tokens[first:], expected[first:])
    np.testing.assert_allclose(logprobs[first:], expected_logprobs[first:], rtol=0, atol=2e-6)


SETUP = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rljax.config import MeshConfig
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment
from rljax.engine.sampling import sample
from rljax.models.config import ModelConfig
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.sharding import make_mesh
from tests.engines import scaled_params
from tests.sampling.test_split import DISTRIBUTIONS, make_logits, with_ties

found = {"devices": jax.device_count(), "sampling": {}, "collectives": {}}
MESHES = {str(size): make_mesh(MeshConfig(tensor=size)) for size in (2, 4, 8)}
MESHES["2 x 4"] = make_mesh(MeshConfig(data=2, tensor=4))

# Whole responses.
PENALTIES = dict(repetition_penalty=1.1, frequency_penalty=0.25, presence_penalty=0.5)
POLICIES = {
    "plain": SamplingParams(), "all": SamplingParams(1.3, 60, 0.95, 0.001, **PENALTIES),
}
SLOTS, LENGTH = 8, 64
buckets = Buckets((SLOTS,), (LENGTH,), (16, 32), 3)
pool = ExecutablePool()

def make_config(vocab_size, kv_heads):
    return ModelConfig("qwen3", vocab_size, 64, 1, 8, kv_heads, 16, 64, qk_norm=True)

def load(engine):
    return engine.load_params(jax.device_get(scaled_params(engine.config, 2)))

def make_engine(name, mesh, config, dtype="float32", rule="coupled"):
    ends = range(1, config.vocab_size, 128)
    engine = DecodeEngine(
        config, Numerics(compute_dtype=dtype), POLICIES[name], buckets, ends, 64, pool, mesh, rule
    )
    return engine, load(engine)

def begin(engine, params):
    prefix = engine.prefill(params, [[2 + i, 3, 5 + i] for i in range(SLOTS)])
    requests = [Assignment(i, i, request_key(0, i), LENGTH - 8) for i in range(SLOTS)]
    return engine.bulk_insert(prefix, engine.init_state(SLOTS, LENGTH), requests)

def responses(results):
    rows = [np.concatenate([result.tokens[row] for result in results]) for row in range(SLOTS)]
    return [row[row >= 0].tolist() for row in rows]

def decode_plainly(engine, params):
    return responses([engine.generate(params, begin(engine, params))[1]])

def decode_drafts(engine, params):
    # The policy drafts for itself, and every other third draft is made wrong.
    rejection, state = engine.verification == "rejection", begin(engine, params)
    results, accepted, active = [], 0, np.ones(SLOTS, bool)
    while active.any():
        state, drafts = engine.draft(params, state, 3, with_proposal=rejection)
        tree = drafts.tree(3)
        if not rejection and len(results) % 2:
            tree = tree.replace(tokens=tree.tokens.at[:, 2].add(1))
        tree = jax.tree.map(np.asarray, tree)
        rows = pack_rows(tree, np.flatnonzero(active), 32)
        state, pending = engine.verify(params, state, tree, rows, drafts.proposal)
        results.append(pending.result())
        accepted += int((results[-1].tokens[:, 1:] >= 0).sum())
        active = results[-1].active
    return responses(results), accepted
"""

CHECKS = """
# The same logits, whole and split.
keys = np.stack([request_key(0, row) for row in range(64)])
positions = np.arange(64, dtype=np.int32)
mesh = MESHES["2 x 4"]
for dtype, names in {"float32": ("plain", "all", "greedy"), "bfloat16": ("all",)}.items():
    logits = make_logits() if dtype == "float32" else with_ties(make_logits())
    for name in names:
        params = DISTRIBUTIONS[name]
        draw = jax.jit(sample, static_argnums=(3, 4, 5))
        expected, expected_logprobs = draw(logits, keys, positions, params, Numerics(), None)
        placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "tensor")))
        tokens, logprobs = draw(placed, keys, positions, params, Numerics(), mesh)
        found["sampling"][f"{dtype} {name}"] = {
            "same": bool(np.array_equal(tokens, expected)),
            "logprobs": float(np.abs(logprobs - expected_logprobs).max()),
            "distinct": len(set(np.asarray(tokens).tolist())),
        }

# Odd, so padded to 16376: so large that nothing else has the size of the logits, and no other dimension.
VOCAB, PADDED = 16371, 16376
wide = make_config(VOCAB, kv_heads=8)
plain = decode_plainly(*make_engine("all", None, wide, "bfloat16"))
engine, params = make_engine("all", MESHES["8"], wide, "bfloat16")
drafted, accepted = decode_drafts(engine, params)
found["coupled"] = {
    "tokens": sum(map(len, plain)), "accepted": accepted,
    "plain": decode_plainly(engine, params) == plain, "drafted": drafted == plain,
}
state = begin(engine, params)
found["shapes"] = {
    name: x.addressable_shards[0].data.shape
    for name, x in {"embed": params["embed"], "lm_head": params["lm_head"], "counts": state.counts}.items()
}

# What the devices send each other, in the programs that these responses came from.
COLLECTIVE = r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\\("

def sizes(text):
    return [
        int(np.prod([int(size) for size in dims.split(",") if size]))
        for result in re.findall(COLLECTIVE, text) for dims in re.findall(r"\\w+\\[([0-9,]*)\\]", result)
    ]

compiled, tree = pool.compilations, empty_tree(SLOTS, 3)
rows = pack_rows(tree, np.arange(SLOTS), 32)
programs = {
    "generate": (SLOTS, engine._generating(params, state, 1, 0, False).program),
    "verify": (32, engine._verifying(params, state, tree, rows, None).program),
    "draft": (SLOTS, engine._drafting(params, state, 1, False).program),
}
found["other programs"] = pool.compilations - compiled
for program, (count, executable) in programs.items():
    text = executable.as_text()
    found["collectives"][program] = {
        "largest": max(sizes(text)),
        "logits": count * PADDED // 8,
        "whole rows": sorted(set(re.findall(rf"\\w+\\[[0-9,]*\\b(?:{VOCAB}|{PADDED})\\b[0-9,]*\\]", text))),
    }
print("FOUND" + json.dumps(found))
"""

OTHERS = """
# Fewer key/value heads than devices.
config = make_config(259, kv_heads=2)
one, _ = decode_drafts(*make_engine("plain", None, config, rule="rejection"))
four, accepted = decode_drafts(*make_engine("plain", MESHES["4"], config, rule="rejection"))
found["rejection"] = {"same": one == four, "accepted": accepted}

# Settings by slot, and slots that move between devices.
def decode_a_mix(mesh):
    engine = DecodeEngine(
        config, Numerics(), SamplingParams(), Buckets((2, 4), (LENGTH,)), (), 16, mesh=mesh,
        per_slot_sampling=True,
    )
    params = load(engine)
    prefix = engine.prefill(params, [[2 + i, 3, 5 + i] for i in range(4)])
    mix = [DISTRIBUTIONS[name] for name in ("plain", "greedy", "all", "top-p")]
    placed = [Assignment(i, i, request_key(0, i), 30, settings) for i, settings in enumerate(mix)]
    state, first = engine.generate(params, engine.bulk_insert(prefix, engine.init_state(4, LENGTH), placed))
    if mesh is not None:
        return first.tokens, engine.generate(params, engine.compact(state, [3, 1]))[1].tokens
    return first.tokens, engine.generate(params, state)[1].tokens[[3, 1]]  # nothing moves

pairs = zip(decode_a_mix(MESHES["2 x 4"]), decode_a_mix(None), strict=True)
found["mix"] = [bool(np.array_equal(*pair)) for pair in pairs]
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    return run_on_devices(SETUP + CHECKS, 8)


@pytest.fixture(scope="module")
def others():
    return run_on_devices(SETUP + OTHERS, 8)


def test_the_same_logits_give_the_same_tokens(found):
    assert found["devices"] == 8 and len(found["sampling"]) == 3 + 1
    for label, one in found["sampling"].items():
        assert one["same"] and one["logprobs"] < 5e-6 and one["distinct"] > 30, label


def test_responses_are_those_of_one_device(found):
    coupled = found["coupled"]
    assert coupled["tokens"] > 250 and coupled["accepted"] > 150
    assert coupled["plain"] and coupled["drafted"]


@pytest.mark.long  # test_slots.py has settings by slot; above, the rule `coupled`
def test_gathered_logits_and_settings_by_slot_give_the_tokens_of_one_device(others):
    assert others["rejection"]["same"] and others["rejection"]["accepted"] > 100
    assert others["mix"] == [True, True]


def test_the_vocabulary_is_really_split_and_padded(found):
    assert found["shapes"] == {"embed": [2047, 64], "lm_head": [2047, 64], "counts": [8, 2047]}


def test_no_logits_travel(found):
    assert len(found["collectives"]) >= 3 and found["other programs"] == 0
    for label, one in found["collectives"].items():
        assert 0 < one["largest"] < one["logits"], label
        assert one["whole rows"] == [], label
