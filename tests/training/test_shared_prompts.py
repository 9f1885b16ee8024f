"""Shared prompts: the logprobs of computing every copy bit for bit, and its gradients up to rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.config import AlgorithmConfig, MeshConfig, TrainingConfig
from rljax.engine.executables import row_invariant_compiler_options
from rljax.errors import ConfigError
from rljax.learning.packing import (
    TrainingSequence,
    build_batch,
    pack_groups,
    pack_sequences,
    response_places,
)
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from rljax.requests import Completion
from rljax.rollout.collector import Group
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import make_mesh
from rljax.tasks.base import Problem
from rljax.training.critic import critic_params, packed_values
from rljax.training.minibatches import make_minibatches, padding_share, shared_share
from rljax.training.scoring import score_packed
from rljax.training.update import Recipe, Trainer
from tests.engines import scaled_params, stored_pool
from tests.training.test_update import assert_close, gradients_of, optimizer

CONFIG = ModelConfig("qwen3", 61, 64, 2, 4, 2, 16, 96, tie_embeddings=True, qk_norm=True, max_positions=2048)
PACK_LENGTH = 500  # not a multiple of a chunk of keys
ROWS = 3
POOL = stored_pool()


@pytest.fixture(scope="module")
def params():
    return scaled_params(CONFIG, 3.0, 1.1)


@pytest.fixture(scope="module")
def sequences():
    """Groups with prompts within a chunk of keys and beyond, at its end, one that is not shared, and one too
    short to be copied: shared, they are one micro-batch.
    """
    rng = np.random.default_rng(0)
    sequences = []
    for num_prompt, count in ((300, 3), (100, 4), (256, 2), (180, 1), (20, 3)):
        prompt = rng.integers(0, CONFIG.vocab_size, num_prompt)
        for length in rng.integers(5, 45, count):
            sampled = rng.random(length) < 0.8 if num_prompt == 100 else None
            sequences.append(
                TrainingSequence(
                    prompt_ids=prompt,
                    response_ids=rng.integers(0, CONFIG.vocab_size, length),
                    rollout_logprobs=-4.0 + 0.3 * rng.standard_normal(length),
                    advantage=float(rng.standard_normal()),
                    weight=0.002,
                    sampled_mask=sampled,
                )
            )
    return sequences


def packed(sequences, share_prompts):
    """The packing and the micro-batches of sequences, with prompts shared or not."""
    lengths, prompts = zip(*((sequence.length, sequence.prompt_ids) for sequence in sequences), strict=True)
    packing = pack_sequences(lengths, PACK_LENGTH)
    if share_prompts:
        packing = pack_groups(lengths, prompts, PACK_LENGTH, ROWS)
    whole = packing.microbatches(ROWS, ROWS)  # rows of one number: each takes programs of its own
    batches = [build_batch(sequences, packing, rows, share_prompts) for rows in whole]
    return packing, batches


def at_responses(sequences, packing, batches, arrays):
    """What arrays [R, T], one per micro-batch, hold for the sampled tokens, one response after another."""
    rows, mask = np.concatenate(arrays), np.concatenate([batch.response_mask for batch in batches])
    places = response_places(sequences, packing)
    return np.concatenate([rows[row, where][mask[row, where]] for row, where in places])


def compiled(function):
    return jax.jit(function, compiler_options=row_invariant_compiler_options())


def one_layer(params):
    """Params of a policy of one layer, and its config."""
    return params | {"layers": params["layers"][:1]}, dataclasses.replace(CONFIG, num_layers=1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the bits are promised on a CPU only")
@pytest.mark.parametrize(
    ("compute_dtype", "sampling"),
    [
        ("bfloat16", SamplingParams(temperature=0.8, top_k=30)),
        pytest.param("float32", SamplingParams(repetition_penalty=1.2), marks=pytest.mark.long),
    ],
    ids=["bfloat16, filtered", "float32, penalized"],
)
def test_logprobs_have_the_same_bits(params, sequences, compute_dtype, sampling):
    numerics, rope = Numerics(compute_dtype=compute_dtype), jnp.asarray(rope_table(CONFIG, PACK_LENGTH))
    found = []

    @compiled
    def score(params, batch):
        return score_packed(params, CONFIG, batch, rope, numerics, sampling, logprob_chunk=100)

    for packing, batches in (packed(sequences, False), packed(sequences, True)):
        pairs = [jax.device_get(score(params, batch)) for batch in batches]
        found.append([at_responses(sequences, packing, batches, each) for each in zip(*pairs, strict=True)])
    (expected, expected_entropy), (logprobs, entropy) = found
    assert len(expected)
    np.testing.assert_array_equal(logprobs, expected)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5)


def test_the_sequences_lie_side_by_side_where_a_chunk_holds_them(sequences):
    """So that the tests of this file compare all cases: behind a prompt of one chunk, and of several."""
    packing, _ = packed(sequences, True)
    shared = {len(each.prompt_ids): 0 for each in sequences}
    for each, count in zip(sequences, packing.shared, strict=True):
        shared[len(each.prompt_ids)] += count > 0
    assert min(shared[300], shared[100], shared[20]) > 0
    assert shared[180] == shared[256] == 0  # a group of one; a prompt that fills its last chunk


def test_every_token_is_computed_once_and_copies_read_the_first(sequences):
    for batch in packed(sequences, True)[1]:
        compact = batch.compact
        present = batch.segment_ids > 0
        num_scored, num_tokens, num_copies = compact.counts
        real = np.concatenate([compact.scored, compact.others])[:num_tokens]
        assert len(np.unique(real)) == len(real) == compact.computed.sum()
        scored = compact.scored[:num_scored]
        np.testing.assert_array_equal(scored, np.flatnonzero(batch.response_mask))
        positions = np.concatenate([compact.scored, compact.others])[compact.source]
        for name in ("tokens", "positions"):
            values = getattr(batch, name)
            np.testing.assert_array_equal(values[present], values.reshape(-1)[positions][present])
        assert np.all(compact.computed.reshape(-1)[real])
        copied = sum(count for _, _, count in compact.copies[:num_copies])
        assert copied == present.sum() - compact.computed.sum()
    assert copied or num_copies == 0


def trainer(dtype="float32", remat=False, mesh=None, config=CONFIG, **training):
    training = TrainingConfig(pack_length=PACK_LENGTH, rows_per_microbatch=ROWS, remat=remat, **training)
    recipe = Recipe(SamplingParams(), AlgorithmConfig(entropy_coefficient=0.01), training, optimizer())
    return Trainer(config, Numerics(compute_dtype=dtype), recipe, POOL, mesh)


@pytest.mark.parametrize(
    ("dtype", "remat", "tolerance"),
    [("float32", False, 2e-6), pytest.param("bfloat16", True, 2e-2, marks=pytest.mark.long)],
)
def test_an_update_with_shared_prompts_is_the_same_update(params, sequences, dtype, remat, tolerance):
    """Its gradients, summed over two micro-batches, agree up to rounding."""
    (params, config), updates = one_layer(params), []
    side = trainer(dtype, remat, config=config)
    for share_prompts in (False, True):
        _, batches = packed(sequences, share_prompts)
        others = [batch.replace(advantages=0.5 * batch.advantages) for batch in batches]
        updates.append(side.update(side.init(params), batches + others))
    (state, metrics), (shared_state, shared_metrics) = updates
    assert_close(gradients_of(state), gradients_of(shared_state), tolerance)
    for name, value in metrics.items():
        np.testing.assert_allclose(shared_metrics[name], value, rtol=max(tolerance, 1e-5), err_msg=name)
    if dtype == "float32":  # Adam's first step is nearly a sign
        close = functools.partial(np.testing.assert_allclose, atol=1e-3)
        jax.tree.map(close, shared_state.params, state.params)


@pytest.mark.long
def test_the_critic_shares_too(params, sequences):
    params, config = one_layer(params)
    trunk = critic_params(params)
    trunk["head"]["weight"] = jnp.asarray(np.random.default_rng(1).standard_normal(CONFIG.hidden_size))
    rope = jnp.asarray(rope_table(CONFIG, PACK_LENGTH))

    @compiled
    @jax.grad
    def gradient(params, batch):
        values = packed_values(params, config, batch, rope, Numerics())
        return jnp.sum(jnp.where(batch.response_mask, values, 0.0) ** 2)

    expected, found = (
        jax.tree.map(lambda *all: sum(all), *(jax.device_get(gradient(trunk, batch)) for batch in batches))
        for _, batches in (packed(sequences, False), packed(sequences, True))
    )
    assert_close(expected, found)


def step_groups(num_prompt, count=3, samples=4):
    """A step of groups with prompts of one length and responses of 20 tokens."""
    rng = np.random.default_rng(num_prompt)

    def completion():
        response, logprobs = rng.integers(0, CONFIG.vocab_size, 20), np.full(20, -4.0, np.float32)
        return Completion(response.astype(np.int32), logprobs, "length")

    problem = Problem("train/0", ({"role": "user", "content": "?"},), "!", 0)
    prompts = [rng.integers(0, CONFIG.vocab_size, num_prompt).tolist() for _ in range(count)]
    return [
        Group(problem, prompt, [completion() for _ in range(samples)], [{"reward": 1.0}] * samples)
        for prompt in prompts
    ]


def test_prompts_are_shared_where_it_saves_enough():
    settings = TrainingConfig(pack_length=760, rows_per_microbatch=4)
    saved = 3 * 199 / 880
    for choice, num_prompt, share in (
        ("auto", 200, saved),
        ("auto", 8, 0.0),
        ("off", 200, 0.0),
        ("on", 200, saved),
    ):
        minibatches = make_minibatches(step_groups(num_prompt), settings, (0,), 1, choice)
        assert shared_share(minibatches) == pytest.approx(share)
        (batch,) = minibatches[0].batches
        assert (batch.compact is not None) == (share > 0)
        if share:
            computed = 3 * 199 + 12 * 21
            assert padding_share(minibatches) == pytest.approx(1 - computed / batch.compact.size)


def test_sharing_is_not_possible_on_a_mesh():
    mesh = make_mesh(MeshConfig(data=1)) or jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(ConfigError, match=r"training\.share_prompts: on is not possible on a mesh"):
        trainer(mesh=mesh, share_prompts="on")
    assert trainer(mesh=mesh, share_prompts="auto").share_prompts == "off"
