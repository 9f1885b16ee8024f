"""The decode engine: the same bits however a request is decoded and in training, and its contract."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment
from rljax.models import transformer
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.products import ProductForm
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from tests import engines
from tests.engines import (
    BUCKETS,
    CONFIGS,
    LONGEST,
    SAMPLING,
    VOCAB,
    ask,
    decode,
    engine_of,
    lively_params,
    poison,
    speculate,
    tangled,
    trained_logprobs,
)
from tests.exactness import MOST_FLIPS
from tests.misbehaving_products import every_count, replaced

SLOW_INTERPRETER = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 takes two minutes to interpret these kernels"
)


def world_of(name, dtype="float32"):
    """Prompts beside and on the edges of blocks; responses across the first 256 keys."""
    return engines.world_of(name, dtype, (1, 40, 63, 64, 100), (300, 230, 5, 90, 37))


WORLDS = [
    ("three", "float32"),
    ("three", "bfloat16"),
    ("one", "float32"),
    ("two", "bfloat16"),
    ("all", "float32"),
]
OTHERS = [("one", "bfloat16"), ("two", "float32"), ("all", "bfloat16")]


@pytest.fixture(
    scope="module",
    params=[*WORLDS, *(pytest.param(other, marks=pytest.mark.long) for other in OTHERS)],
    ids=lambda param: " ".join(param),
)
def world(request):
    return world_of(*request.param)


def test_together_is_as_long_as_asked_and_worth_comparing(world):
    assert [len(tokens) for tokens, _ in world.plain] == [each.limit for each in world.asked]
    tokens = np.concatenate([tokens for tokens, _ in world.plain])
    logprobs = np.concatenate([logprobs for _, logprobs in world.plain])
    assert tokens.min() >= 0 and tokens.max() < VOCAB and len(np.unique(tokens)) > VOCAB // 2
    assert (logprobs <= 0).all() and -4.0 < logprobs.mean() < -0.3


@pytest.mark.parametrize(
    ("members", "order", "capacity", "one_by_one"),
    [
        ([0], [1], 0, False),  # through growth
        ([4, 0, 3], [4, 2, 0], LONGEST, False),
        ([4, 3, 2, 1, 0], [2, 0, 1, 4, 3], 0, True),
    ],
    ids=["alone", "with holes", "joining one by one"],
)
def test_same_bits_however_decoded(world, members, order, capacity, one_by_one):
    asked = [world.asked[i] for i in members]
    steps = 13 if one_by_one else None
    outputs = decode(world.engine, world.params, asked, order, capacity, one_by_one, steps)
    assert outputs == [world.plain[i] for i in members]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_same_bits_where_many_slots_are_computed_and_fewer_later(dtype):
    config, buckets = CONFIGS["three"], Buckets((2, 40), (LONGEST,), prompts=2)
    engine = engine_of(config, buckets, dtype)
    params, asked = engine.load_params(lively_params(config)), ask([40, 64], [230, 90])
    assert decode(engine, params, asked, [39, 9]) == decode(engine, params, asked)


def check_training(world, gradients):
    """The logprobs of decoding, by the pass that scores or inside the one that computes gradients."""
    found = trained_logprobs(world.engine, world.params, world.asked, world.plain, gradients)
    assert found == [logprobs for _, logprobs in world.plain]


def test_training_recomputes_the_logprobs_bit_for_bit(world):
    check_training(world, gradients=False)


@pytest.mark.default_cases("three bfloat16")
@pytest.mark.parametrize("policy", WORLDS[:2], ids=" ".join)
def test_and_so_does_the_pass_that_computes_gradients(policy):
    check_training(world_of(*policy), gradients=True)


@pytest.mark.parametrize(
    ("dtype", "kernel", "limits"),
    [
        pytest.param("float32", None, [30, 20, 8], marks=pytest.mark.long),
        ("bfloat16", None, [30, 20, 8]),
        pytest.param("bfloat16", "interpret_gpu", [4, 2], marks=[pytest.mark.long, SLOW_INTERPRETER]),
    ],
)
def test_slabs_are_exact_where_every_number_of_rows_has_a_kernel_of_its_own(dtype, kernel, limits):
    """Alone, in a batch, verified, and in the pass that computes gradients, which has hundreds of rows."""
    kernels = KernelChoice(gated_product=kernel, head_products=kernel)
    numerics = Numerics(True, dtype, kernels, ProductForm(64, 64, slabs=True))
    config = CONFIGS["three"]
    if kernel:  # a tile, and four heads, which take long to interpret
        config = dataclasses.replace(config, mlp_size=8, num_heads=2, num_kv_heads=1)
    with replaced(every_count):
        engine = DecodeEngine(config, numerics, SAMPLING, BUCKETS, [], max(limits))
        world = engines.World(
            engine, engine.load_params(lively_params(config)), ask([1, 40, 9][: len(limits)], limits)
        )
        for i, asked in enumerate(world.asked[:2]):
            assert decode(engine, world.params, [asked], capacity=LONGEST) == [world.plain[i]]
        draft = tangled(world.truth)
        emitted = speculate(engine, world.params, world.asked, draft, 7, capacity=LONGEST)
        assert emitted.outputs == world.plain and emitted.passes < max(limits)
        check_training(world, gradients=True)


def test_old_and_unwritten_cache_is_invisible(world):
    engine, params = world.engine, world.params
    state = engine.init_state(5, LONGEST)
    state = state.replace(lengths=jnp.full_like(state.lengths, 77))
    state = poison(state)
    members, outputs = [1, 2, 3], {i: [] for i in (1, 2, 3)}
    prefix = engine.prefill(params, [world.asked[i].prompt for i in members])
    for row, i in enumerate(members):
        taken = Assignment(row, row, world.asked[i].key, world.asked[i].limit)
        state = engine.bulk_insert(prefix, state, [taken])
    for _ in range(2):
        state, result = engine.generate(params, poison(state), 20)
        for row, i in enumerate(members):
            valid = result.tokens[row] >= 0
            outputs[i] += zip(result.tokens[row][valid].tolist(), result.logprobs[row][valid], strict=True)
    for i in members:
        expected = list(zip(*world.plain[i], strict=True))[:40]
        assert len(expected) in (5, 40) and outputs[i] == expected


# -- the contract, on one policy ---------------------------------------------------------------------------


def insert(world, prompts, placed, slots=5):
    """A state with requests in it: (row of the prompt, key, limit) of each slot from the first on."""
    prefix = world.engine.prefill(world.params, prompts)
    assignments = [Assignment(row, slot, key, limit) for slot, (row, key, limit) in enumerate(placed)]
    return world.engine.bulk_insert(prefix, world.engine.init_state(slots, LONGEST), assignments)


def test_each_request_has_its_own_longest_response_and_generate_returns_when_few_are_active():
    world = world_of("three")
    limits = [1, 2, 10, 10]
    asked = [dataclasses.replace(world.asked[1], limit=limit) for limit in limits]
    for limit, (tokens, logprobs) in zip(limits, decode(world.engine, world.params, asked), strict=True):
        assert tokens == world.plain[1][0][:limit] and logprobs == world.plain[1][1][:limit]
    state = insert(world, [asked[0].prompt], [(0, each.key, each.limit) for each in asked])
    steps = []
    for until_active in (3, 3, 2, 0):
        state, result = world.engine.generate(world.params, state, until_active=until_active)
        steps.append(result.steps)
        assert result.active.sum() <= until_active
    assert steps == [1, 0, 1, 8]


def test_freed_slots_stop_and_can_be_taken_again():
    world = world_of("three")
    engine, params = world.engine, world.params
    state = insert(world, [[3, 4], [9]], [(i, request_key(0, i), 60) for i in range(2)])
    state, first = engine.generate(params, state, 3)
    assert first.active[:2].all() and first.steps == 3
    state = engine.free_resource(state, [0])
    state, second = engine.generate(params, state, 5)
    assert (second.tokens[0] == -1).all() and not second.active[0]
    assert (second.tokens[1] >= 0).any()
    # The slot's next request gets what it gets alone.
    taken = [Assignment(0, 0, request_key(5, 5), 12)]
    prefix = engine.prefill(params, [[30, 31, 32]])
    state, again = engine.generate(params, engine.bulk_insert(prefix, state, taken))
    _, alone = engine.generate(params, engine.bulk_insert(prefix, engine.init_state(2, LONGEST), taken))
    np.testing.assert_array_equal(again.tokens[0][: alone.steps], alone.tokens[0])
    np.testing.assert_array_equal(again.logprobs[0][: alone.steps], alone.logprobs[0])


@pytest.mark.accelerator(needed=False)
def test_greedy_tokens_are_those_of_full_forward_passes():
    """Prefill and cached decoding against the whole sequence at once."""
    config = CONFIGS["three"]
    engine = engine_of(config, sampling=SamplingParams(temperature=0.0))
    params, asked = engine.load_params(lively_params(config)), ask([1, 2, 30, 59], [16] * 4)
    outputs = decode(engine, params, asked, capacity=LONGEST)
    rope = jnp.asarray(rope_table(config, 128))

    @jax.jit
    def best(tokens):
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        attention = PackedAttention(jnp.ones_like(tokens), Numerics(row_invariant=False))
        hidden, _ = transformer.forward(
            params, config, tokens, positions, attention, rope, Numerics(row_invariant=False)
        )
        return jnp.argmax(transformer.logits(params, config, hidden, Numerics()), axis=-1)[0]

    for each, (tokens, logprobs) in zip(asked, outputs, strict=True):
        sequence = np.zeros((1, 128), np.int32)  # what follows cannot be seen from before it
        sequence[0, : len(each.prompt) + 16] = each.prompt + tokens
        expected = np.asarray(best(jnp.asarray(sequence)))[len(each.prompt) - 1 : len(each.prompt) + 15]
        most = 0 if jax.default_backend() == "cpu" else max(1, MOST_FLIPS * 16)
        assert np.count_nonzero(np.asarray(tokens) != expected) <= most  # each follows the tokens before it
        assert logprobs == [0.0] * 16


def test_what_samples_nothing_is_compiled_once_for_all_ways_to_sample():
    pool, buckets, kinds = ExecutablePool(), Buckets((2,), (64, 128)), []
    for sampling, eos, layers in ((SAMPLING, [7], None), (SamplingParams(0.5, top_k=3), [], (1,))):
        engine = DecodeEngine(
            CONFIGS["three"], Numerics(), sampling, buckets, eos, 16, pool, hidden_layers=layers
        )
        params, known = engine.load_params(lively_params(CONFIGS["three"])), set(pool._programs)
        prefix = engine.prefill(params, [[1, 2, 3]])
        first = Assignment(0, 0, request_key(0, 0), 4)
        state = engine.bulk_insert(prefix, engine.init_state(1, 8), [first])
        state, _ = engine.generate(params, state, 1)
        state = engine.free_resource(engine.grow(state), [0])
        kinds.append(sorted(key[0] for key in set(pool._programs) - known))
    assert kinds == [["free", "generate", "grow", "insert", "prefill"], ["generate", "prefill"]]


def test_an_empty_prompt_or_none_is_refused():
    world = world_of("three")
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="prompt"):
            world.engine.prefill(world.params, prompts)
