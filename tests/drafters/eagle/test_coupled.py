"""Acceptance under shared noise: against the plain sum, draws with the noise field, and in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle import losses
from drafters.eagle.checkpoint import load_head
from drafters.eagle.model import BlockShape, DraftVocabulary, HeadConfig, head_logits, init_head
from drafters.eagle.objective import HeadTraining, head_training
from drafters.eagle.training import head_loss
from rljax.models import transformer
from rljax.sampling.distribution import SamplingParams, transform_logits
from rljax.sampling.noise import gumbel_rows
from tests.drafters.eagle.published import write_eagle3
from tests.drafters.eagle.test_training import ROWS, loss_of, train, unrolled
from tests.drafters.eagle.tiny import (
    NUMERICS,
    POLICY,
    packed_batch,
    policy_params,
    rollouts,
    shared,
    with_policy,
)

DRAWS = 40_000
coupled, coupled_at = jax.jit(losses.coupled), jax.jit(losses.coupled_at)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def pairs(size=24, filtered=True):
    """log p and log q, float64: some of each without a probability, some equal."""
    rng = np.random.default_rng(5)
    p, q = (np.log(rng.dirichlet(np.full(size, 0.4), 6) + 1e-12) for _ in range(2))
    q[1] = p[1]
    q[2, :7] = p[2, :7]
    if filtered:
        p[3, 10:], q[4, :9], q[5, 5:], p[5, :4] = -np.inf, -np.inf, -np.inf, -np.inf
    return [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q)]


def chances(p, q):
    """P(both take i), by the sum over all pairs of tokens: float64 [..., V]."""
    p, q = np.exp(p)[..., None, :], np.exp(q)[..., None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(p / p.swapaxes(-1, -2), q / q.swapaxes(-1, -2))
        both = 1.0 / larger.sum(-1)
    return np.where((p[..., 0, :] > 0) & (q[..., 0, :] > 0), both, 0.0)


def test_it_is_the_plain_sum(float64):
    p, q = pairs()
    expected = chances(p, q)
    np.testing.assert_allclose(np.exp(coupled(p, q)), expected.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(coupled(p, q)[1], 0.0, atol=1e-12)  # the same distribution
    tokens = np.argmax(expected, axis=-1).astype(np.int32)
    both, sampled = (np.take_along_axis(x, tokens[:, None], axis=-1)[:, 0] for x in (expected, np.exp(p)))
    np.testing.assert_allclose(np.exp(coupled_at(p, q, tokens)), both / sampled, rtol=1e-12)


def test_it_is_what_draws_with_the_noise_say():
    """argmax(log p + G) and argmax(log q + G), token by token, within four standard deviations."""
    p, q = (jnp.asarray(x, jnp.float32) for x in pairs())
    keys = jnp.stack([jnp.arange(DRAWS, dtype=jnp.uint32)] * 2, axis=1)
    noise = gumbel_rows(keys, jnp.zeros(DRAWS, jnp.int32), p.shape[1])
    for row in range(len(p)):
        sampled, drafted = (np.asarray(jnp.argmax(x[row][None] + noise, axis=-1)) for x in (p, q))
        chance = float(np.exp(coupled(p[row], q[row])))
        assert abs(np.mean(sampled == drafted) - chance) <= 4 * np.sqrt(chance * (1 - chance) / DRAWS) + 1e-6
        token = np.bincount(sampled).argmax()
        right = drafted[sampled == token] == token
        chance = float(np.exp(coupled_at(p[row], q[row], jnp.int32(token))))
        assert abs(right.mean() - chance) <= 4 * np.sqrt(chance * (1 - chance) / len(right)) + 1e-6


def test_tokens_that_cannot_be_drafted(float64):
    """A head over some tokens is one over all with a probability of 0 elsewhere."""
    p, q = pairs(filtered=False)
    ids = np.arange(0, 24, 2)
    whole = np.full_like(q, -np.inf)
    whole[:, ids] = q[:, ids] - np.log(np.exp(q[:, ids]).sum(-1, keepdims=True))
    rest = 1.0 - np.exp(p[:, ids]).sum(-1)
    few = coupled(p[:, ids], whole[:, ids], rest)
    np.testing.assert_allclose(few, coupled(p, whole), rtol=1e-12)
    np.testing.assert_allclose(np.exp(few), chances(p, whole).sum(-1), rtol=1e-12)
    tokens = np.full(len(p), 5, np.int32)  # 10 of the vocabulary
    few = coupled_at(p[:, ids], whole[:, ids], tokens, rest)
    np.testing.assert_allclose(few, coupled_at(p, whole, tokens * 2), rtol=1e-12)
    assert np.all(np.isneginf(coupled_at(p, whole, tokens)))
    assert np.all(np.isneginf(coupled_at(p[:, ids], q[:, ids], np.full(len(p), -1), rest)))


@pytest.mark.parametrize("which", ["coupled", "coupled_at"])
def test_the_gradient_is_that_of_the_plain_sum(which, float64):
    """By differences of the O(V^2) sum, with respect to both distributions; never NaN."""
    p, q = pairs()
    tokens = np.argmax(chances(p, q), axis=-1).astype(np.int32)

    def loss(p, q):
        each = losses.coupled(p, q) if which == "coupled" else losses.coupled_at(p, q, tokens)
        return jnp.sum(each)

    def plain(p, q):
        both = chances(p, q)
        if which == "coupled":
            return np.log(both.sum(-1)).sum()
        at = tokens[:, None]
        return (np.log(np.take_along_axis(both, at, -1)) - np.take_along_axis(p, at, -1)).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(p, q)
    rng, step = np.random.default_rng(1), 1e-6
    rows = np.array([0, 3, 4, 5])  # the others have equal ratios, where differences see a corner
    for at, gradient in enumerate(gradients):
        assert np.all(np.isfinite(gradient))
        for _ in range(4):
            given = [p, q]
            change = np.zeros_like(p)
            change[rows] = rng.standard_normal(p.shape)[rows]
            there = np.where(np.isinf(given[at]), 0.0, change)
            sides = []
            for sign in (1, -1):
                given[at] = (p, q)[at] + sign * step * there
                sides.append(plain(*given))
            difference = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(difference, np.sum(gradient * there), rtol=1e-5)


@functools.partial(jax.jit, static_argnames=("config", "sampling"))
def opinions(params, config, batch, outputs, sampling):
    """Log-probabilities of the policy's samples [R, T, V], and of the head's at every step [k, R, T, V'], at
    the temperature alone and with its filters.
    """
    logits = transformer.logits(shared(), POLICY, batch.states[:, :, -1], NUMERICS)
    drawn = [head_logits(with_policy(config, params), output) for output in outputs]
    of_steps = [
        jnp.stack([jax.nn.log_softmax(each) for each in steps])
        for steps in (
            [each / sampling.temperature for each in drawn],
            [transform_logits(each, sampling, NUMERICS) for each in drawn],
        )
    ]
    return jax.nn.log_softmax(transform_logits(logits, sampling, NUMERICS)), *of_steps


def test_training_multiplies_along_the_draft():
    """Both losses and the metrics against loops over starts: at a temperature, with filters, for a head that
    drafts some tokens alone.
    """
    sampling, ids = SamplingParams(temperature=0.7, top_k=20), np.arange(3, 40)[::-1]
    config = HeadConfig("eagle3", POLICY, vocabulary=DraftVocabulary(ids))
    params = init_head(config, policy_params(), 0)
    weights = {"cross_entropy_weight": 0.0, "coupled_weight": 2.0, "sampled_weight": 3.0}
    training = HeadTraining(steps=2, logit_chunk=23, sampling=sampling, **weights)
    sequences = [row[:n] for row, n in zip(rollouts(3, 40), (40, 33, 12), strict=True)]
    members = [[0, 2], [1]]
    batch = packed_batch(config, sequences, members, 60)

    outputs = unrolled(config, 2)(params, batch)
    p, *heads = (np.asarray(each, np.float64) for each in opinions(params, config, batch, outputs, sampling))
    found = {"coupled": [], "sampled": [], "offered": []}
    for r, row in enumerate(members):
        start = 0
        for member in row:
            n = len(sequences[member])
            for s in range(start, start + n - 2):
                drafts = {name: [] for name in found}
                for j in range(2):
                    if s + j + 2 >= start + n:
                        break
                    token = int(batch.tokens[r, s + j + 2])
                    for name, log_q in zip(("all", "kept"), heads, strict=True):
                        q = np.full(POLICY.vocab_size, -np.inf)
                        q[ids] = log_q[j, r, s]
                        both, here = chances(p[r, s + j + 1], q), np.exp(p[r, s + j + 1, token])
                        if name == "all":
                            drafts["coupled"].append(both.sum())
                        at = both[token] / here if here else 0.0
                        drafts["sampled" if name == "all" else "offered"].append(at)
                for name, each in drafts.items():
                    found[name].append(np.pad(np.cumprod(each), (0, 2 - len(each))))
            start += n
    sums = {name: np.sum(each, axis=1) for name, each in found.items()}
    value, metrics = loss_of(config, training)(params, batch)
    logs = {name: np.log(np.where(each > 0, each, 1.0)).mean() for name, each in sums.items()}
    np.testing.assert_allclose(value, -2.0 * logs["coupled"] - 3.0 * logs["sampled"], rtol=2e-4)
    assert metrics["starts"] == len(found["coupled"])
    np.testing.assert_allclose(metrics["coupled_length"], 1.0 + sums["offered"].mean(), rtol=2e-4)
    for step in range(2):
        expected = np.mean([each[step] for each in found["offered"]])
        np.testing.assert_allclose(metrics[f"coupled/{step + 1}"], expected, rtol=2e-4)


def test_chunks_without_a_response_change_nothing():
    """They are skipped: losses and gradients are those of one chunk with everything in it."""
    config = HeadConfig("eagle3", POLICY)
    params = init_head(config, policy_params(), 0)
    batch = packed_batch(config, list(rollouts(3, 40)), [[0], [1, 2]], 96)
    late = jnp.arange(96)[None] >= 20
    batch = dataclasses.replace(batch, response_mask=batch.response_mask & late)

    @jax.jit
    def both(params, chunk=None):
        def loss(params, chunk):
            training = HeadTraining(sampled_weight=1.0, logit_chunk=chunk)
            return head_loss(with_policy(config, params), training, batch)

        return [jax.value_and_grad(loss, has_aux=True)(params, chunk) for chunk in (192, 16)]

    whole, parts = both(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), whole, parts)


@pytest.mark.parametrize("variant", ["eagle3", pytest.param("block", marks=pytest.mark.long)])
def test_a_head_learns_to_agree(variant, tmp_path):
    """On rollouts that it has not seen: a published head with its vocabulary, which goes on learning; and a
    block, whose correction is part of what it learns.
    """
    if variant == "eagle3":
        write_eagle3(tmp_path / "head", POLICY, np.flatnonzero(np.arange(POLICY.vocab_size) % 3 != 1))
        config, params = load_head(tmp_path / "head", POLICY)
    else:
        config = HeadConfig(variant, POLICY, block=BlockShape(size=3, depth=1, width=32))
        params = init_head(config, policy_params(), 0)
    steps, loss = (2, "coupled") if variant == "eagle3" else (3, "sampled")
    training = head_training(variant, steps, **{"cross_entropy_weight": 0.0, f"{loss}_weight": 1.0})
    state, _ = train(config, params, training, 80)
    unseen = packed_batch(config, rollouts(8, 48, 99), ROWS, 96)
    measured = lambda p: loss_of(config, training)(p, unseen)[1]["coupled_length"]  # noqa: E731
    before, after = measured(params), measured(state.params)
    assert after > before + (0.15 if variant == "eagle3" else 0.2)
    if variant == "eagle3":
        assert not np.array_equal(state.params["lm_head"], params["lm_head"])
    else:
        without = measured(state.params | {"out": jnp.zeros_like(state.params["out"])})
        assert after > without + 0.02
