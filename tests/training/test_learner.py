"""From rewarded groups to updates: what each algorithm makes of them, and that GRPO's numbers are as ever."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.advantages import group_relative_advantages
from rljax.algorithms.losses import aggregation_weights
from rljax.algorithms.reward_shaping import soft_overlong_punishment
from rljax.config import OptimizerConfig
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.config import ModelConfig
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.rows import Numerics
from rljax.requests import Completion
from rljax.rollout.collector import Group
from rljax.sampling.distribution import SamplingParams
from rljax.tasks.base import Problem
from rljax.training.learner import Learner
from rljax.training.objectives import policy_objective
from rljax.training.update import Recipe, Trainer
from tests.configs import experiment
from tests.devices import run_on_devices
from tests.engines import scaled_params, stored_pool
from tests.training.test_update import NamingPool

CONFIG = ModelConfig("qwen3", 23, 16, 1, 2, 1, 8, 24, tie_embeddings=False, qk_norm=True, max_positions=512)
PROBLEM = Problem("train/0", ({"role": "user", "content": "?"},), "!", 0)
POOL = stored_pool()  # programs are compiled once for the module
LONGEST = 12
RATIOS = np.random.default_rng(3).choice([0.2, 0.7, 1.0, 1.4, 5.0], 6 * LONGEST)


PLAIN = {"name": "dapo", "dynamic_sampling": False, "overlong_buffer": 0}
CORRECTED = PLAIN | {"correction_cap": 2.0, "correction_mask": "token"}  # what is outside of 0.5 to 2
WITH_CRITIC = {"name": "ppo", "kl_coefficient": 0.0, "entropy_coefficient": 0.01, "gae_lambda": 1.0}
WITH_CRITIC |= {"correction_cap": 2.0}
OPTIMIZER = {"learning_rate": 1e-2}


def make_params():
    return scaled_params(CONFIG, 3.0, 1.1)


def config_of(algorithm, **training):
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 2}
    return experiment(
        rollout=rollout | {"max_prompt_length": 8, "max_response_length": LONGEST},
        algorithm={"skip_zero_advantages": False} | algorithm,
        optimizer=OPTIMIZER,
        training={"pack_length": 32, "rows_per_microbatch": 1} | training,  # programs of one size
    )


@functools.cache
def optimizer():
    """One for all learners, since their programs are looked up by it."""
    return make_optimizer(OptimizerConfig(**OPTIMIZER), 10)


def make_learner(params, algorithm, pool=POOL, mesh=None, **training):
    config = config_of(algorithm, **training)
    numerics = Numerics() if mesh is None else Numerics(kernels=KernelChoice().on_mesh(mesh))
    recipe = Recipe(SamplingParams(), config.algorithm, config.training, optimizer())
    return Learner(config, Trainer(CONFIG, numerics, recipe, pool, mesh), params)


def make_groups(params):
    """Three prompts with two responses each, and the logprobs that the policy gives them."""
    rng = np.random.default_rng(0)
    learner = make_learner(params, {"name": "dapo"})
    made = []
    for size, rewards in ((3, (1.0, 0.0)), (5, (0.5, 2.5)), (2, (0.25, 0.25))):
        prompt = tuple(rng.integers(0, CONFIG.vocab_size, size).tolist())
        lengths = rng.integers(1, LONGEST + 1, 2)
        responses = [rng.integers(0, CONFIG.vocab_size, length).astype(np.int32) for length in lengths]
        sequences = [TrainingSequence(prompt, response, None, 0.0, 1.0) for response in responses]
        packing = pack_sequences([sequence.length for sequence in sequences], 32)
        batches = [build_batch(sequences, packing, rows) for rows in packing.microbatches(1)]
        scored = np.concatenate(learner._trainer.score(params, batches))
        completions = []
        for response, row, start in zip(responses, packing.row, packing.start, strict=True):
            first = int(start) + size - 1
            completions.append(Completion(response, scored[row, first : first + len(response)], "eos"))
        made.append(Group(PROBLEM, prompt, completions, [{"reward": reward} for reward in rewards]))
    return made


params = pytest.fixture(make_params, scope="module", name="params")
groups = pytest.fixture(make_groups, scope="module", name="groups")


def disturbed(groups, ratios):
    """The same with rollout logprobs off by the logs of `ratios` (training over rollout), token by token."""
    flat = iter(ratios)

    def change(completion):
        log = np.log([next(flat) for _ in completion.response_ids])
        return dataclasses.replace(completion, logprobs=(completion.logprobs - log).astype(np.float32))

    return [
        dataclasses.replace(group, completions=[change(each) for each in group.completions])
        for group in groups
    ]


def lengths_of(groups):
    return [len(completion.response_ids) for group in groups for completion in group.completions]


def prepared(learner, params, groups):
    """Mini-batches ready for their updates, with their metrics."""
    state = learner.init(params)
    minibatches = learner._pack(groups, 0)
    learner._score(state, minibatches)
    return learner._prepare(groups, minibatches)


def tokens_of(minibatches, field, arrays=None):
    """A field of the batches, or arrays laid out as they, at all response tokens, by response in the order of
    the groups.
    """
    found = {}
    for minibatch in minibatches:
        rows = np.concatenate(arrays or [np.asarray(getattr(batch, field)) for batch in minibatch.batches])
        for member, (row, positions) in zip(minibatch.members, minibatch.places, strict=True):
            found[int(member)] = rows[row, positions]
    return [found[i] for i in range(len(found))]


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_batches_of_grpo_and_dapo_are_those_of_their_equations(params, groups, name):
    """Bit for bit what the loop built before it knew other algorithms, mini-batch by mini-batch."""
    algorithm = {"name": name, "overlong_buffer": 5}
    learner = make_learner(params, algorithm, minibatches_per_step=2)
    minibatches, _ = prepared(learner, params, groups)

    rewards = np.stack([group.reward for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    prompts = [group.prompt_ids for group in groups for _ in group.completions]
    lengths = np.asarray(lengths_of(groups))
    rewards = rewards + soft_overlong_punishment(lengths, LONGEST, 5, 1.0).reshape(rewards.shape)
    advantages = np.asarray(group_relative_advantages(jnp.asarray(rewards, jnp.float32))).reshape(-1)
    order = np.random.default_rng((0, 0)).permutation(len(completions))
    mode = {"grpo": "sequence_mean", "dapo": "token_mean"}[name]
    for minibatch, part in zip(minibatches, np.array_split(order, 2), strict=True):
        sequences = []
        for i, weight in zip(part, aggregation_weights(lengths[part], mode), strict=True):
            sampled = (completions[i].response_ids, completions[i].logprobs)
            sequences.append(TrainingSequence(prompts[i], *sampled, float(advantages[i]), float(weight)))
        packing = pack_sequences([sequence.length for sequence in sequences], 32)
        expected = [build_batch(sequences, packing, rows) for rows in packing.microbatches(1)]
        jax.tree.map(np.testing.assert_array_equal, minibatch.batches, expected)
        assert (minibatch.reference_logprobs is None) == (name == "dapo")
        assert minibatch.old_logprobs is None and minibatch.old_values is None


def test_what_declined_and_what_was_cut_off_is_not_learned(params, groups):
    """A group of three of which one has no reward: by hand, the advantages of two. A response that was cut
    off is in its group's mean and not in the loss. Neither counts in an average over tokens.
    """
    first, second, third = groups
    three = dataclasses.replace(
        first,
        completions=[*first.completions, second.completions[0]],
        rewards=[{"reward": 1.0}, {"reward": 0.0}, {"reward": None}],
    )
    cut = [dataclasses.replace(third.completions[0], finish_reason="length"), third.completions[1]]
    rewards = [{"reward": 3.0}, {"reward": 1.0}, {"reward": 2.0}]
    other = dataclasses.replace(third, completions=[*cut, second.completions[1]], rewards=rewards)
    kept = [0, 1, 4, 5]
    lengths = [len(each.response_ids) for each in (*three.completions, *other.completions)]
    for keys, expected in (
        ({"name": "dr_grpo"}, [0.5, -0.5, 0, 1.0, -1.0, 0.0]),
        ({"name": "rloo"}, [1.0, -1.0, 0, 1.5, -1.5, 0.0]),
        ({"name": "grpo"}, [0.5**0.5, -(0.5**0.5), 0, 1.0, -1.0, 0.0]),
        ({"name": "reinforce++", "advantage_normalization": "none"}, [1, 0, 0, 3, 1, 2]),
    ):
        keys = keys | {"kl_coefficient": 0.0, "aggregation": "token_mean", "mask_truncated": True}
        minibatches, _ = prepared(make_learner(params, keys), params, [three, other])
        found = (tokens_of(minibatches, "advantages"), tokens_of(minibatches, "weights"))
        for i, (advantage, weight) in enumerate(zip(*found, strict=True)):
            np.testing.assert_allclose(advantage, np.full(lengths[i], expected[i]), rtol=1e-5, atol=1e-6)
            count = sum(lengths[each] for each in kept) if i in kept else np.inf
            np.testing.assert_allclose(weight, np.full(lengths[i], 1 / count), rtol=1e-6)
    skipping = {"name": "dr_grpo", "skip_zero_advantages": True, "mask_truncated": True}
    minibatches, _ = prepared(make_learner(params, skipping), params, [three, other])
    assert sorted(minibatches[0].members) == [0, 1, 4]


@pytest.mark.default_cases("dapo, corrected")
@pytest.mark.parametrize(
    "algorithm",
    [PLAIN, CORRECTED, {"name": "gspo", "kl_coefficient": 0.0}],
    ids=["dapo", "dapo, corrected", "gspo"],
)
def test_responses_without_advantage_are_left_out_and_nothing_else_changes(params, groups, algorithm):
    """The third prompt's responses have one reward: the updates are the same without them."""
    found = []
    for skips in (False, True):
        learner = make_learner(params, algorithm | {"skip_zero_advantages": skips}, minibatches_per_step=2)
        minibatches, _ = prepared(learner, params, disturbed(groups, RATIOS))
        learned = np.concatenate([minibatch.members for minibatch in minibatches])
        state, metrics = learner.learn(learner.init(params), disturbed(groups, RATIOS), 0)
        found.append((set(learned.tolist()), jax.device_get(state.params), metrics))
    (whole, expected, before), (learned, same, after) = found
    left_out = whole - learned
    assert left_out and left_out <= {4, 5}
    lengths = lengths_of(groups)
    assert after["update/skipped"] == pytest.approx(sum(lengths[i] for i in left_out) / sum(lengths))
    assert after["update/tokens"] < before["update/tokens"]
    assert after["gradient_norm"] == pytest.approx(before["gradient_norm"], rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), expected, same)
    if "correction_cap" not in algorithm:
        assert 0 < after["update/weight"] < before.get("update/weight", 1.0)


def test_a_step_without_any_advantage_or_token_is_an_update_without_gradient(params, groups):
    equal = [dataclasses.replace(group, rewards=[{"reward": 1.0}] * 2) for group in groups]
    learner = make_learner(params, PLAIN | {"skip_zero_advantages": True})
    state, metrics = learner.learn(learner.init(params), equal, 0)
    assert metrics["gradient_norm"] == 0.0
    assert 0 < metrics["update/tokens"] <= LONGEST
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(params))
    learner = make_learner(params, CORRECTED)
    _, metrics = learner.learn(learner.init(params), disturbed(groups, np.full(6 * LONGEST, 9.0)), 0)
    assert metrics["correction/masked"] == 1.0 and metrics["gradient_norm"] == 0.0


def test_nothing_is_left_out_where_the_loss_has_other_terms(params, groups):
    for keys in (
        {"name": "grpo", "kl_coefficient": 0.1},
        PLAIN | {"entropy_coefficient": 0.5},
        {"name": "ppo"},
    ):
        learner = make_learner(params, keys | {"skip_zero_advantages": True})
        minibatches, metrics = prepared(learner, params, groups)
        assert sorted(np.concatenate([each.members for each in minibatches])) == list(range(6))
        assert "update/skipped" not in metrics


def test_a_disturbed_rollout_is_corrected_token_by_token(params, groups):
    """Truncated factors on the advantages; masked tokens without weight, and out of the average; a ratio of 1
    in the first update, whose weights are those of the scoring pass.
    """
    wrong = disturbed(groups, RATIOS)
    learner = make_learner(params, CORRECTED)
    minibatches, metrics = prepared(learner, params, wrong)
    lengths = lengths_of(groups)
    ratios = np.split(RATIOS[: sum(lengths)], np.cumsum(lengths)[:-1])
    advantages = np.asarray(
        group_relative_advantages(np.stack([group.reward for group in groups]).astype(np.float32))
    ).reshape(-1)
    kept = sum(int(np.sum((ratio >= 0.5) & (ratio <= 2.0))) for ratio in ratios)
    assert 0 < kept < sum(lengths)
    found = (tokens_of(minibatches, "advantages"), tokens_of(minibatches, "weights"))
    for advantage, ratio, own, weight in zip(advantages, ratios, *found, strict=True):
        np.testing.assert_allclose(own, advantage * np.minimum(ratio, 2.0), rtol=1e-4, atol=1e-6)
        inside = (ratio >= 0.5) & (ratio <= 2.0)
        np.testing.assert_allclose(weight, inside / kept, rtol=1e-5)
    used = RATIOS[: sum(lengths)]
    assert metrics["correction/ratio_mean"] == pytest.approx(used.mean(), rel=1e-4)
    assert metrics["correction/masked"] == pytest.approx(1 - kept / sum(lengths), rel=1e-4)

    _, first = learner.learn(learner.init(params), wrong, 0)
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert first["policy/clip_fraction_low"] == first["policy/clip_fraction_high"] == 0
    assert first["mismatch/logprob_abs_max"] == pytest.approx(np.log(5.0), rel=1e-3)  # still told
    assert first["mismatch/tokens"] == np.sum(used != 1.0)


def test_whole_responses_are_left_out_of_the_average(params, groups):
    """One response's rollout is off by a factor of 1.5 at every token: it neither counts nor is counted."""
    lengths = lengths_of(groups)
    ratios = np.repeat([1.0, 1.5, 1.0, 1.0, 1.0, 1.0], lengths)
    keys = {"correction_mask": "sequence", "correction_low": 0.99, "correction_high": 1.01}
    learner = make_learner(params, {"name": "grpo", "kl_coefficient": 0.0, **keys})
    minibatches, metrics = prepared(learner, params, disturbed(groups, ratios))
    for i, (weight, length) in enumerate(zip(tokens_of(minibatches, "weights"), lengths, strict=True)):
        np.testing.assert_allclose(weight, np.full(length, 0.0 if i == 1 else 1 / (5 * length)), rtol=1e-6)
    assert metrics["correction/masked"] == pytest.approx(lengths[1] / sum(lengths), rel=1e-6)


def test_tokens_left_out_are_in_no_responses_ratio_either(params, groups):
    """GSPO: what a token's gradient is multiplied by is that of its response, so leaving it out of the
    average alone would leave it its gradient.
    """
    learner = make_learner(params, {"name": "gspo", "correction_mask": "token"})
    minibatches, _ = prepared(learner, params, disturbed(groups, RATIOS))
    kept, advantages = tokens_of(minibatches, "weights"), tokens_of(minibatches, "advantages")
    (minibatch,) = minibatches
    scored = learner._trainer.score(params, minibatch.batches)

    @jax.jit
    @jax.grad
    def gradient_of(logprobs, batch):
        entropy = jnp.zeros_like(logprobs)
        return policy_objective(logprobs, entropy, batch, None, learner._algorithm)[0]

    gradients = [gradient_of(own, batch) for own, batch in zip(scored, minibatch.batches, strict=True)]
    counted = sum(bool((weight > 0).any()) for weight in kept)
    gradients = tokens_of(minibatches, None, gradients)
    for weight, advantage, gradient in zip(kept, advantages, gradients, strict=True):
        inside = weight > 0
        expected = -advantage / (counted * max(inside.sum(), 1))
        np.testing.assert_allclose(gradient, np.where(inside, expected, 0.0), rtol=1e-4, atol=1e-7)
    assert any(0 < (weight > 0).sum() < len(weight) for weight in kept)
    for batch in minibatch.batches:
        assert np.isneginf(np.asarray(batch.old_logprobs)[np.asarray(batch.weights) == 0]).all()


def test_the_reference_is_scored_without_filters(params, groups):
    """Its own top-k would say -inf of what the policy has come to like, and no KL how far that is."""
    config = config_of({"name": "grpo"})
    recipe = Recipe(SamplingParams(top_k=2), config.algorithm, config.training, optimizer())
    filtered = Trainer(CONFIG, Numerics(), recipe, POOL)
    learner = make_learner(params, {"name": "grpo"})
    (minibatch,) = learner._pack(groups, 0)
    expected = learner._trainer.score(params, minibatch.batches)
    found = filtered.score(params, minibatch.batches, unfiltered=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    own = filtered.score(params, minibatch.batches)
    masks = [batch.response_mask for batch in minibatch.batches]
    assert any(np.isneginf(each[mask]).any() for each, mask in zip(own, masks, strict=True))


def test_a_gradient_that_is_no_number_stops_before_anything_is_saved(params, groups):
    broken = disturbed(groups, np.full(6 * LONGEST, np.nan))
    learner = make_learner(params, PLAIN | {"skip_zero_advantages": True})
    with pytest.raises(UserError, match="the gradient norm of the policy is nan"):
        learner.learn(learner.init(params), broken, 0)


def test_a_kl_in_the_reward_is_not_in_the_loss(params, groups):
    """Against a reference that is the policy it takes nothing; against another, what `kl_estimate` says. With
    weights that do not add up to 1, metrics are means all the same.
    """
    keys = {"name": "reinforce++", "kl_coefficient": 0.5, "aggregation": "constant"}
    learner = make_learner(params, keys)
    _, metrics = learner.learn(learner.init(params), groups, 0)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-6) and "loss/kl" not in metrics
    lengths = lengths_of(groups)
    assert metrics["update/weight"] == pytest.approx(np.mean(lengths) / LONGEST, rel=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    reference = jax.tree.map(lambda leaf: leaf * 0.9, params)
    learner = make_learner(reference, keys | {"advantage_normalization": "none"})
    minibatches, metrics = prepared(learner, params, groups)
    (minibatch,) = minibatches
    logprobs = tokens_of(minibatches, "rollout_logprobs")
    references = tokens_of(minibatches, None, minibatch.reference_logprobs)
    rewards = np.concatenate([group.reward for group in groups])
    totals, advantages = [], tokens_of(minibatches, "advantages")
    for reward, mine, other, advantage in zip(rewards, logprobs, references, advantages, strict=True):
        penalty = 0.5 * (mine - other)
        totals.append(penalty.sum())
        np.testing.assert_allclose(advantage, reward - np.cumsum(penalty[::-1])[::-1], rtol=1e-4, atol=1e-5)
    assert metrics["reward/kl_penalty"] == pytest.approx(np.mean(totals), rel=1e-4)


def test_an_entropy_bonus_raises_the_entropy(params, groups):
    """With advantages of 0 it is all there is."""
    equal = [dataclasses.replace(group, rewards=[{"reward": 0.0}] * 2) for group in groups]
    learner = make_learner(params, PLAIN | {"entropy_coefficient": 0.5}, epochs_per_step=3)
    state, metrics = learner.learn(learner.init(params), equal, 0)
    _, after = learner.learn(state, equal, 0)
    assert metrics["loss/entropy"] > 0 and after["entropy"] > metrics["entropy"] + 0.01


def test_the_critic_learns_and_leaves_the_policy_alone(params, groups):
    """Values start at 0 and come to explain the returns; what its optimizer does moves no bit of the policy
    in the same step.
    """
    found = []
    for rate in (1e-2, 1e-9):
        learner = make_learner(params, WITH_CRITIC | {"critic": {"learning_rate": rate}}, epochs_per_step=4)
        state = learner.init(params)
        assert {leaf.shape for leaf in jax.tree.leaves(state.critic.params["head"])} == {(16,), ()}
        assert "lm_head" not in state.critic.params["trunk"]
        state, first = learner.learn(state, groups, 0)
        assert first["critic/value_mean"] == 0.0 and first["critic/explained_variance"] == 0.0
        found.append((jax.device_get(state.params), first))
        if rate == 1e-2:
            assert int(state.critic.updates) == int(state.updates) == 4
            for _ in range(6):
                state, last = learner.learn(state, groups, 0)
            assert last["critic/loss"] < first["critic/loss"]
            assert last["critic/explained_variance"] > 0.3
    (policy, metrics), (other, _) = found
    jax.tree.map(np.testing.assert_array_equal, policy, other)
    assert metrics["critic/gradient_norm"] > 0


def test_ppo_passes_over_what_a_tool_answered(params, groups, monkeypatch):
    """gamma 1/2, lambda 1/2, values of 1/2: by hand over the tokens that the policy sampled, as if the others
    were not there. What the critic says of these is not looked at.
    """
    own = np.asarray([True, True, False, False, True])
    logprobs = np.where(own, -1.0, 0.0).astype(np.float32)
    completion = Completion(np.arange(5, dtype=np.int32), logprobs, "eos", sampled_mask=own)
    groups = [*groups[:2], dataclasses.replace(groups[2], completions=[completion] * 2)]  # rewards of 1/4
    keys = {"name": "ppo", "advantage_normalization": "none", "discount": 0.5, "gae_lambda": 0.5}
    learner = make_learner(params, keys | {"kl_coefficient": 0.0})

    def values(params, batches):
        return [np.where(batch.response_mask, np.float32(0.5), np.float32(np.nan)) for batch in batches]

    monkeypatch.setattr(learner._critic, "values", values)
    minibatches, metrics = prepared(learner, params, groups)
    assert metrics["critic/value_mean"] == 0.5 and np.isfinite(metrics["critic/explained_variance"])
    # Deltas 0.25 - 0.5 twice, then 0.25 - 0.5 = -0.25 for the reward: A = -0.25, -0.3125, -0.328125.
    expected = np.asarray([-0.328125, -0.3125, 0.0, 0.0, -0.25])
    (minibatch,) = minibatches
    returns = np.concatenate([targets.returns for targets in minibatch.value_targets])
    for member, (row, positions) in zip(minibatch.members, minibatch.places, strict=True):
        if member >= 4:
            np.testing.assert_allclose(returns[row, positions], np.where(own, expected + 0.5, 0.0), rtol=1e-6)
    for member in (4, 5):
        np.testing.assert_allclose(tokens_of(minibatches, "advantages")[member], expected, rtol=1e-6)
        np.testing.assert_array_equal(tokens_of(minibatches, "weights")[member] > 0, own)


def test_nothing_compiles_after_warm_up(params, groups):
    pool = NamingPool()
    learner = make_learner(params, WITH_CRITIC, pool, minibatches_per_step=2)
    state = learner.init(params)
    learner.warm_up(state)
    pool.complete = True
    learner.learn(state, groups, 0)


_ON_A_MESH = """
import json, sys
import jax, numpy as np
from rljax.config import MeshConfig
from rljax.engine.executables import ExecutablePool
from rljax.sharding import make_mesh
from tests.training.test_learner import WITH_CRITIC, make_groups, make_learner, make_params

params = make_params()
mesh = make_mesh(MeshConfig(data=2, tensor=2))
sizes = {"minibatches_per_step": 2, "rows_per_microbatch": 2}
learner = make_learner(params, WITH_CRITIC, ExecutablePool(), mesh, **sizes)
state, metrics = learner.learn(learner.init(params), make_groups(params), 0)
np.savez(sys.argv[1], *jax.tree.leaves(jax.device_get((state.params, state.critic))))
print("FOUND" + json.dumps(metrics))
"""


@pytest.mark.long  # tests/test_sharding.py has its gradients
def test_a_mesh_changes_rounding_only(params, groups, tmp_path):
    """Two devices share the rows and two the layers, of policy and critic; in a process of its own."""
    learner = make_learner(params, WITH_CRITIC, minibatches_per_step=2)
    state, metrics = learner.learn(learner.init(params), groups, 0)
    other = run_on_devices(_ON_A_MESH, 4, tmp_path / "leaves.npz")
    with np.load(tmp_path / "leaves.npz") as others:
        leaves = jax.tree.leaves(jax.device_get((state.params, state.critic)))
        for leaf, name in zip(leaves, others.files, strict=True):
            # Adam's first steps are nearly signs: small gradients decide.
            np.testing.assert_allclose(others[name], leaf, rtol=0, atol=1e-3)
    for key in ("loss/policy", "gradient_norm", "entropy", "correction/ratio_mean", "critic/loss"):
        assert other[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-5), key
    assert other["critic/gradient_norm"] == pytest.approx(metrics["critic/gradient_norm"], rel=1e-3)


def test_sharing_is_foreseen_from_the_first_prompts(params):
    """Responses are taken to be half as long as they may be, of samples_per_prompt: 2."""
    for share_prompts, num_prompt, pack_length, expected in (
        ("auto", 100, 512, True),
        ("auto", 4, 512, False),  # few of the tokens are copies
        ("auto", 100, 128, False),  # a small micro-batch
        ("off", 100, 512, False),
        ("on", 1, 32, True),
    ):
        sizes = {"pack_length": pack_length, "rows_per_microbatch": 2}
        learner = make_learner(params, PLAIN, share_prompts=share_prompts, **sizes)
        assert learner.expects_sharing([list(range(num_prompt))]) == expected
