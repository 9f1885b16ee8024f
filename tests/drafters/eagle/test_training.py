"""Training: masks, losses, what is differentiated. That heads learn is in `test_spot_trainer.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drafters.eagle import unrolling as unrolling_module
from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig, head_logits, head_shapes, init_head
from drafters.eagle.objective import VARIANTS, HeadTraining, published_training
from drafters.eagle.training import head_loss, init_state, jitted_train_step
from drafters.eagle.unrolling import unroll
from rljax.models import transformer
from rljax.sampling.distribution import SamplingParams, transform_logits
from tests.drafters.eagle.test_coupled import chances
from tests.drafters.eagle.tiny import (
    NUMERICS,
    POLICY,
    packed_batch,
    policy_params,
    rollouts,
    shared,
    with_policy,
)

TRAINING = dataclasses.replace(
    published_training("eagle3"), steps=2, reverse_kl_weight=0.5, lk_weight=0.5, sampled_weight=1.0
)


def head_of(variant, seed=0):
    config = HeadConfig(variant, POLICY)
    return config, init_head(config, policy_params(), seed)


@functools.cache
def loss_of(config, training):
    """(params, batch) -> (loss, metrics), compiled."""
    return jax.jit(lambda params, batch: head_loss(with_policy(config, params), training, batch))


@functools.cache
def gradient_of(config, training):
    """(params, batch) -> ((loss, metrics), gradient), compiled."""

    def loss(params, batch):
        return head_loss(with_policy(config, params), training, batch)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def _unrolled(config, steps):
    return jax.jit(lambda params, batch: unroll(with_policy(config, params), batch, steps))


def unrolled(config, params, batch, steps=2):
    """The outputs of the head, whose own LM head has no part in them."""
    own = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    return _unrolled(dataclasses.replace(config, vocabulary=None), steps)(own, batch)


def sequences():
    return [row[:n] for row, n in zip(rollouts(6, 40), (40, 33, 21, 40, 12, 5), strict=True)]


def test_an_untrained_head_answers_one_token_late():
    """The hidden state goes through: step 0 at s is near the policy's own state at s."""
    config, params = head_of("eagle")
    batch = packed_batch(config, sequences(), [[0, 2]], 64)
    (output,) = unrolled(config, params, batch, 1)
    inside = np.asarray(batch.segment_ids > 0)
    here, later = (
        np.abs(np.asarray(output - jnp.roll(batch.states[:, :, 0], -shift, axis=1)))[inside].mean()
        for shift in (0, 1)
    )
    assert here < 0.7 * later


def test_segments_do_not_see_each_other():
    """Poison one segment, tokens and states; outputs and gradients of the others stay the same bits."""
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0, 2], [1, 4, 5]], 64)
    poisoned = np.asarray(batch.segment_ids) == np.asarray([[1], [2]])  # sequences 0 and 4
    other = dataclasses.replace(
        batch,
        tokens=jnp.where(poisoned, (batch.tokens + 7) % 48, batch.tokens),
        states=jnp.where(poisoned[:, :, None, None], 1e4, batch.states),
        response_mask=batch.response_mask & ~poisoned,
    )
    batch = dataclasses.replace(batch, response_mask=batch.response_mask & ~poisoned)
    mine = ~poisoned & np.asarray(batch.segment_ids > 0)
    run = functools.partial(unrolled, config, params)
    for before, after in zip(run(batch), run(other), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[mine], np.asarray(after)[mine])
        assert not np.array_equal(np.asarray(before)[poisoned], np.asarray(after)[poisoned])
    gradients = [gradient_of(config, TRAINING)(params, each)[1] for each in (batch, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *gradients)


@pytest.mark.parametrize("variant", ["eagle3", "block"])
def test_where_a_sequence_lies_does_not_matter(variant):
    config, params = head_of(variant)
    alone, packed = (packed_batch(config, sequences(), [row, [1]], 64) for row in ([2], [4, 2, 5]))
    first = len(sequences()[4])
    for a, b in zip(*(unrolled(config, params, each) for each in (alone, packed)), strict=True):
        n = len(sequences()[2]) - 2
        np.testing.assert_allclose(a[0, :n], b[0, first : first + n], atol=2e-4)


def test_the_head_does_not_see_what_it_should_predict():
    """Step j at s knows tokens up to s + j + 1 and states up to s."""
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0], [1]], 64)
    s = 10
    run = functools.partial(unrolled, config, params)
    reference = run(batch)
    later_states = batch.states.at[:, s + 1 :].add(3.0)
    for j in range(2):
        later_tokens = batch.tokens.at[:, s + j + 2 :].set(0)
        changed = run(dataclasses.replace(batch, tokens=later_tokens, states=later_states))
        np.testing.assert_array_equal(reference[j][:, s], changed[j][:, s])
        known = batch.tokens.at[:, s + j + 1].add(1)
        changed = run(dataclasses.replace(batch, tokens=known % 48))
        assert not np.array_equal(reference[j][:, s], changed[j][:, s])


@functools.partial(jax.jit, static_argnames=("config", "sampling"))
def opinions(params, config, batch, outputs, sampling):
    """Log-probabilities of the policy [R, T, V] and of the head at every step [k, R, T, V'], of each at the
    temperature alone and with its filters.
    """
    policys = transformer.logits(shared(), POLICY, batch.states[:, :, -1], NUMERICS)
    heads = jnp.stack([head_logits(with_policy(config, params), output) for output in outputs])
    return [
        jax.nn.log_softmax(each)
        for logits in (policys, heads)
        for each in (logits / sampling.temperature, transform_logits(logits, sampling, NUMERICS))
    ]


@pytest.mark.parametrize("variant", ["hass", "eagle3"])
def test_the_loss_by_a_plain_loop(variant):
    """Masks, targets, chunks, decay and metrics against numpy, start by start: of hidden states and cross
    entropy; and for a head that drafts some tokens alone, of whole drafts under the noise, too, at a
    temperature and with filters. Targets outside of its vocabulary have no part in the cross entropy.
    """
    config, ids = HeadConfig("hass", POLICY), np.arange(POLICY.vocab_size)
    training = HeadTraining(
        steps=2, step_decay=0.5, hidden_weight=1.0, cross_entropy_weight=0.1, logit_chunk=37
    )
    if variant == "eagle3":
        ids, sampling = np.arange(3, 40)[::-1], SamplingParams(temperature=0.7, top_k=20)
        config = HeadConfig(variant, POLICY, vocabulary=DraftVocabulary(ids))
        others = {"hidden_weight": 0.0, "coupled_weight": 2.0, "sampled_weight": 3.0}
        training = dataclasses.replace(training, sampling=sampling, **others)
    params, members = init_head(config, policy_params(), 0), [[0, 4], [1]]
    batch = packed_batch(config, sequences(), members, 64)
    value, metrics = loss_of(config, training)(params, batch)
    outputs = unrolled(config, params, batch)
    found = opinions(params, config, batch, outputs, training.sampling or SamplingParams())
    p, sampled, log_q, log_offered = (np.asarray(each, np.float64) for each in found)

    terms, agrees, accepted, outside = ([], []), ([], []), ([], []), 0
    drafts = {"accepted": [], "coupled": [], "sampled": [], "offered": []}  # chances of whole ones
    for r, row in enumerate(members):
        end = 0
        for member in row:
            begin, end = end, end + len(sequences()[member])
            for s in range(begin, end - 2):
                chain = {name: [] for name in drafts}
                for j in range(min(2, end - 2 - s)):
                    at = s + j + 1  # the policy there predicts the next token
                    token, likeliest = int(batch.tokens[r, at + 1]), p[r, at].argmax()
                    q, offered = log_q[j, r, s], np.exp(log_offered[j, r, s])
                    agrees[j].append(likeliest == ids[q.argmax()])
                    accepted[j].append(np.minimum(np.exp(sampled[r, at, ids]), offered).sum())
                    chain["accepted"].append(accepted[j][-1])
                    here = np.exp(sampled[r, at, token])
                    for name, each in ("sampled", q), ("offered", log_offered[j, r, s]):
                        whole = np.full(POLICY.vocab_size, -np.inf)
                        whole[ids] = each
                        both = chances(sampled[r, at], whole)
                        chain[name].append(both[token] / here if here else 0.0)
                        if name == "sampled":
                            chain["coupled"].append(both.sum())
                    if likeliest not in ids:
                        outside += j == 0
                        continue
                    target = np.exp(p[r, at, ids])
                    terms[j].append(-0.1 * (target / target.sum() * q).sum())
                    if not config.fused:
                        x = np.abs(np.asarray(outputs[j][r, s] - batch.states[r, at, -1], np.float64))
                        terms[j][-1] += np.where(x < 1, 0.5 * x * x, x - 0.5).mean()
                for name, each in chain.items():
                    drafts[name].append(np.pad(np.cumprod(each), (0, 2 - len(each))))

    lengths = {name: np.sum(each, axis=1) for name, each in drafts.items()}
    logs = {name: np.log(np.where(each > 0, each, 1.0)).mean() for name, each in lengths.items()}
    expected = sum(0.5**j * np.mean(each) for j, each in enumerate(terms))
    expected -= training.coupled_weight * logs["coupled"] + training.sampled_weight * logs["sampled"]
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert metrics["starts"] == len(drafts["offered"])
    np.testing.assert_allclose(metrics["accept_length"], 1 + lengths["accepted"].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["coupled_length"], 1 + lengths["offered"].mean(), rtol=2e-4)
    for j in range(2):
        np.testing.assert_allclose(metrics[f"loss/{j + 1}"], np.mean(terms[j]), rtol=1e-4)
        np.testing.assert_allclose(metrics[f"agreement/{j + 1}"], np.mean(agrees[j]), rtol=1e-5)
        np.testing.assert_allclose(metrics[f"acceptance/{j + 1}"], np.mean(accepted[j]), rtol=1e-5)
        expected = np.mean([each[j] for each in drafts["offered"]])
        np.testing.assert_allclose(metrics[f"coupled/{j + 1}"], expected, rtol=2e-4)
    if variant == "eagle3":
        assert 0 < outside == metrics["outside_vocabulary"] < len(drafts["offered"])


def test_a_step_is_the_gradient_of_the_whole_head_and_of_nothing_else():
    """With plain SGD the update is the gradient, also where chunks without a response are skipped; none
    reaches the shared weights.
    """
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0, 2], [1]], 64)
    late = batch.response_mask & (jnp.arange(64)[None] >= 20)
    batch = dataclasses.replace(batch, response_mask=late)
    (_, expected), own = gradient_of(config, TRAINING)(params, batch)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(own))
    before, tx = jax.tree.map(np.array, policy_params()), optax.sgd(1.0)
    changed = jax.tree.map(lambda p, g: np.asarray(p - g), params, own)
    chunked = dataclasses.replace(TRAINING, logit_chunk=16)
    state, metrics = jitted_train_step(init_state(params, tx), batch, with_policy(config, None), chunked, tx)
    jax.tree.map(np.testing.assert_array_equal, before, policy_params())
    assert np.isfinite(metrics["loss"]) and int(state.updates) == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, changed)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-4, err_msg=name)

    @jax.jit
    @jax.grad
    def of_shared(shared):
        return head_loss(with_policy(config, params).replace(shared=shared), TRAINING, batch)[0]

    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_shared(shared())))


def test_blocks_of_queries_change_nothing(monkeypatch):
    config, params = head_of("hass")
    batch = packed_batch(config, sequences(), [[0, 2], [1]], 64)
    whole = unrolled(config, params, batch)[1]
    monkeypatch.setattr(unrolling_module, "_QUERY_BLOCK", 24)  # the last one is shorter
    in_blocks = _unrolled.__wrapped__(config, 2)(params, batch)[1]
    np.testing.assert_allclose(whole, in_blocks, atol=2e-5)


def test_heads_have_the_documented_shapes_and_eagle3_no_hidden_loss():
    block = BlockShape(size=3, depth=2, width=24)
    with_vocabulary = HeadConfig("block", POLICY, vocabulary=DraftVocabulary(np.arange(1, 45)), block=block)
    assert with_vocabulary.layer.num_layers == 2
    for config in (*(HeadConfig(variant, POLICY) for variant in VARIANTS), with_vocabulary):
        assert jax.tree.map(jnp.shape, init_head(config, policy_params(), 0)) == head_shapes(config)
        assert config.states == (4 if config.fused else 1)
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0]], 64)
    with pytest.raises(ValueError, match="hidden_weight"):
        head_loss(with_policy(config, params), HeadTraining(hidden_weight=1.0), batch)
    for name in ("size", "depth", "width"):
        with pytest.raises(ValueError, match=f"{name}: should be at least 1"):
            BlockShape(**{name: 0})
    with pytest.raises(ValueError, match="block: eagle3 drafts token by token"):
        HeadConfig("eagle3", POLICY, block=block)
