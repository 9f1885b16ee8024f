"""Training: masks, what is differentiated, what is learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drafters.eagle.model import VARIANTS, HeadConfig, head_logits, head_shapes, init_head
from drafters.eagle.training import (
    HeadTraining,
    head_loss,
    init_state,
    jitted_train_step,
    published_training,
    unroll,
)
from rljax.models import transformer
from rljax.training.optimizer import make_optimizer
from tests.drafters.eagle.tiny import NUMERICS, POLICY, ROPE, packed_batch, policy_params, rollouts, shared

STEPS = 3


def optimizer(rate=3e-3):
    return make_optimizer(
        name="adamw",
        learning_rate=rate,
        schedule="constant",
        warmup_steps=0,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.0,
        clip_norm=1.0,
        total_updates=1000,
    )


def head_of(variant, seed=0):
    config = HeadConfig(variant, POLICY)
    return config, init_head(config, policy_params(), seed)


def sequences():
    return [row[:n] for row, n in zip(rollouts(6, 40), (40, 33, 21, 40, 12, 5), strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_init_has_the_documented_shapes(variant):
    config, params = head_of(variant)
    assert jax.tree.map(jnp.shape, params) == head_shapes(config)
    assert config.states == (4 if variant == "eagle3" else 1)


def test_an_untrained_head_answers_one_token_late():
    """The hidden state goes through: step 0 at s is near the policy's own state at s."""
    config, params = head_of("eagle")
    batch = packed_batch(config, sequences(), [[0, 2]], 64)
    (output,) = unroll(params, config, shared(), batch, ROPE, NUMERICS, 1)
    inside = np.asarray(batch.segment_ids > 0)
    here, later = (
        np.abs(np.asarray(output - jnp.roll(batch.states[:, :, 0], -shift, axis=1)))[inside].mean()
        for shift in (0, 1)
    )
    assert here < 0.7 * later


@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_do_not_see_each_other(variant):
    """Poison one segment, tokens and states; outputs and gradients of the others stay the same bits."""
    config, params = head_of(variant)
    batch = packed_batch(config, sequences(), [[0, 2], [1, 4, 5]], 64)
    poisoned = np.asarray((batch.segment_ids == 1) & (jnp.arange(2)[:, None] == 0))  # sequence 0
    poisoned = poisoned | np.asarray((batch.segment_ids == 2) & (jnp.arange(2)[:, None] == 1))  # sequence 4
    other = dataclasses.replace(
        batch,
        tokens=jnp.where(poisoned, (batch.tokens + 7) % 48, batch.tokens),
        states=jnp.where(poisoned[:, :, None, None], 1e4, batch.states),
        response_mask=batch.response_mask & ~poisoned,
    )
    batch = dataclasses.replace(batch, response_mask=batch.response_mask & ~poisoned)
    mine = ~poisoned & np.asarray(batch.segment_ids > 0)
    run = jax.jit(lambda batch: unroll(params, config, shared(), batch, ROPE, NUMERICS, STEPS))
    for before, after in zip(run(batch), run(other), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[mine], np.asarray(after)[mine])
        assert not np.array_equal(np.asarray(before)[poisoned], np.asarray(after)[poisoned])
    training = HeadTraining(steps=STEPS)
    gradient = jax.jit(jax.grad(lambda p, b: head_loss(p, config, training, shared(), b, ROPE, NUMERICS)[0]))
    for a, b in zip(*(jax.tree.leaves(gradient(params, each)) for each in (batch, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_a_sequence_lies_does_not_matter(variant):
    config, params = head_of(variant)
    alone = packed_batch(config, sequences(), [[2]], 64)
    packed = packed_batch(config, sequences(), [[4, 2, 5]], 64)
    first = len(sequences()[4])
    for a, b in zip(
        *(unroll(params, config, shared(), each, ROPE, NUMERICS, STEPS) for each in (alone, packed)),
        strict=True,
    ):
        n = len(sequences()[2]) - STEPS
        np.testing.assert_allclose(a[0, :n], b[0, first : first + n], atol=2e-4)


def test_the_head_does_not_see_what_it_should_predict():
    """Step j at s knows tokens up to s + j + 1 and states up to s."""
    config, params = head_of("hass")
    batch = packed_batch(config, sequences(), [[0]], 64)
    s = 10
    run = jax.jit(lambda batch: unroll(params, config, shared(), batch, ROPE, NUMERICS, STEPS))
    reference = run(batch)
    later_states = batch.states.at[:, s + 1 :].add(3.0)
    for j in range(STEPS):
        later_tokens = batch.tokens.at[:, s + j + 2 :].set(0)
        changed = run(dataclasses.replace(batch, tokens=later_tokens, states=later_states))
        np.testing.assert_array_equal(reference[j][:, s], changed[j][:, s])
        known = batch.tokens.at[:, s + j + 1].add(1)
        changed = run(dataclasses.replace(batch, tokens=known % 48))
        assert not np.array_equal(reference[j][:, s], changed[j][:, s])


def test_the_loss_by_a_plain_loop():
    """Masks, targets, chunks, decay and metrics against numpy, position by position."""
    config, params = head_of("hass")
    training = HeadTraining(
        steps=2, step_decay=0.5, hidden_weight=1.0, cross_entropy_weight=0.1, logit_chunk=37
    )
    members = [[0, 4], [1]]
    batch = packed_batch(config, sequences(), members, 60)
    value, metrics = head_loss(params, config, training, shared(), batch, ROPE, NUMERICS)
    outputs = unroll(params, config, shared(), batch, ROPE, NUMERICS, 2)
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
                    p, q = (
                        np.asarray(jax.nn.log_softmax(each), np.float64)
                        for each in (
                            transformer.logits(shared(), POLICY, hidden[None])[0],
                            head_logits(params, config, shared(), out[None], NUMERICS)[0],
                        )
                    )
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_policy_is_not_touched(variant):
    """No gradient reaches the shared weights, and a step leaves their bits alone."""
    config, params = head_of(variant)
    training = dataclasses.replace(published_training(variant), reverse_kl_weight=0.5, lk_weight=0.5)
    batch = packed_batch(config, sequences(), [[0, 2]], 64)
    gradient = jax.grad(lambda s: head_loss(params, config, training, s, batch, ROPE, NUMERICS)[0])(shared())
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))
    before = jax.tree.map(np.array, policy_params())
    tx = optimizer()
    state, metrics = jitted_train_step(
        init_state(params, tx), batch, shared(), ROPE, config, training, tx, NUMERICS
    )
    jax.tree.map(np.testing.assert_array_equal, before, policy_params())
    assert jax.tree.map(jnp.shape, state.params) == head_shapes(config)
    assert np.isfinite(metrics["loss"]) and int(state.updates) == 1


def test_every_head_parameter_learns():
    for variant in VARIANTS:
        config, params = head_of(variant)
        batch = packed_batch(config, sequences(), [[0, 2]], 64)
        training = published_training(variant)
        gradient = jax.grad(
            lambda p, c=config, t=training, b=batch: head_loss(p, c, t, shared(), b, ROPE, NUMERICS)[0]
        )(params)
        assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient)), variant


def train(variant, updates, seed=0, **changes):
    config, params = head_of(variant, seed)
    training = dataclasses.replace(published_training(variant), **changes)
    tx = optimizer()
    state = init_state(params, tx)
    rows = [[2 * r, 2 * r + 1] for r in range(8)]
    history = []
    for update in range(updates):
        batch = packed_batch(config, list(rollouts(16, 48, update % 8)), rows, 96)
        state, metrics = jitted_train_step(state, batch, shared(), ROPE, config, training, tx, NUMERICS)
        history.append({name: float(value) for name, value in metrics.items()})
    return config, state, history


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_learns_its_policy(variant):
    config, state, history = train(variant, 80)
    held_out = packed_batch(config, list(rollouts(16, 48, 99)), [[i] for i in range(16)], 48)
    training = published_training(variant)
    trained, untrained = (
        head_loss(params, config, training, shared(), held_out, ROPE, NUMERICS)[1]
        for params in (state.params, head_of(variant)[1])
    )
    print(variant, {k: (round(float(untrained[k]), 3), round(float(trained[k]), 3)) for k in sorted(trained)})
    assert trained["agreement/1"] > untrained["agreement/1"] + 0.2
    assert trained["accept_length"] > untrained["accept_length"] + 0.1


def test_training_is_deterministic():
    _, first, a = train("hass", 3)
    _, second, b = train("hass", 3)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert a == b


def test_eagle3_has_no_hidden_loss():
    config, params = head_of("eagle3")
    batch = packed_batch(config, sequences(), [[0]], 64)
    with pytest.raises(ValueError, match="hidden_weight"):
        head_loss(params, config, HeadTraining(hidden_weight=1.0), shared(), batch, ROPE, NUMERICS)


def test_optax_is_what_updates():
    """With plain SGD, the update is the gradient."""
    config, params = head_of("eagle")
    tx, training = optax.sgd(1.0), published_training("eagle")
    batch = packed_batch(config, sequences(), [[0]], 64)
    gradient = jax.grad(lambda p: head_loss(p, config, training, shared(), batch, ROPE, NUMERICS)[0])(params)
    expected = jax.tree.map(lambda p, g: p - g, params, gradient)
    state, _ = jitted_train_step(
        init_state(params, tx), batch, shared(), ROPE, config, training, tx, NUMERICS
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, expected)
