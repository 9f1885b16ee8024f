"""Compares a head that is trained along with the policy to one that is not (TLT, Table 6 and Figure 16).

Three heads: *frozen* after its warm-up; *trained on*, for as many slices more as the adapted one, but on the
base policy's rollouts, to tell more training from adapting; *adapted*, on the rollouts of each RL step,
before that step's update, as it would be in a run: it is always one update behind.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.evaluation import Acceptance
from drafters.eagle.model import HeadConfig, shared_params
from drafters.eagle.spot_trainer import HeadTrainer
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.models.transformer import Params
from rljax.progress import Progress
from rljax.training import loop
from rljax.training.drafter_warm_up import PolicyRollouts, WarmUp, make_trainer, measure
from rollout_benchmarks.variants import collect_step, open_run, with_keys


def adaptation_rows(config: ExperimentConfig, settings: WarmUp, rl_steps: int, slices: int) -> list[Row]:
    """Measures accept lengths of the three heads, with the base policy and with the policy after RL.

    Args:
      rl_steps: real policy updates.
      slices: number of slices of the head in each of these steps.
    """
    with open_run(trained_with(config, rl_steps)) as (run, progress):
        head = HeadConfig(settings.variant, run.trainer.config)
        rollouts = PolicyRollouts(run, head)
        trainer = make_trainer(run, head, settings)
        # A copy, because the policy's updates donate its arrays.
        base = jax.tree.map(jnp.copy, shared_params(run.state.params, head.policy))
        base_heldout = rollouts.heldout(settings.heldout)
        warm_up_head(trainer, rollouts, settings, base, progress)
        heads: dict[str, Params] = {"frozen": trainer.params}
        warm = trainer.state()
        for step in range(rl_steps):
            begin(trainer, rollouts, step)
            for _ in range(slices):
                trainer.slice(base)
        heads["trained on"] = trainer.params
        trainer.load_state(warm)
        rewards = []
        progress.stage("rl", rl_steps)
        for step in range(rl_steps):
            groups, _, _ = collect_step(run, run.collector, step)
            trainer.begin_step(step)
            for sequence in rollouts.read(groups):
                trainer.add(*sequence)
            shared = shared_params(run.state.params, head.policy)
            for _ in range(slices):
                trainer.slice(shared)
            rewards.append(float(np.mean([group.reward for group in groups])))
            loop.learn(run, groups)
            progress.step(step + 1, {"reward": rewards[-1]})
        heads["adapted"] = trainer.params
        updated, updated_heldout = (
            shared_params(run.state.params, head.policy),
            rollouts.heldout(settings.heldout),
        )
        policies = {"base": (base, base_heldout), "RL": (updated, updated_heldout)}
        measured: dict[tuple[str, str], Acceptance] = {
            (policy, name): measure(run, head, params, shared, heldout, settings.depth)
            for policy, (shared, heldout) in policies.items()
            for name, params in heads.items()
        }
    details = {
        "variant": settings.variant,
        "warm_up_slices": settings.steps,
        "slices_per_step": slices,
        "rl_steps": rl_steps,
        "policy_learning_rate": config.optimizer.learning_rate,
        "reward_first_step": rewards[0],
        "reward_last_step": rewards[-1],
    }
    rows = []
    for (policy, name), acceptance in measured.items():
        lengths = acceptance.accept_length, measured[policy, "frozen"].accept_length
        label, baseline = f"adaptation/{policy} policy/{name} head", f"{policy} policy, frozen head"
        rows.append(
            counted_row(label, *lengths, "tokens a pass", baseline, **details, **by_position(acceptance))
        )
    return rows


def by_position(acceptance: Acceptance) -> dict[str, Any]:
    """Details of a row about a head."""
    return {
        "acceptance_by_position": list(acceptance.by_position),
        "agreement_by_position": list(acceptance.agreement),
        "starts": acceptance.starts,
    }


def trained_with(config: ExperimentConfig, steps: int) -> ExperimentConfig:
    """Returns the config with `steps` updates of the policy at a constant learning rate."""
    return with_keys(config, optimizer={"warmup_steps": 0}, training={"steps": steps})


def warm_up_head(
    trainer: HeadTrainer, rollouts: PolicyRollouts, settings: WarmUp, shared: Params, progress: Progress
) -> None:
    """Trains all slices of a warm-up on rollouts of the current policy; `shared` is its embeddings and LM
    head.
    """
    progress.stage("warm-up", settings.steps, sparse=True)
    for done in range(settings.steps):
        if done % settings.slices_per_round == 0:
            begin(trainer, rollouts, done // settings.slices_per_round)
        trainer.slice(shared)
        progress.step(done + 1, {})


def begin(trainer: HeadTrainer, rollouts: PolicyRollouts, step: int) -> None:
    """Passes a step's rollouts of the current policy to the trainer."""
    trainer.begin_step(step)
    for sequence in rollouts.training(step):
        trainer.add(*sequence)
