"""Acceptance under shared noise: against the plain sum, and draws with the noise field. Its losses of whole
drafts are in `test_training.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle import losses
from drafters.eagle.checkpoint import load_head
from drafters.eagle.model import BlockShape, HeadConfig, init_head
from drafters.eagle.objective import head_training
from rljax.sampling.noise import gumbel_rows
from tests.drafters.eagle.published import write_dflash, write_eagle3
from tests.drafters.eagle.test_spot_trainer import learn, make, measured
from tests.drafters.eagle.tiny import POLICY, policy_params

DRAWS = 40_000
coupled, coupled_at = jax.jit(losses.coupled), jax.jit(losses.coupled_at)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def pairs(filtered=True):
    """log p and log q, float64: some of each without a probability, some equal."""
    rng = np.random.default_rng(5)
    p, q = (np.log(rng.dirichlet(np.full(24, 0.4), 6) + 1e-12) for _ in range(2))
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
    keys = np.stack([np.arange(DRAWS, dtype=np.uint32)] * 2, axis=1)
    noise = jax.jit(gumbel_rows, static_argnums=2)(keys, np.zeros(DRAWS, np.int32), p.shape[1])
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


@pytest.mark.long  # above, its losses; test_spot_trainer.py has a head that learns
@pytest.mark.parametrize("kind", ["eagle3", "block", "dflash"])
def test_a_head_learns_to_agree(kind, tmp_path):
    """On rollouts that it has not seen: a published head with its vocabulary, which goes on learning; a
    block, whose correction is part of what it learns; and one of the shape of a published block.
    """
    if kind == "block":
        config = HeadConfig(kind, POLICY, block=BlockShape(size=3, depth=1, width=32))
    elif kind == "eagle3":
        write_eagle3(tmp_path / "head", POLICY, np.flatnonzero(np.arange(POLICY.vocab_size) % 3 != 1))
    else:
        write_dflash(tmp_path / "head", POLICY, (1, 3), None)
    if kind != "block":
        config, params = load_head(tmp_path / "head", POLICY)
    if kind != "eagle3":
        params = init_head(config, policy_params(), 0)
    steps, weights = (3 if kind == "block" else 2), {}
    if kind != "dflash":
        weights = {"cross_entropy_weight": 0.0, f"{'coupled' if kind == 'eagle3' else 'sampled'}_weight": 1.0}
    training = head_training(config.variant, steps, **weights)
    trainer = make(config, training, params)
    learn(trainer, 320)
    before, after = (measured(config, each, training)["coupled_length"] for each in (params, trainer.params))
    assert after > before + (0.2 if kind == "block" else 0.15)
    if kind == "eagle3":
        assert not np.array_equal(trainer.params["lm_head"], params["lm_head"])
    if kind == "block":
        without = trainer.params | {"out": jnp.zeros_like(trainer.params["out"])}
        assert after > measured(config, without, training)["coupled_length"] + 0.02
