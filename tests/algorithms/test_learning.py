"""Every algorithm learns a bandit whose optimum is known: by its preset, its advantages and its loss.

The policy is a table of logits for responses of up to two tokens, 0 ends a response at once. Advantages come
from `estimate_advantages` and the loss is `policy_objective`, as in the training loop; two updates a rollout,
so that ratios leave 1 and clipping has a say.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.algorithms.estimation import estimate_advantages
from rljax.algorithms.kl import kl_estimate
from rljax.algorithms.losses import aggregation_weights
from rljax.algorithms.registry import ALGORITHMS, NEED_TEACHER
from rljax.algorithms.value_loss import value_loss
from rljax.config import AlgorithmConfig, OptimizerConfig
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import PackedBatch
from rljax.training.objectives import policy_objective

TOKENS = 4
PROMPTS, GROUP = 32, 8
BEST = (2, 1)
REWARDS = np.zeros((TOKENS, TOKENS))
REWARDS[2, 1] = 1.0
REWARDS[3, 3] = 0.6
REWARDS[0] = 0.4  # ends at once, whatever the second token would have been
UNIFORM = {"first": jnp.zeros(TOKENS), "second": jnp.zeros((TOKENS, TOKENS))}
ARMS = np.array([0.4, 0.0, 0.25, 0.15])  # rewards where there is one token only
RULE = OptimizerConfig(learning_rate=0.1, schedule="linear")
OPTIMIZER = make_optimizer(RULE, 240)
ESTIMATE = jax.jit(
    estimate_advantages, static_argnames=("baseline", "normalization", "discount", "gae_lambda")
)


def logits_of(params, tokens):
    """Of both tokens of responses [N, 2]: [N, 2, TOKENS]."""
    first = jnp.broadcast_to(params["first"], (len(tokens), TOKENS))
    return jnp.stack([first, params["second"][tokens[:, 0]]], axis=1)


@jax.jit
def score(params, tokens):
    """Logprobs and entropies [N, 2]."""
    every = jax.nn.log_softmax(logits_of(params, tokens))
    chosen = jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(every) * every, axis=-1)


@jax.jit
def sample(params, key):
    """N responses and their logprobs."""
    keys = jax.random.split(key)
    shape = (PROMPTS * GROUP,)
    first = jax.random.categorical(keys[0], params["first"], shape=shape)
    second = jax.random.categorical(keys[1], params["second"][first])
    tokens = jnp.stack([first, second], axis=1)
    return tokens, score(params, tokens)[0]


@functools.partial(jax.jit, static_argnames="algorithm")
def update(params, optimizer_state, batch, reference_logprobs, algorithm):
    def loss(params):
        return policy_objective(*score(params, batch.targets), batch, reference_logprobs, algorithm)

    gradients, metrics = jax.grad(loss, has_aux=True)(params)
    changes, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, params)
    return optax.apply_updates(params, changes), optimizer_state, metrics


def values_of(table, tokens):
    """The value before each token: one, and one for each first token."""
    before_first = jnp.broadcast_to(table[0], (len(tokens),))
    return jnp.stack([before_first, table[1 + tokens[:, 0]]], axis=1)


@jax.jit
def update_values(table, optimizer_state, tokens, old, returns, mask, weights):
    def loss(table):
        return value_loss(values_of(table, tokens), old, returns, mask, weights, 0.5)[0]

    changes, optimizer_state = OPTIMIZER.update(jax.grad(loss)(table), optimizer_state, table)
    return optax.apply_updates(table, changes), optimizer_state


def learn(algorithm, steps=60, one_token=False, reference=None):
    """Params after `steps` rollouts, and the last metrics. `reference` is of the KL, uniform if None."""
    reference = UNIFORM if reference is None else reference
    params, key = UNIFORM, jax.random.key(0)
    optimizer_state = OPTIMIZER.init(params)
    table = jnp.zeros(1 + TOKENS)
    table_state = OPTIMIZER.init(table)
    for step in range(steps):
        tokens, rollout_logprobs = sample(params, jax.random.fold_in(key, step))
        short = np.asarray(tokens[:, 0] == 0) | one_token
        mask = jnp.asarray(np.stack([np.ones_like(short), ~short], axis=1))
        first, second = np.asarray(tokens).T
        rewards = (ARMS[first] if one_token else REWARDS[first, second]).reshape(PROMPTS, GROUP)
        rewards = algorithm.reward_coefficient * rewards
        reference_logprobs, _ = score(reference, tokens)
        penalties = values = None
        if algorithm.kl_in == "reward":
            penalties = algorithm.kl_coefficient * kl_estimate(
                rollout_logprobs, reference_logprobs, algorithm.kl_estimator
            )
        if algorithm.advantage_baseline == "critic":
            values = values_of(table, tokens)
        advantages, returns = ESTIMATE(
            rewards,
            mask,
            algorithm.advantage_baseline,
            algorithm.advantage_normalization,
            algorithm.discount,
            algorithm.gae_lambda,
            penalties,
            values,
        )
        lengths = np.asarray(mask).sum(axis=1)
        weights = jnp.where(mask, aggregation_weights(lengths, algorithm.aggregation, 2)[:, None], 0.0)
        nothing, ids = jnp.zeros_like(tokens), jnp.ones_like(tokens)
        batch = PackedBatch(nothing, nothing, ids, tokens, mask, rollout_logprobs, advantages, weights)
        in_loss = reference_logprobs if algorithm.kl_coefficient and algorithm.kl_in == "loss" else None
        for _ in range(2):
            params, optimizer_state, metrics = update(
                params, optimizer_state, batch, in_loss, algorithm=algorithm
            )
            if values is not None:
                table, table_state = update_values(table, table_state, tokens, values, returns, mask, weights)
    return params, metrics


def probabilities(params):
    """Of all pairs of tokens, [TOKENS, TOKENS]."""
    first, second = jax.nn.softmax(params["first"]), jax.nn.softmax(params["second"])
    return np.asarray(first[:, None] * second)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in NEED_TEACHER])
def test_the_best_response_is_found(name):
    assert probabilities(UNIFORM)[BEST] == pytest.approx(1 / 16)
    params, metrics = learn(AlgorithmConfig(name=name))
    assert probabilities(params)[BEST] > 0.9
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_student_becomes_its_teacher():
    """Without any reward, and without a look at what the teacher would have sampled itself."""
    keys = jax.random.split(jax.random.key(5))
    teacher = {
        "first": jax.random.normal(keys[0], UNIFORM["first"].shape),
        "second": jax.random.normal(keys[1], UNIFORM["second"].shape),
    }
    params, _ = learn(AlgorithmConfig(name="distillation"), steps=120, reference=teacher)
    far = np.abs(probabilities(UNIFORM) - probabilities(teacher))[1:].sum() / 2  # 0 ends the response
    near = np.abs(probabilities(params) - probabilities(teacher))[1:].sum() / 2
    assert near < 0.06 < 0.2 < far


def regularised_optimum(scale, arms):
    """argmax of E[R] - scale KL(pi || uniform), and of E[R] + scale H: proportional to e^(R / scale)."""
    weights = np.exp(arms / scale)
    return weights / weights.sum()


@pytest.mark.parametrize("name", ["rloo", "reinforce++"])
def test_a_kl_in_the_reward_leads_to_the_regularised_optimum(name):
    """Both tokens: the penalty of the second reaches the first one's return."""
    algorithm = AlgorithmConfig(name=name, kl_coefficient=0.4, aggregation="constant")
    params, _ = learn(algorithm, steps=120)
    first = jax.nn.softmax(params["first"])
    # Of first tokens: e^(R / scale), averaged over what may follow under the uniform reference. 0 is one arm,
    # with no second token.
    follow = np.exp(REWARDS / 0.4).mean(axis=1)
    expected = follow / follow.sum()
    assert np.abs(first - expected).sum() / 2 < 0.08
    assert np.abs(first - 1 / TOKENS).sum() / 2 > 0.1  # it did learn
    second = jax.nn.softmax(params["second"][2])
    assert np.abs(second - regularised_optimum(0.4, REWARDS[2])).sum() / 2 < 0.08


@pytest.mark.parametrize(
    "keys",
    [{"kl_coefficient": 0.1, "kl_estimator": "k2"}, {"kl_coefficient": 0.0, "entropy_coefficient": 0.1}],
    ids=["KL in the loss", "entropy bonus"],
)
def test_a_term_of_the_loss_leads_to_the_regularised_optimum(keys):
    """With one token, where the gradient is that of the regularised objective. (With the group's own mean
    as baseline, rewards would count (G - 1) / G of what they are.)
    """
    algorithm = AlgorithmConfig(name="rloo", aggregation="token_mean", kl_in="loss", **keys)
    params, _ = learn(algorithm, steps=120, one_token=True)
    first = np.asarray(jax.nn.softmax(params["first"]))
    assert np.abs(first - regularised_optimum(0.1, ARMS)).sum() / 2 < 0.08
    assert np.abs(first - 1 / TOKENS).sum() / 2 > 0.3
