"""Training: masks, what is differentiated, what is learned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drafters.eagle import unrolling as unrolling_module
from drafters.eagle.model import HeadConfig, head_logits, head_shapes, init_head
from drafters.eagle.objective import VARIANTS, HeadTraining, published_training
from drafters.eagle.spot_trainer import head_optimizer
from drafters.eagle.training import head_loss, init_state, jitted_train_step
from drafters.eagle.unrolling import unroll
from rljax.models import transformer
from tests.drafters.eagle.tiny import (
    NUMERICS,
    POLICY,
    packed_batch,
    policy_params,
    rollouts,
    shared,
    with_policy,
)

ROWS = [[2 * r, 2 * r + 1] for r in range(4)]
TRAINING = dataclasses.replace(published_training("eagle3"), steps=2, reverse_kl_weight=0.5, lk_weight=0.5)


def optimizer(rate=3e-3):
    return head_optimizer(rate, clip_norm=1.0)


def head_of(variant, seed=0):
    config = HeadConfig(variant, POLICY)
    return config, init_head(config, policy_params(), seed)


@functools.cache
def loss_of(config, training):
    """(params, batch) -> (loss, metrics), compiled."""
    return jax.jit(lambda params, batch: head_loss(with_policy(config, params), training, batch))


@functools.cache
def gradient_of(config, training):
    """(params, batch, shared weights) -> gradients of the first and the last, compiled."""

    def loss(params, batch, shared):
        return head_loss(with_policy(config, params).replace(shared=shared), training, batch)[0]

    return jax.jit(jax.grad(loss, argnums=(0, 2)))


@functools.cache
def unrolled(config, steps):
    """(params, batch) -> outputs, compiled."""
    return jax.jit(lambda params, batch: unroll(with_policy(config, params), batch, steps))


def sequences():
    return [row[:n] for row, n in zip(rollouts(6, 40), (40, 33, 21, 40, 12, 5), strict=True)]


def test_an_untrained_head_answers_one_token_late():
    """The hidden state goes through: step 0 at s is near the policy's own state at s."""
    config, params = head_of("eagle")
    batch = packed_batch(config, sequences(), [[0, 2]], 64)
    (output,) = unrolled(config, 1)(params, batch)
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
    run = functools.partial(unrolled(config, 2), params)
    for before, after in zip(run(batch), run(other), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[mine], np.asarray(after)[mine])
        assert not np.array_equal(np.asarray(before)[poisoned], np.asarray(after)[poisoned])
    gradients = [gradient_of(config, TRAINING)(params, b, shared())[0] for b in (batch, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *gradients)


@pytest.mark.parametrize("variant", ["eagle3", "block"])
def test_where_a_sequence_lies_does_not_matter(variant):
    config, params = head_of(variant)
    alone, packed = (packed_batch(config, sequences(), [row, [1]], 64) for row in ([2], [4, 2, 5]))
    first = len(sequences()[4])
    for a, b in zip(*(unrolled(config, 2)(params, each) for each in (alone, packed)), strict=True):
        n = len(sequences()[2]) - 2
        np.testing.assert_allclose(a[0, :n], b[0, first : first + n], atol=2e-4)


def test_the_head_does_not_see_what_it_should_predict():
    """Step j at s knows tokens up to s + j + 1 and states up to s."""
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0], [1]], 64)
    s = 10
    run = functools.partial(unrolled(config, 2), params)
    reference = run(batch)
    later_states = batch.states.at[:, s + 1 :].add(3.0)
    for j in range(2):
        later_tokens = batch.tokens.at[:, s + j + 2 :].set(0)
        changed = run(dataclasses.replace(batch, tokens=later_tokens, states=later_states))
        np.testing.assert_array_equal(reference[j][:, s], changed[j][:, s])
        known = batch.tokens.at[:, s + j + 1].add(1)
        changed = run(dataclasses.replace(batch, tokens=known % 48))
        assert not np.array_equal(reference[j][:, s], changed[j][:, s])


@functools.partial(jax.jit, static_argnames="config")
def _log_softmax(config, params, states, outputs):
    logits = [transformer.logits(shared(), POLICY, states, NUMERICS)]
    logits += [head_logits(with_policy(config, params), output) for output in outputs]
    return [jax.nn.log_softmax(each) for each in logits]


def log_probabilities(config, params, batch, outputs):
    """Of the policy at every position, and of the head at every start, one array a step."""
    found = _log_softmax(config, params, batch.states[:, :, -1], outputs)
    policys, *heads = (np.asarray(each, np.float64) for each in found)
    return policys, heads


def test_the_loss_by_a_plain_loop():
    """Masks, targets, chunks, decay and metrics against numpy, position by position."""
    config, params = head_of("hass")
    training = HeadTraining(
        steps=2, step_decay=0.5, hidden_weight=1.0, cross_entropy_weight=0.1, logit_chunk=37
    )
    members = [[0, 4], [1]]
    batch = packed_batch(config, sequences(), members, 64)
    value, metrics = loss_of(config, training)(params, batch)
    outputs = unrolled(config, 2)(params, batch)
    log_p, log_q = log_probabilities(config, params, batch, outputs)
    expected, lengths = 0.0, {}
    for j, output in enumerate(outputs):
        terms, agrees = [], []
        for r, row in enumerate(members):
            start = 0
            for member in row:
                n = len(sequences()[member])
                for s in range(n - j - 1):
                    target = s + j + 1  # the policy there predicts token target + 1
                    if not 2 <= target + 1 < n:
                        continue
                    out, hidden = output[r, start + s], batch.states[r, start + target, -1]
                    p, q = log_p[r, start + target], log_q[j][r, start + s]
                    x = np.abs(np.asarray(out - hidden, np.float64))
                    l1 = np.where(x < 1, 0.5 * x * x, x - 0.5).mean()
                    terms.append(l1 - 0.1 * (np.exp(p) * q).sum())
                    agrees.append(p.argmax() == q.argmax())
                    lengths.setdefault((r, start + s), []).append(np.minimum(np.exp(p), np.exp(q)).sum())
                start += n
        expected += 0.5**j * np.mean(terms)
        np.testing.assert_allclose(metrics[f"agreement/{j + 1}"], np.mean(agrees), rtol=1e-5)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    accept = np.mean([1 + np.cumprod(each).sum() for each in lengths.values()])
    np.testing.assert_allclose(metrics["accept_length"], accept, rtol=1e-4)
    assert metrics["starts"] == len(lengths)


def test_a_step_is_the_gradient_of_the_whole_head_and_of_nothing_else():
    """No gradient reaches the shared weights, and with plain SGD the update is the gradient."""
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0, 2], [1]], 64)
    own, policys = gradient_of(config, TRAINING)(params, batch, shared())
    assert all(np.any(leaf) for leaf in jax.tree.leaves(own))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(policys))
    before, tx = jax.tree.map(np.array, policy_params()), optax.sgd(1.0)
    expected = jax.tree.map(lambda p, g: np.asarray(p - g), params, own)
    state, metrics = jitted_train_step(init_state(params, tx), batch, with_policy(config, None), TRAINING, tx)
    jax.tree.map(np.testing.assert_array_equal, before, policy_params())
    assert np.isfinite(metrics["loss"]) and int(state.updates) == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, expected)


def train(config, params, training, updates):
    """The state after some updates on four batches of rollouts in turn, and the metrics of the last."""
    tx = optimizer(1e-2)
    state = init_state(params, tx)
    batches = [packed_batch(config, rollouts(8, 48, seed), ROWS, 96) for seed in range(4)]
    for update in range(updates):
        batch = batches[update % 4]
        state, metrics = jitted_train_step(state, batch, with_policy(config, None), training, tx)
    return state, metrics


@pytest.mark.parametrize("variant", ["eagle3", pytest.param("hass", marks=pytest.mark.long)])
def test_a_head_learns_its_policy(variant):
    """On rollouts it has not seen: the next token, and as many behind it as it was trained for."""
    config, params = head_of(variant)
    training = dataclasses.replace(published_training(variant), steps=2)
    state, _ = train(config, params, training, 80)
    held_out = packed_batch(config, rollouts(8, 48, 99), ROWS, 96)
    after = loss_of(config, training)(state.params, held_out)[1]
    before = loss_of(config, training)(params, held_out)[1]
    for step in (1, 2):
        assert after[f"agreement/{step}"] > before[f"agreement/{step}"] + 0.15
    assert after["accept_length"] > before["accept_length"] + 0.15


def test_blocks_of_queries_change_nothing(monkeypatch):
    config, params = head_of("hass")
    batch = packed_batch(config, sequences(), [[0, 2], [1]], 64)
    whole = unrolled(config, 2)(params, batch)[1]
    monkeypatch.setattr(unrolling_module, "_QUERY_BLOCK", 24)  # the last one is shorter
    in_blocks = unrolled.__wrapped__(config, 2)(params, batch)[1]
    np.testing.assert_allclose(whole, in_blocks, atol=2e-5)


def test_init_has_the_documented_shapes_and_eagle3_no_hidden_loss():
    for variant in VARIANTS:
        config, params = head_of(variant)
        assert jax.tree.map(jnp.shape, params) == head_shapes(config)
        assert config.states == (4 if config.fused else 1)
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0]], 64)
    with pytest.raises(ValueError, match="hidden_weight"):
        head_loss(with_policy(config, params), HeadTraining(hidden_weight=1.0), batch)
