"""A block head: its proposals against NumPy, its tokens against plain decoding, what it learns and keeps.

`test_drafting.py` holds it, like every head, to what training unrolls.
"""

import jax
import numpy as np
import pytest

from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig
from drafters.eagle.saving import AsyncHeadSaver
from drafters.registry import make_drafter, states_read
from rljax.errors import ConfigError
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel, request_key
from rljax.speculation.speculator import Speculator
from tests.drafters.eagle.published import layer_outputs, norm, silu
from tests.drafters.eagle.tiny import POLICY, begun, chain, noisy, policy_states, rollouts, shared
from tests.exactness import exact_numerics
from tests.speculation.speculators import FEW
from tests.tiny_policy import (
    CONFIG,
    HEAD,
    SLOTS,
    CheapTimes,
    assert_same,
    make_engine,
    make_params,
    make_requests,
    outcomes,
)

SHAPE = BlockShape(size=3, depth=2, width=24)
VOCABULARY = DraftVocabulary(np.arange(1, 45)[::-1])
BLOCK = HeadConfig("block", POLICY, vocabulary=VOCABULARY, block=SHAPE)
ARGUMENTS = HEAD | {"block_size": 4, "block_depth": 1}
jitted_gumbel = jax.jit(gumbel)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def proposed(params, states, tokens, last, key, depth, temperature):
    """Tokens that a chain proposes behind `last`, and their log-probabilities, one position at a time.

    Args:
      states: [n, 4, d] of the tokens [n] before `last`.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    embed, n = np.asarray(shared()["embed"], np.float64), len(tokens)
    behind = [*tokens[1:], last]
    a = np.concatenate([embed[behind], states[:, :3].reshape(n, -1)], axis=1) @ params["fc"].T
    context = norm(a, params["context_norm"], POLICY)
    rows = a[-1] + params["place"][:depth]
    for number in range(SHAPE.depth):
        layer = params["layers"][str(number)]
        h = norm(rows, layer["attention_norm"], POLICY)
        rows = layer_outputs(rows, h, np.concatenate([context, h]), layer, POLICY, causal=True)
    state, found, total = np.zeros(SHAPE.width), [], 0.0
    for i in range(depth):
        x = norm(rows[i], params["norm"], POLICY)
        mixed = params["mix"] @ np.concatenate([x, state])
        logits = params["lm_head"] @ x + params["out"] @ silu(mixed)
        noise = jitted_gumbel(key, np.int32(n + i + 1), VOCABULARY.tokens.astype(np.uint32))
        logits = logits / temperature + np.asarray(noise, np.float64)
        best = int(np.argmax(logits))
        total += logits[best] - np.logaddexp.reduce(logits)
        found.append((int(VOCABULARY.tokens[best]), total))
        given, own = params["state_in"] @ embed[found[-1][0]], params["state"] @ state
        (r, z, new), (r2, z2, new2) = np.split(given, 3), np.split(own, 3)
        z = sigmoid(z + z2)
        state = z * state + (1 - z) * np.tanh(new + sigmoid(r + r2) * new2)
    return found


def test_a_block_proposes_what_plain_numpy_does():
    """Under the noise, at a temperature, behind contexts of two lengths; a shorter draft is its beginning."""
    config, params = noisy(BLOCK)
    tokens, lengths = rollouts(2, 24, 11), (17, 9)
    states = np.stack(policy_states(config, tokens))
    keys = np.stack([request_key(1, 2), request_key(1, 3)])
    state = begun(config, params, tokens, states, lengths)
    for depth in (3, 2):
        drafted = chain(config, params, state, lengths, depth, SamplingParams(temperature=0.7), keys)
        for slot, n in enumerate(lengths):
            given = (states[slot, :n].astype(np.float64), tokens[slot, :n], tokens[slot, n])
            expected = proposed(params, *given, keys[slot], depth, 0.7)
            np.testing.assert_array_equal(drafted.tree.tokens[slot], [token for token, _ in expected])
            scores = [score for _, score in expected]
            np.testing.assert_allclose(drafted.log_probability[slot], scores, atol=2e-3)


def speculator_of(name, arguments, numerics=None):
    drafters = {name: make_drafter(name, **arguments)}
    engine = make_engine(numerics=numerics, buckets=FEW, hidden_layers=states_read(drafters, CONFIG))
    return Speculator(engine, drafters, SLOTS, times=CheapTimes())


def decode_and_learn(speculator, params, requests, expected):
    """Two rollouts with the expected responses, the head's training behind each; returns what they count."""
    (head,) = speculator.drafters.values()
    head._budget.allows, counted = lambda: True, []  # however slow this machine is
    for _ in range(2):
        completions, statistics = Scheduler(speculator.engine, SLOTS, None, speculator).run(params, requests)
        assert_same(completions, expected)
        assert statistics.drafted > 0
        speculator.learn(outcomes(requests, completions))
        counted.append(statistics)
    return counted


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_tokens_are_those_of_plain_decoding(dtype, tmp_path):
    """Before and after it has learned; and as another run loads it from where it was saved."""
    numerics, params = exact_numerics(CONFIG, dtype, FEW), make_params()
    requests = make_requests((3, 20, 8), (40, 30, 50))
    plain = make_engine(numerics=numerics, buckets=FEW)
    expected = Scheduler(plain, SLOTS).run(params, requests)[0]
    saved = {"save_dir": str(tmp_path / "head"), "draft_vocabulary": 48}
    speculator = speculator_of("block", ARGUMENTS | saved, numerics)
    head = speculator.drafters["block"]
    counted = decode_and_learn(speculator, params, requests, expected)
    assert all(statistics.accepted > 0 for statistics in counted)
    assert head.trainer.updates == 4
    head._saver.wait()
    from_there = {"path": str(tmp_path / "head"), "train": False}
    loaded = speculator_of("block", ARGUMENTS | from_there, numerics)
    completions, statistics = Scheduler(loaded.engine, SLOTS, None, loaded).run(params, requests)
    assert_same(completions, expected)
    assert statistics.accepted > 0 and loaded.drafters["block"].config == head.config
    jax.tree.map(np.testing.assert_array_equal, head.trainer.params, loaded.drafters["block"].trainer.params)


def test_a_saved_head_is_refused_where_it_does_not_fit(tmp_path):
    config, params = noisy(BLOCK)
    saver = AsyncHeadSaver(tmp_path)
    saver.save(3, params, config)
    saver.wait()
    for name, message in (
        ("eagle", "is no head of variant eagle3"),
        ("block", "depths: 6 is more than the 3 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_drafter(name, path=str(tmp_path)).reads(POLICY, None)


def test_a_draft_vocabulary_has_the_ends_of_responses():
    counts = np.zeros(48, np.int64)
    counts[[40, 7, 9]] = 5, 3, 3
    assert DraftVocabulary.most_frequent(counts, 5, (31,)).tokens.tolist() == [0, 7, 9, 31, 40]
    drafter = make_drafter("block", **ARGUMENTS, draft_vocabulary=12)
    drafter.reads(CONFIG, None)
    assert drafter.config.vocabulary.tokens.tolist() == list(range(12))
    with pytest.raises(ConfigError, match="draft_vocabulary: 65 is more than the 64 tokens"):
        make_drafter("block", **ARGUMENTS, draft_vocabulary=65).reads(CONFIG, None)
    with pytest.raises(ConfigError, match=r"draft_vocabulary: .*eagle drafts from the policy's whole"):
        make_drafter("eagle", variant="eagle", draft_vocabulary=12).reads(CONFIG, None)
