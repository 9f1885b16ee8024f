"""Slots that move on a mesh: the same values as on one device, and no device ever holds all slots.

Eight devices are forced on the host platform, in a process of their own, as in `tests/test_sharding.py`.
"""

import json

import pytest

from tests.devices import run_on_devices

MESHES = {
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 8": {"fsdp": 8},
    "tensor 3": {"tensor": 3, "data": 2},  # does not divide the key/value heads
}
MOVES = ("insert", "compact", "widen")

CHECKS = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from rljax.config import MeshConfig
from rljax.engine.placement import cache_shardings, decode_state_shardings
from rljax.engine.slot_moves import SlotMoves
from rljax.engine.state import DecodeState, Prefix
from rljax.engine.kv_cache import KVCache
from rljax.models.config import ModelConfig
from rljax.sharding import constrain, make_mesh, replicated_sharding

LAYERS, HEADS, DIM, SLOTS, LENGTH, PROMPTS, PROMPT = 4, 4, 16, 32, 512, 16, 128
config = ModelConfig("qwen2", 96, 48, LAYERS, num_heads=12, num_kv_heads=HEADS, head_dim=DIM, mlp_size=96)
rng = np.random.default_rng(0)

def cache(batch, length):
    def arrays(*shape):
        return [rng.standard_normal((batch, HEADS, *shape), np.float32) for _ in range(LAYERS)]
    return KVCache(keys=arrays(length // 64, DIM, 64), values=arrays(length, DIM))

def ints(*shape):
    return rng.integers(0, 100, shape).astype(np.int32)

state = DecodeState(cache(SLOTS, LENGTH), ints(SLOTS), ints(SLOTS), ints(SLOTS), ints(SLOTS) > 50,
                    ints(SLOTS, 2).astype(np.uint32), ints(SLOTS, 96))
prefix = Prefix(cache(PROMPTS, PROMPT), ints(PROMPTS), ints(PROMPTS))
slots = rng.permutation(SLOTS).astype(np.int32)
slots[rng.random(SLOTS) < 0.3] = SLOTS
rows = rng.integers(0, PROMPTS, SLOTS).astype(np.int32)
taken = np.concatenate([np.sort(rng.permutation(SLOTS)[:13]), np.zeros(3)]).astype(np.int32)
arguments = {
    "insert": (prefix, state, rows, slots, ints(SLOTS), ints(SLOTS, 2).astype(np.uint32)),
    "compact": (state, taken, np.arange(16) < 13),
    "widen": (state,),
}

def program(name, mesh):
    moves = SlotMoves(config, mesh)
    function = (lambda state: moves.widen(state, 64)) if name == "widen" else getattr(moves, name)
    def placed(*args):
        moved = function(*args)
        return moved if mesh is None else constrain(moved, decode_state_shardings(moved, config, mesh))
    return jax.jit(placed, donate_argnums=(1,) if name == "insert" else ())

def put(argument, mesh):
    if isinstance(argument, DecodeState):
        return jax.device_put(argument, decode_state_shardings(argument, config, mesh))
    whole = replicated_sharding(mesh)
    if isinstance(argument, Prefix):
        return jax.device_put(argument, Prefix(cache_shardings(argument.cache, config, mesh), whole, whole))
    return jax.device_put(argument, whole)

COLLECTIVE = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"

def largest_collective(text):
    sizes = [0]
    for results in re.findall(rf"= (.*?) (?:{COLLECTIVE})(?:-start)?\\(", text):
        for shape in re.findall(r"[sfup]\\w+\\[([\\d,]+)\\]", results):
            sizes.append(4 * int(np.prod([int(size) for size in shape.split(",")])))
    return max(sizes)

results = {}
expected = {name: program(name, None)(*jax.tree.map(jnp.array, args)) for name, args in arguments.items()}
for label, axes in json.loads(sys.argv[1]).items():
    mesh = make_mesh(MeshConfig(**axes))
    for name, args in arguments.items():
        placed = [put(argument, mesh) for argument in args]
        compiled = program(name, mesh).lower(*placed).compile()
        memory = compiled.memory_analysis()
        shard = placed[1 if name == "insert" else 0].cache.values[0].addressable_shards[0].data.nbytes
        results[f"{label} {name}"] = {
            "same": all(jax.tree.leaves(jax.tree.map(np.array_equal, compiled(*placed), expected[name]))),
            "temporaries": memory.temp_size_in_bytes / shard,
            "communicated": largest_collective(compiled.as_text()) / shard,
        }
print("FOUND" + json.dumps(results))
"""


@pytest.fixture(scope="module")
def results():
    return run_on_devices(
        CHECKS, 8, json.dumps(MESHES), flags="--xla_cpu_enable_concurrency_optimized_scheduler=false"
    )


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("mesh", MESHES)
def test_slots_move_between_devices(results, mesh, move):
    found = results[f"{mesh} {move}"]
    assert found["same"]
    # In shards of one array of one layer, of which a device holds 8 in all.
    assert found["temporaries"] < 4
    assert found["communicated"] < 1
