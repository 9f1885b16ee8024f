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
from rljax.sampling import distribution, split
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


@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if name not in ("plain", "greedy")])
@pytest.mark.parametrize("ties", [False, True])
def test_bisection_keeps_the_tokens_that_sorting_keeps(name, ties):
    params = DISTRIBUTIONS[name]
    scaled = with_ties(make_logits()) if ties else make_logits()
    scaled[:, -3:] = -np.inf  # as the padding of a vocabulary
    scaled[0] *= 1e30
    sorting, bisection = (
        np.asarray(scaled >= program(f, params)(scaled)) for f in (distribution.kept_from, split.kept_from)
    )
    assert sorting.any(-1).all() and not sorting.all(-1).any()
    np.testing.assert_array_equal(bisection, sorting)


@pytest.mark.parametrize(("limit", "kept"), [(0.5, 1), (0.75, 2), (0.7500001, 4), (0.875, 4), (1.0, 4)])
def test_top_p_at_a_boundary_and_among_equals(limit, kept):
    """Probabilities 1/2, 1/4, 1/8, 1/8 have exact sums: a token stays if the mass before it is below top_p,
    and so do its equals.
    """
    probs = jnp.array([[0.125, 0.5, 0.125, 0.25]])
    levels = split._levels(jnp.log2(probs))
    lowest = split._threshold(levels, probs, np.float32(limit))
    assert int((jnp.log2(probs) >= lowest).sum()) == kept


@functools.cache
def program(function, params):
    return jax.jit(lambda *args: function(*args, params, NUMERICS))


def both(logits, params):
    """(tokens, logprobs) by the split vocabulary's sampling, and by the reference."""
    keys = np.stack([request_key(0, row) for row in range(len(logits))])
    positions = np.arange(len(logits), dtype=np.int32)
    for function in (split.noisy_argmax, base.noisy_argmax):
        yield program(function, params)(logits, keys, positions)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", ["logits", "ties", "nan"])
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


CHECKS = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rljax.config import MeshConfig
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import all_rows, empty_tree, pack_rows
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment
from rljax.engine.sampling import sample
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.sharding import make_mesh
from tests.engines import scaled_params
from tests.sampling.test_split import DISTRIBUTIONS, make_logits, with_ties

usual = sys.argv[1] == "usual"
meshes = ["2 x 4"] if usual else ["2", "8"]
found = {
    "devices": jax.device_count(), "meshes": meshes, "sampling": {}, "tokens": {}, "collectives": {}
}
MESHES = {str(size): make_mesh(MeshConfig(tensor=size)) for size in (2, 4, 8)}
MESHES["2 x 4"] = make_mesh(MeshConfig(data=2, tensor=4))

# The same logits, whole and split.
keys = np.stack([request_key(0, row) for row in range(64)])
positions = np.arange(64, dtype=np.int32)
names = {"float32": ("plain", "all", "greedy"), "bfloat16": ("all",)} if usual else {
    "float32": tuple(DISTRIBUTIONS), "bfloat16": ("plain", "all")
}
for dtype in ("float32", "bfloat16"):
    logits = make_logits() if dtype == "float32" else with_ties(make_logits())
    for name in names[dtype]:
        params = DISTRIBUTIONS[name]
        draw = jax.jit(sample, static_argnums=(3, 4, 5))
        expected, expected_logprobs = draw(logits, keys, positions, params, Numerics(), None)
        for label in found["meshes"]:
            mesh = MESHES[label]
            placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "tensor")))
            tokens, logprobs = draw(placed, keys, positions, params, Numerics(), mesh)
            found["sampling"][f"{dtype} {name} {label}"] = {
                "same": bool(np.array_equal(tokens, expected)),
                "logprobs": float(np.abs(logprobs - expected_logprobs).max()),
                "distinct": len(set(np.asarray(tokens).tolist())),
            }

# Whole responses.
PENALTIES = dict(repetition_penalty=1.1, frequency_penalty=0.25, presence_penalty=0.5)
POLICIES = {
    "plain": SamplingParams(),
    "filters": SamplingParams(1.1, 40, 0.9, 0.01),
    "all": SamplingParams(1.3, 60, 0.95, 0.001, **PENALTIES),
    "greedy": SamplingParams(0.0, **PENALTIES),
}
SLOTS, LENGTH, EOS = 8, 64, 1
buckets = Buckets((SLOTS,), (LENGTH,), (16, 32), 3)
pool = ExecutablePool()

def make_config(vocab_size, kv_heads=4):
    return ModelConfig("qwen3", vocab_size, 64, 1, 8, kv_heads, 16, 64, qk_norm=True)

def make_engine(name, mesh, vocab_size=264, dtype="float32", rule="coupled"):
    engine = DecodeEngine(
        make_config(vocab_size), Numerics(compute_dtype=dtype), POLICIES[name], buckets, (EOS,), 64,
        pool, mesh, rule,
    )
    params = engine.load_params(scaled_params(engine.config, 2))
    prefix = engine.prefill(params, [[2 + i, 3, 5 + i] for i in range(SLOTS)])
    requests = [Assignment(i, i, request_key(0, i), LENGTH - 8) for i in range(SLOTS)]
    return engine, params, engine.bulk_insert(prefix, engine.init_state(SLOTS, LENGTH), requests)

def responses(results):
    rows = [np.concatenate([result.tokens[row] for result in results]) for row in range(SLOTS)]
    return [row[row >= 0].tolist() for row in rows]

def decode_plainly(*args, **options):
    engine, params, state = make_engine(*args, **options)
    return responses([engine.generate(params, state)[1]])

def decode_drafts(*args, rule="coupled", **options):
    # The policy drafts for itself, and every other third draft is made wrong.
    engine, params, state = make_engine(*args, rule=rule, **options)
    results, accepted, active = [], 0, np.ones(SLOTS, bool)
    while active.any():
        state, drafts = engine.draft(params, state, 3, with_proposal=rule == "rejection")
        tree = drafts.tree(3)
        if rule == "coupled" and len(results) % 2:
            tree = tree.replace(tokens=tree.tokens.at[:, 2].add(1))
        tree = jax.tree.map(np.asarray, tree)
        rows = pack_rows(tree, np.flatnonzero(active), 32)
        state, pending = engine.verify(params, state, tree, rows, drafts.proposal)
        results.append(pending.result())
        accepted += int((results[-1].tokens[:, 1:] >= 0).sum())
        active = results[-1].active
    return responses(results), accepted

def compare(label, meshes, *args, **options):
    plain = decode_plainly(*args, None, **options)
    for size in meshes:
        drafted, accepted = decode_drafts(*args, MESHES[size], **options)
        sharded = decode_plainly(*args, MESHES[size], **options)
        found["tokens"][f"{label} {size}"] = {
            "tokens": sum(map(len, plain)), "accepted": accepted,
            "plain": sharded == plain, "drafted": drafted == plain,
            "drafted as plain": drafted == sharded,
        }

if usual:
    compare("odd vocabulary", ["8"], "all", vocab_size=259)
    compare("bfloat16", ["2"], "all", dtype="bfloat16")
    one, _ = decode_drafts("plain", None, rule="rejection", vocab_size=259)
    four, accepted = decode_drafts("plain", MESHES["4"], rule="rejection", vocab_size=259)
    found["rejection"] = {"same": one == four, "accepted": accepted}
else:
    compare("plain", ["4"], "plain")
    compare("greedy", ["4"], "greedy")
    compare("all", ["2 x 4"], "all")
_, params, state = make_engine("all", MESHES["8"], vocab_size=259)
found["shapes"] = {
    name: x.addressable_shards[0].data.shape
    for name, x in {"embed": params["embed"], "lm_head": params["lm_head"], "counts": state.counts}.items()
}

# What the devices send each other.
VOCAB = 16384 - 8  # so large that nothing else has the size of the logits, and no other dimension
COLLECTIVE = r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\\("

def sizes(text):
    return [
        int(np.prod([int(size) for size in dims.split(",") if size]))
        for result in re.findall(COLLECTIVE, text) for dims in re.findall(r"\\w+\\[([0-9,]*)\\]", result)
    ]

for label, name in (("8", "all"),) if usual else (("8", "plain"), ("2 x 4", "filters")):
    mesh, config = MESHES[label], make_config(VOCAB, kv_heads=8)
    engine = DecodeEngine(config, Numerics(), POLICIES[name], buckets, (EOS,), 64, mesh=mesh)
    weights = engine.param_shapes(engine.load_params(init_params(engine.config, 0)))
    state, tree = engine.state_shapes(SLOTS, LENGTH), empty_tree(SLOTS, 3)
    rows = pack_rows(tree, np.arange(SLOTS), 32)
    programs = {
        "generate": (SLOTS, engine._generating(weights, state, 1, 0)[0]),
        "verify": (32, engine._verifying(weights, state, tree, rows, None)[0]),
        "draft": (SLOTS, engine._drafting(weights, state, 1, False)[0]),
    }
    for program, (count, compiled) in programs.items():
        text = compiled.as_text()
        found["collectives"][f"{program} {name} {label}"] = {
            "largest": max(sizes(text)),
            "logits": count // mesh.shape["data"] * VOCAB // mesh.shape["tensor"],
            "whole rows": sorted(set(re.findall(rf"\\w+\\[[0-9,]*\\b{VOCAB}\\b[0-9,]*\\]", text))),
        }
print("FOUND" + json.dumps(found))
"""


@functools.lru_cache
def checked(part):
    return run_on_devices(CHECKS, 8, part)


PARTS = ["usual", pytest.param("others", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=PARTS)
def found(request):
    return checked(request.param)


def test_the_same_logits_give_the_same_tokens(found):
    distributions = 3 + 1 if found["meshes"] == ["2 x 4"] else len(DISTRIBUTIONS) + 2
    assert found["devices"] == 8 and len(found["sampling"]) == distributions * len(found["meshes"])
    for label, one in found["sampling"].items():
        assert one["same"] and one["logprobs"] < 5e-6 and one["distinct"] > 30, label


def test_responses_are_those_of_one_device(found):
    assert len(found["tokens"]) >= 2
    for label, one in found["tokens"].items():
        assert one["tokens"] > 250 and one["accepted"] > 150, label
        assert one["plain"], f"plain decoding: {label}"
        assert one["drafted"], f"drafts verified: {label}"


def test_rejection_gathers_the_logits_and_samples_the_same():
    found = checked("usual")["rejection"]
    assert found["same"] and found["accepted"] > 100


def test_the_vocabulary_is_really_split_and_padded(found):
    assert found["shapes"] == {"embed": [33, 64], "lm_head": [33, 64], "counts": [8, 33]}


def test_no_logits_travel(found):
    assert len(found["collectives"]) >= 3
    for label, one in found["collectives"].items():
        assert 0 < one["largest"] < one["logits"], label
        assert one["whole rows"] == [], label
