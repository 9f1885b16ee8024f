"""Penalties: what the response has counts, however it was decoded, and again in the training pass."""

import jax
import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.engine.host_sync import Assignment
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.speculator import Speculator
from rljax.training.scoring import score_packed
from tests.tiny_policy import CONFIG, SLOTS, FixedTimes, assert_same, make_engine, outcomes

BUCKETS = Buckets((2, 4), (128,), (16,), 7)
SAMPLING = SamplingParams(
    temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2
)


@pytest.fixture(scope="module")
def engine():
    return make_engine(SAMPLING, BUCKETS)


@pytest.fixture(scope="module")
def decoded(engine, params, requests):
    return Scheduler(engine, SLOTS).run(params, requests)[0]


def repeats(completions):
    """Share of tokens that their response had before."""
    tokens = [completion.response_ids for completion in completions]
    return 1 - sum(len(set(each.tolist())) for each in tokens) / sum(map(len, tokens))


def test_tokens_repeat_less(decoded, expected):
    """Also than without penalties at a higher temperature."""
    assert repeats(decoded) < 0.7 * repeats(expected)


def test_the_training_pass_has_the_logprobs_of_decoding(params, requests, decoded):
    """It counts from the packed rows, decoding as it goes: the same bits, in one chunk and in many."""
    sequences = [
        TrainingSequence(request.prompt_ids, done.response_ids, done.logprobs, advantage=0.0, weight=0.0)
        for request, done in zip(requests, decoded, strict=True)
    ]
    packing = pack_sequences([sequence.length for sequence in sequences], 256)
    batch = build_batch(sequences, packing, range(packing.num_rows))
    for chunk in (4096, 64):
        static = {"numerics": Numerics(), "sampling": SAMPLING, "logprob_chunk": chunk}
        run = jax.jit(lambda *args, static=static: score_packed(args[0], CONFIG, *args[1:], **static))
        logprobs, _ = run(params, batch, rope_table(CONFIG, 256))
        mask = np.asarray(batch.response_mask)
        np.testing.assert_array_equal(np.asarray(logprobs)[mask], np.asarray(batch.rollout_logprobs)[mask])


def test_drafts_change_no_token(engine, params, requests, decoded):
    """What stands above a node in its tree counts: trees of SRT, told what came out the first time."""
    drafter, times = make_drafter("srt"), FixedTimes({0: 1.0, 16: 1.0})
    speculator = Speculator(engine, {"srt": drafter}, SLOTS, times=times)
    for _ in range(2):
        completions, statistics = Scheduler(engine, SLOTS, None, speculator).run(params, requests)
        assert_same(completions, decoded)
        speculator.learn(outcomes(requests, completions))
    assert statistics.accepted > 200


def test_the_policy_drafts_for_itself_under_its_penalties(engine, params, requests, decoded):
    """With its own weights every draft is right: it counts what it drafts."""
    request = requests[0]
    prefix = engine.prefill(params, [request.prompt_ids])
    assignment = Assignment(0, 0, request.noise_key, request.max_response)
    state = engine.bulk_insert(prefix, engine.init_state(SLOTS, 128), [assignment])
    state, drafts = engine.draft(params, state, 7)
    np.testing.assert_array_equal(np.asarray(drafts.tokens)[0], decoded[0].response_ids[:7])
