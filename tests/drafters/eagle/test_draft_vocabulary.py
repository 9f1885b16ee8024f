"""EAGLE-3 checkpoints with a draft vocabulary: loaded, drafted with, written again.

`test_coupled.py` goes on training one.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from drafters.eagle.checkpoint import load_head, save_head
from drafters.eagle.drafting import DraftStrategy
from drafters.eagle.model import DraftVocabulary, HeadConfig, head_logits, init_head
from drafters.eagle.objective import HeadTraining
from drafters.eagle.training import head_loss
from drafters.eagle.unrolling import unroll
from rljax.errors import CheckpointError
from rljax.models import transformer
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel, request_key
from tests.drafters.eagle.published import greedy_chain, write_eagle3
from tests.drafters.eagle.tiny import (
    NUMERICS,
    POLICY,
    begun,
    chain,
    jitted_draft,
    packed_batch,
    policy_params,
    policy_states,
    rollouts,
    shared,
    with_policy,
)

TOKENS = np.flatnonzero(np.arange(POLICY.vocab_size) % 3 != 1)  # 32 of 48
LAYOUTS = ("sglang", "vllm")
COUNTS = (12, 9)
jitted_loss = jax.jit(head_loss, static_argnames="training")


@functools.partial(jax.jit, static_argnames="config")
def opinions(params, config, batch):
    """Log-probabilities of the head and probabilities of the policy, at every position."""
    (outputs,) = unroll(with_policy(config, params), batch, 1)
    q = jax.nn.log_softmax(head_logits(with_policy(config, params), outputs))
    return q, jax.nn.softmax(transformer.logits(shared(), POLICY, batch.states[:, :, -1], NUMERICS))


def sequences(config):
    """Tokens and states of two rollouts."""
    tokens = rollouts(2, 32, 11)
    return tokens, np.stack(policy_states(config, tokens))


@pytest.mark.parametrize(("layout", "layers"), [("sglang", None), ("vllm", (1, 2, 4))])
def test_a_published_head_drafts_as_plain_numpy_does(layout, layers, tmp_path):
    tensors = write_eagle3(tmp_path / "head", POLICY, TOKENS, layout, layers)
    config, params = load_head(tmp_path / "head", POLICY)
    assert config == HeadConfig("eagle3", POLICY, layers or (), DraftVocabulary(TOKENS))
    tokens, states = sequences(config)
    drafted = chain(config, params, begun(config, params, tokens, states, COUNTS), COUNTS, 4)
    embed = np.asarray(policy_params()["embed"])
    for slot, n in enumerate(COUNTS):
        given = (states[slot, :n, :3], tokens[slot, 1 : n + 1])
        expected = greedy_chain(tensors, POLICY, embed, *given, 4)
        assert drafted.tree.tokens[slot].tolist() == expected
        assert set(expected) <= set(TOKENS.tolist())


def test_drafts_are_ranked_under_the_noise_of_the_policys_tokens(tmp_path):
    write_eagle3(tmp_path / "head", POLICY, TOKENS)
    config, params = load_head(tmp_path / "head", POLICY)
    state = begun(config, params, *sequences(config), COUNTS)
    keys, positions = np.stack([request_key(1, 2), request_key(1, 3)]), np.asarray(COUNTS, np.int32)
    head = with_policy(config, params)
    drafted = jitted_draft(head, state, positions, keys, DraftStrategy(1, 4, 4), SamplingParams())
    logits = head_logits(head, state.outputs)
    noise = gumbel(keys, positions + 1, jnp.arange(POLICY.vocab_size, dtype=jnp.uint32)[None])
    best = np.argsort(-np.asarray(logits + noise[:, TOKENS]))[:, :4]
    assert drafted.tree.tokens.tolist() == TOKENS[best].tolist()


def test_the_loss_is_over_the_draft_vocabulary():
    config = HeadConfig("eagle3", POLICY, vocabulary=DraftVocabulary(TOKENS))
    params = init_head(config, policy_params(), 0)
    batch = packed_batch(config, rollouts(4, 24), [[0, 1], [2, 3]], 50)
    _, metrics = jitted_loss(with_policy(config, params), HeadTraining(), batch)
    q, p = map(np.asarray, opinions(params, config, batch))
    segments, responses = np.asarray(batch.segment_ids), np.asarray(batch.response_mask)
    loss, acceptance, agreement, outside = [], [], [], 0
    for row, start in np.argwhere(segments > 0):
        after = min(start + 1, 49)
        if after == start or segments[row, after] != segments[row, start] or not responses[row, after]:
            continue
        p_all, drafts = p[row, after], q[row, start]
        acceptance.append(np.minimum(p_all[TOKENS], np.exp(drafts)).sum())
        agreement.append(p_all.argmax() == TOKENS[drafts.argmax()])
        if p_all.argmax() not in TOKENS:
            outside += 1
            continue
        loss.append(-(p_all[TOKENS] / p_all[TOKENS].sum() * drafts).sum())
    assert 0 < outside < len(acceptance) and metrics["outside_vocabulary"] == outside
    assert metrics["starts"] == len(acceptance)
    np.testing.assert_allclose(metrics["loss/1"], np.mean(loss), rtol=1e-5)
    np.testing.assert_allclose(metrics["acceptance/1"], np.mean(acceptance), rtol=1e-5)
    np.testing.assert_allclose(metrics["agreement/1"], np.mean(agreement), rtol=1e-5)


@pytest.mark.parametrize("engine", LAYOUTS)
def test_round_trip(engine, tmp_path):
    tensors = write_eagle3(tmp_path / "published", POLICY, TOKENS, layers=(1, 2, 3))
    config, params = load_head(tmp_path / "published", POLICY)
    save_head(tmp_path / "written", config, params, "float32", engine)
    written = safetensors.numpy.load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written[name], array)
        assert written[name].dtype == array.dtype
    content = json.loads((tmp_path / "written" / "config.json").read_text())
    assert content["draft_vocab_size"] == len(TOKENS) and content["vocab_size"] == POLICY.vocab_size
    again, loaded = load_head(tmp_path / "written", POLICY)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(d2t=t["d2t"] + 100), "d2t leads to token 147, but the policy has 48"),
        (lambda t: t.update(d2t=-np.arange(32)), "d2t: tokens: expected .* each once"),
        (lambda t: t.update(d2t=t["d2t"][:5]), r"d2t is \[5\], but draft_vocab_size is 32"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d marks other tokens than d2t"),
        (lambda t: t.pop("d2t"), r"d2t \[32\] is missing"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight \[32, 32\] is missing"),
    ],
)
def test_damaged_vocabularies_are_refused(change, message, tmp_path):
    write_eagle3(tmp_path / "head", POLICY, TOKENS)
    file = tmp_path / "head" / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(file))
    change(tensors)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "head", POLICY)
