"""Scoring packed rows: the bits of the unchunked computation and of the decoder, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import row_invariant_compiler_options
from rljax.engine.host_sync import Assignment
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.models.packed_attention import PackedAttention
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams, transform_logits
from rljax.sampling.noise import request_key
from rljax.training.scoring import score_packed
from tests.engines import scaled_params, stored_pool

CONFIG = ModelConfig("qwen3", 41, 48, 1, 4, 2, 16, 64, tie_embeddings=True, qk_norm=True, max_positions=512)
FILTERED = SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.01)
WHOLE = 10**9  # a chunk that holds every token


@pytest.fixture(scope="module")
def params():
    return scaled_params(CONFIG, 3.0, 1.1, seed=1)


def packed(seed, lengths, pack_length):
    rng = np.random.default_rng(seed)
    sequences = [
        TrainingSequence(
            prompt_ids=rng.integers(0, CONFIG.vocab_size, 3),
            response_ids=rng.integers(0, CONFIG.vocab_size, length - 3),
            rollout_logprobs=None,
            advantage=0.0,
            weight=1.0,
        )
        for length in lengths
    ]
    packing = pack_sequences(lengths, pack_length)
    return build_batch(sequences, packing, range(packing.num_rows))


def scorer(config, pack_length, chunk, sampling=None):
    rope = jnp.asarray(rope_table(config, pack_length))

    def score(params, batch):
        sampled = sampling or SamplingParams()
        return score_packed(params, config, batch, rope, Numerics(), sampled, logprob_chunk=chunk)

    return score


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile(compiler_options=row_invariant_compiler_options())


def score(params, batch, chunk, sampling=None, config=CONFIG):
    function = scorer(config, batch.tokens.shape[1], chunk, sampling)
    return jax.device_get(compiled(function, params, batch)(params, batch))


@pytest.mark.parametrize(
    ("lengths", "chunk"), [([50, 40, 30, 20, 60, 64], 7), ([90], 64)], ids=["3 rows-7", "1 row-64"]
)
def test_chunks_have_the_bits_of_the_whole(params, lengths, chunk):
    batch = packed(0, lengths, 98)
    whole, chunked = score(params, batch, WHOLE), score(params, batch, chunk)
    np.testing.assert_array_equal(whole[0], chunked[0])
    np.testing.assert_allclose(whole[1], chunked[1], rtol=1e-5)


def test_against_the_textbook(params):
    batch = packed(1, [30, 25, 20], 98)

    @jax.jit
    def textbook(params, batch):
        rope = jnp.asarray(rope_table(CONFIG, 98))
        attention = PackedAttention(batch.segment_ids, Numerics(row_invariant=False))
        hidden, _ = transformer.forward(
            params, CONFIG, batch.tokens, batch.positions, attention, rope, attention.numerics
        )
        logits = transformer.logits(params, CONFIG, hidden, attention.numerics)
        return jax.nn.log_softmax(transform_logits(logits, FILTERED, attention.numerics))

    whole = np.asarray(textbook(params, batch))
    expected = np.take_along_axis(whole, batch.targets[..., None], axis=2)[..., 0]
    scored = scorer(CONFIG, 98, 32, FILTERED)

    def kept(params, batch):  # as in the loss, what a filter excludes has no part in it
        logprobs, entropies = scored(params, batch)
        return jnp.sum(jnp.where(jnp.isfinite(logprobs), logprobs, 0.0)), (logprobs, entropies)

    gradients, (logprobs, entropies) = jax.jit(jax.grad(kept, has_aux=True))(params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    logprobs, mask = np.asarray(logprobs), batch.response_mask
    excluded = np.isneginf(logprobs[mask])
    assert excluded.any() and not excluded.all()
    np.testing.assert_array_equal(excluded, np.isneginf(expected[mask]))
    np.testing.assert_allclose(logprobs[mask], expected[mask], atol=2e-5)
    np.testing.assert_allclose(
        entropies, -np.sum(np.exp(whole) * np.where(np.isfinite(whole), whole, 0.0), axis=-1), atol=2e-5
    )


def test_logits_never_exist_whole():
    """All that a pass takes forward and backward, attention's part and the chunk's own, is less than they."""
    config = ModelConfig("qwen3", 8192, 16, 1, 2, 1, 16, 16, tie_embeddings=True, max_positions=512)
    shapes = jax.eval_shape(lambda: transformer.init_params(config, 0))
    batch = packed(0, [512, 512], 512)

    def temporary_bytes(chunk):
        loss = lambda params, batch: jnp.sum(scorer(config, 512, chunk)(params, batch)[0])  # noqa: E731
        return compiled(jax.grad(loss), shapes, batch).memory_analysis().temp_size_in_bytes

    logits_bytes = 2 * 512 * config.vocab_size * 4
    assert temporary_bytes(WHOLE) > 2 * logits_bytes
    assert temporary_bytes(64) < 0.5 * logits_bytes


ON_CPU = jax.default_backend() == "cpu"


@pytest.mark.long  # test_loop.py has whole runs, plain and filtered
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(), marks=pytest.mark.accelerator(needed=False)),
        pytest.param(FILTERED, marks=pytest.mark.skipif(not ON_CPU, reason="what is filtered may differ")),
    ],
    ids=["plain", "filtered"],
)
def test_decoded_tokens_score_as_they_were_sampled(sampling):
    config = ModelConfig("qwen3", 64, 192, 2, 6, 2, 64, 512, tie_embeddings=True, qk_norm=True)
    params = scaled_params(config, 2.0, 2.0, seed=1)
    engine = DecodeEngine(config, Numerics(), sampling, Buckets((8,), (128,)), [0], pool=stored_pool())
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, config.vocab_size, length).tolist() for length in (5, 9, 3)]
    assignments = [Assignment(i, i, request_key(0, i), 60 - 10 * i) for i in range(3)]
    state = engine.bulk_insert(engine.prefill(params, prompts), engine.init_state(8, 128), assignments)
    state, result = engine.generate(params, state)
    sequences = []
    for i, prompt in enumerate(prompts):
        length = int(result.lengths[i]) - (len(prompt) - 1)
        assert length > 1
        tokens, logprobs = result.tokens[i, :length], result.logprobs[i, :length]
        sequences.append(TrainingSequence(prompt, tokens, logprobs, 0.0, 1.0))
    packing = pack_sequences([sequence.length for sequence in sequences], 128)
    batch = build_batch(sequences, packing, range(packing.num_rows))
    logprobs, _ = score(params, batch, 48, sampling, config)
    mask = batch.response_mask
    np.testing.assert_allclose(
        logprobs[mask], batch.rollout_logprobs[mask], rtol=0, atol=0 if ON_CPU else 1e-3
    )
