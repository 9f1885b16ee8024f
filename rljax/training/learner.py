"""Learning from a step's rollouts: from rewarded groups to the updates of policy and critic.

1. Shuffle the responses into mini-batches, pack each, and cut it into micro-batches (`minibatches.py`).
2. Score them with the weights of the rollout: logprobs of the reference (for a KL penalty) and of the policy
   (for rollout correction), and values of the critic. Scores that the algorithm does not need are left out.
3. Prepare the advantage and the weight of every token, on the host and for the whole step. Leave out the
   responses without advantage where nothing else in the loss has a gradient on them.
4. Update policy and critic, mini-batch by mini-batch.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from rljax.algorithms.estimation import Estimate, estimate_advantages
from rljax.algorithms.kl import kl_estimate
from rljax.algorithms.losses import aggregation_weights
from rljax.algorithms.returns import explained_variance
from rljax.algorithms.reward_shaping import soft_overlong_punishment
from rljax.algorithms.rollout_correction import rollout_correction
from rljax.assembly.policy import Policy
from rljax.config import ExperimentConfig
from rljax.errors import UserError
from rljax.learning.accumulation import TrainState
from rljax.learning.optimizer import make_optimizer
from rljax.models.transformer import Params
from rljax.requests import spans_of
from rljax.rollout.collector import Group
from rljax.training.critic import Critic, ValueTargets
from rljax.training.minibatches import (
    Minibatch,
    completions_of,
    make_minibatches,
    members_with_gradient,
    pack_minibatch,
    padding_share,
    shared_share,
    shares_prompts,
)
from rljax.training.objectives import WEIGHT
from rljax.training.reference import Reference
from rljax.training.update import Trainer


def make_critic(config: ExperimentConfig, trainer: Trainer) -> Critic | None:
    """Returns the critic of an experiment; None if its algorithm trains none. Arguments as in `Learner`."""
    algorithm, training = config.algorithm, config.training
    if algorithm.advantage_baseline != "critic":
        return None
    optimizer = make_optimizer(algorithm.critic, training.updates, "algorithm.critic")
    value_clip, where = algorithm.critic.value_clip, (trainer.pool, trainer.mesh)
    return Critic(trainer.config, trainer.numerics, training, value_clip, optimizer, *where)


class Learner:
    """Updates policy and critic by the settings of `config.algorithm`.

        state = learner.init(policy_params)
        state, metrics = learner.learn(state, groups, step=0)

    Args:
      trainer: trainer of the policy; a critic has its architecture, numerics and devices.
      policy_params: weights that the run starts from; copied if they are the reference of a run that trains
        all weights. Under LoRA they are the base.
      teacher: the reference in their place, from `reference.load_teacher`.

    Attributes:
      reference_digest: digest of the reference's weights; None without a reference.
    """

    def __init__(
        self, config: ExperimentConfig, trainer: Trainer, policy_params: Params, teacher: Policy | None = None
    ) -> None:
        self._config = config
        self._algorithm = algorithm = config.algorithm
        self._trainer = trainer
        self._reference = None
        if algorithm.kl_coefficient > 0 and teacher is not None:
            self._reference = Reference(trainer.of_architecture(teacher.config), teacher.params)
        elif algorithm.kl_coefficient > 0:
            self._reference = Reference(trainer, policy_params)
        self._kl_in_loss = self._reference is not None and algorithm.kl_in == "loss"
        self.reference_digest = None if self._reference is None else self._reference.digest
        self._critic = make_critic(config, trainer)

    def init(self, policy_params: Params) -> TrainState:
        """Returns the state before the first step, including the critic's. `policy_params` are those of
        `Learner`, and stay valid.
        """
        critic = None if self._critic is None else self._critic.init(policy_params)
        state = self._trainer.init(policy_params)
        if self._reference is not None:
            self._reference.share(state)
        return state.replace(critic=critic)

    def expects_sharing(self, prompts: Sequence[ArrayLike]) -> bool:
        """Returns whether prompts will be shared if responses take half of their limit.

        Args:
          prompts: prompts of the first step.
        """
        rollout = self._config.rollout
        every = [prompt for prompt in prompts for _ in range(rollout.samples_per_prompt)]
        lengths = [len(prompt) + rollout.max_response_length // 2 for prompt in every]
        return shares_prompts(self._trainer.share_prompts, every, lengths, self._config.training)

    def warm_up(
        self, state: TrainState, sampler: Params | None = None, sizes: Sequence[int] | None = None
    ) -> None:
        """Compiles every program that `learn` needs, without running any.

        Args:
          state: from `init`.
          sampler: weights like those of `sampled_by`; None where `learn` gets none.
          sizes: numbers of rows of micro-batches; None for all of `Trainer.sizes`.
        """
        if sampler is not None:
            self._trainer.warm_up_score(self._trainer.place(sampler), sizes)
        policy_state = state.replace(critic=None)
        self._trainer.warm_up(policy_state, self._kl_in_loss, sizes)
        if self._reference is not None:
            self._reference.warm_up(sizes)
        if self._critic is not None:
            self._critic.warm_up(state.critic, sizes)

    def learn(
        self,
        state: TrainState,
        groups: Sequence[Group],
        step: int,
        on_update: Callable[[int], None] = lambda number: None,
        sampled_by: Mapping[int, Params] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Runs all updates of one step. Consumes `state`.

        Args:
          state: the state whose weights sampled the groups, or that comes some steps after it.
          groups: P prompts with G responses each, and their rewards.
          step: number of the step, from 0; with the seed it determines the order of the mini-batches.
          on_update: called with the number of each update, from 1, before it begins.
          sampled_by: weights by the versions that sampled the groups (`Completion.versions`); None where all
            are those of `state`.

        Returns:
          The new state, and metrics averaged over the updates (see `Trainer.update`), with `update/padding`
          (share of what is computed), `update/prompt_tokens_shared` (share of the tokens that are copies of
          prompts and not computed again), `time/logprobs` and `time/update`; `update/skipped`, the share of
          response tokens whose responses were left out because nothing is learned from them (entropy,
          mismatch and `policy/...` are measured on the others); `correction/...` with a rollout correction
          (see `rollout_correction`), `reward/kl_penalty` (mean KL penalty per response) with kl_in: reward,
          with a teacher also `teacher/kl` (KL of the policy to it, by k1, in nats per token), and
          `critic/...` with a critic. With `sampled_by`, `mismatch/...` is that of all tokens, each under
          the version that sampled it.
        """
        minibatches = self._pack(groups, step)
        scoring_start = time.perf_counter()
        self._score(state, minibatches)
        mismatch = {} if sampled_by is None else self._mismatch(groups, minibatches, sampled_by)
        update_start = time.perf_counter()
        minibatches, prepared = self._prepare(groups, minibatches)
        state, updated = self._update(state, minibatches, on_update)
        end = time.perf_counter()
        return state, {
            **updated,
            **mismatch,
            **prepared,
            "update/padding": padding_share(minibatches),
            "update/prompt_tokens_shared": shared_share(minibatches),
            "time/logprobs": update_start - scoring_start,
            "time/update": end - update_start,
        }

    # -- stages, in order ------------------------------------------------------------------------------------

    def _pack(self, groups: Sequence[Group], step: int) -> list[Minibatch]:
        training, trainer, seed = self._config.training, self._trainer, (self._config.seed, step)
        return make_minibatches(groups, training, seed, trainer.row_multiple, trainer.share_prompts)

    def _score(self, state: TrainState, minibatches: Sequence[Minibatch]) -> None:
        """Computes logprobs and values with the weights before the first update."""
        for minibatch in minibatches:
            if self._reference is not None:
                minibatch.reference_logprobs = self._reference.score(minibatch.batches)
            if self._algorithm.corrects_rollout:
                minibatch.old_logprobs = self._trainer.score(state.params, minibatch.batches)
            if self._critic is not None:
                minibatch.old_values = self._critic.values(state.critic.params, minibatch.batches)

    def _mismatch(
        self, groups: Sequence[Group], minibatches: Sequence[Minibatch], sampled_by: Mapping[int, Params]
    ) -> dict[str, float]:
        """Compares the rollout's logprobs with those of the training pass under the versions of the weights
        that sampled them: the first update, which otherwise does, has newer ones.
        """
        completions, longest = completions_of(groups), self._config.rollout.max_response_length
        found = np.zeros((len(completions), longest), np.float32)
        for version in sorted({version for each in completions for _, version in each.versions}):
            # As the trainer has them on its mesh; on one device they stay as they are.
            params = self._trainer.place(sampled_by[version])
            scores = np.zeros_like(found)
            for minibatch in minibatches:
                minibatch.collect_tokens(self._trainer.score(params, minibatch.batches), scores)
            for scored, into, completion in zip(scores, found, completions, strict=True):
                for begin, end in spans_of(completion, version):
                    into[begin:end] = scored[begin:end]
        differences = []
        for scored, completion in zip(found, completions, strict=True):
            difference = np.abs(scored[: len(completion.logprobs)] - completion.logprobs)
            mask = completion.sampled_mask
            differences.append(difference if mask is None else difference[mask])
        every = np.concatenate(differences)
        return {
            "mismatch/logprob_abs_mean": float(every.mean(dtype=np.float64)),
            "mismatch/logprob_abs_max": float(every.max()),
            "mismatch/tokens": float(np.count_nonzero(every)),
        }

    def _prepare(
        self, groups: Sequence[Group], minibatches: Sequence[Minibatch]
    ) -> tuple[list[Minibatch], dict[str, float]]:
        """Returns mini-batches with advantages, weights and value targets, and metrics."""
        config, algorithm = self._config, self._algorithm
        longest = config.rollout.max_response_length
        rewards = np.stack([group.reward for group in groups])  # [P, G]
        scored = ~np.isnan(rewards) if algorithm.reward_coefficient else np.ones(rewards.shape, bool)
        rewards = np.where(np.isnan(rewards), 0.0, rewards)
        completions = completions_of(groups)
        lengths = np.asarray([len(completion.response_ids) for completion in completions])
        rewards = algorithm.reward_coefficient * rewards
        owners = _owners(groups)
        if algorithm.overlong_buffer:
            rewards = rewards + soft_overlong_punishment(
                lengths, longest, algorithm.overlong_buffer, algorithm.overlong_penalty
            ).reshape(rewards.shape)
        mask = np.arange(longest) < lengths[:, None]  # [N, L]
        rollout_logprobs = np.zeros(mask.shape, np.float32)
        for logprobs, sampled, completion in zip(rollout_logprobs, mask, completions, strict=True):
            logprobs[: len(completion.logprobs)] = completion.logprobs
            if completion.sampled_mask is not None:
                sampled[: len(completion.sampled_mask)] = completion.sampled_mask

        # Of responses with a reward: the others are in no mean, and nothing is learned from them.
        counted = mask & scored.reshape(-1)[slice(None) if owners is None else owners][:, None]

        def collected_tokens(name: str) -> np.ndarray:
            values = np.zeros(mask.shape, np.float32)
            for minibatch in minibatches:
                minibatch.collect_tokens(getattr(minibatch, name), values)
            return values

        metrics: dict[str, float] = {}
        penalties = None
        if self._reference is not None and algorithm.kl_in == "reward":
            penalties = self._kl_penalties(rollout_logprobs, collected_tokens("reference_logprobs"), mask)
            metrics["reward/kl_penalty"] = float(penalties.sum(axis=1).mean())
            if algorithm.teacher is not None:
                metrics["teacher/kl"] = float(penalties.sum() / mask.sum()) / algorithm.kl_coefficient
        values = None if self._critic is None else collected_tokens("old_values")
        estimate = estimate_advantages(
            np.asarray(rewards, np.float32),
            jnp.asarray(counted),
            algorithm.advantage_baseline,
            algorithm.advantage_normalization,
            algorithm.discount,
            algorithm.gae_lambda,
            None if penalties is None else jnp.asarray(penalties),
            None if values is None else jnp.asarray(values),
            None if owners is None else jnp.asarray(owners),
            None if scored.all() else scored,
        )
        advantages, kept = np.asarray(estimate.advantages), counted
        if algorithm.mask_truncated:
            whole = np.asarray([completion.finish_reason != "length" for completion in completions])
            kept = counted & whole[:, None]
        if algorithm.corrects_rollout:
            correction = rollout_correction(
                jnp.asarray(collected_tokens("old_logprobs")),
                jnp.asarray(rollout_logprobs),
                jnp.asarray(mask),
                algorithm.correction_cap,
                algorithm.correction_mask,
                algorithm.correction_low,
                algorithm.correction_high,
            )
            advantages, kept = advantages * np.asarray(correction.factors), kept & np.asarray(correction.kept)
            metrics |= {f"correction/{name}": float(value) for name, value in correction.metrics.items()}
        if values is not None:
            explained = explained_variance(jnp.asarray(values), estimate.returns, jnp.asarray(counted))
            metrics |= {
                "critic/explained_variance": float(explained),
                "critic/value_mean": float(values[counted].mean()),
            }
        prepared = []
        for minibatch in minibatches:
            weights = self._token_weights(minibatch, kept)
            if algorithm.skips_responses:
                minibatch = self._without_zero_advantages(groups, minibatch, advantages, kept)
            self._fill_in(minibatch, advantages, weights, estimate)
            prepared.append(minibatch)
        if algorithm.skips_responses:
            learned = np.concatenate([minibatch.members for minibatch in prepared])
            metrics["update/skipped"] = 1.0 - float(mask[learned].sum() / mask.sum())
        return prepared, metrics

    def _without_zero_advantages(
        self, groups: Sequence[Group], minibatch: Minibatch, advantages: np.ndarray, kept: np.ndarray
    ) -> Minibatch:
        """Returns the mini-batch packed again without the responses that have no gradient."""
        members = members_with_gradient(minibatch, advantages, kept)
        if len(members) == len(minibatch.members):
            return minibatch
        training, trainer = self._config.training, self._trainer
        packed = pack_minibatch(groups, members, training, trainer.row_multiple, trainer.share_prompts)
        if minibatch.old_logprobs is not None:
            old_logprobs = np.zeros(kept.shape, np.float32)
            minibatch.collect_tokens(minibatch.old_logprobs, old_logprobs)
            packed.old_logprobs = packed.to_microbatches(old_logprobs)
        return packed

    def _kl_penalties(
        self, logprobs: np.ndarray, reference_logprobs: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """Returns the KL penalty on the reward of each token, [N, L]."""
        algorithm = self._algorithm
        both = [jnp.asarray(np.where(mask, array, 0.0)) for array in (logprobs, reference_logprobs)]
        return algorithm.kl_coefficient * np.asarray(kl_estimate(*both, algorithm.kl_estimator))

    def _token_weights(self, minibatch: Minibatch, kept: np.ndarray) -> np.ndarray:
        """Returns the weight of each token in the loss, float32 [N, L], averaged over all members."""
        lengths = kept[minibatch.members].sum(axis=1)
        weights = np.zeros(kept.shape, np.float32)
        if lengths.any():  # otherwise every token is masked, and the gradient is 0
            longest = self._config.rollout.max_response_length
            response_weights = aggregation_weights(lengths, self._algorithm.aggregation, longest)
            weights[minibatch.members] = np.where(kept[minibatch.members], response_weights[:, None], 0.0)
        return weights

    def _fill_in(
        self, minibatch: Minibatch, advantages: np.ndarray, weights: np.ndarray, estimate: Estimate
    ) -> None:
        """Sets advantages, weights, old logprobs and value targets of a packed mini-batch."""
        olds = minibatch.old_logprobs or [None] * len(minibatch.batches)
        minibatch.batches = [
            batch.replace(
                advantages=advantage,
                weights=weight,
                # Masked tokens are left out of ratios, too: a sequence ratio (GSPO) would give them a
                # gradient.
                old_logprobs=None if old is None else np.where(weight > 0, old, np.float32(-np.inf)),
            )
            for batch, advantage, weight, old in zip(
                minibatch.batches,
                minibatch.to_microbatches(advantages),
                minibatch.to_microbatches(weights),
                olds,
                strict=True,
            )
        ]
        if estimate.returns is not None:
            returns = minibatch.to_microbatches(np.asarray(estimate.returns))
            minibatch.value_targets = [
                ValueTargets(new, old) for new, old in zip(returns, minibatch.old_values, strict=True)
            ]

    def _update(
        self, state: TrainState, minibatches: Sequence[Minibatch], on_update: Callable[[int], None]
    ) -> tuple[TrainState, dict[str, float]]:
        """Runs the updates. Metrics are averaged over them, except for the mismatch, which is that of the
        first update: only this one has the weights of the rollout, for which a row-invariant engine shows 0.
        """
        collected: list[dict[str, float]] = []
        policy, critic = state.replace(critic=None), state.critic
        for epoch in range(self._config.training.epochs_per_step):
            for number, minibatch in enumerate(minibatches, 1):
                on_update(epoch * len(minibatches) + number)
                reference = minibatch.reference_logprobs if self._kl_in_loss else None
                policy, metrics = self._trainer.update(policy, minibatch.batches, reference)
                _check_gradient("policy", metrics, "optimizer.learning_rate")
                if self._critic is not None:
                    critic, more = self._critic.update(critic, minibatch.batches, minibatch.value_targets)
                    _check_gradient("critic", more, "algorithm.critic.learning_rate")
                    # A mean over tokens, like the metrics of the policy.
                    more["clip_fraction"] /= metrics.get(WEIGHT, 1.0) or 1.0
                    metrics |= {f"critic/{name}": value for name, value in more.items()}
                collected.append(metrics)
        first = {name: value for name, value in collected[0].items() if name.startswith("mismatch/")}
        averaged = {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}
        return policy.replace(critic=critic), averaged | first


def _owners(groups: Sequence[Group]) -> np.ndarray | None:
    """Returns the index of each completion's reward among those of the step; None where it is its own."""
    if all(group.episodes is None for group in groups):
        return None
    size = len(groups[0].rewards)
    return np.asarray(
        [place + number * size for number, group in enumerate(groups) for place in group.places]
    )


def _check_gradient(model: str, metrics: dict[str, float], key: str) -> None:
    """Raises a UserError if the gradient is not finite, before a checkpoint keeps the lost weights."""
    norm = metrics["gradient_norm"]
    if not np.isfinite(norm):
        raise UserError(
            f"update: the gradient norm of the {model} is {norm}, and its weights are lost; the newest"
            f" checkpoint is from before that. Go on from it with a smaller {key}, or check the rewards"
        )
