"""The job that TRL is given: an exported policy, prompts with answers, and settings."""

import dataclasses
import json
from pathlib import Path

from rljax.config import ExperimentConfig
from rljax.errors import UserError
from rljax.models.huggingface import save_model
from rljax.training.training_run import TrainingRun

WARM_STEPS = 1
"""Steps at the beginning that compile and do not count."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a library: rollouts, rewards and update.

    Attributes:
      tokens: response tokens.
    """

    seconds: float
    tokens: int
    reward: float


def check_config(config: ExperimentConfig) -> None:
    """Raises a UserError for a config that TRL cannot be given."""
    if config.algorithm.name != "grpo" or config.algorithm.kl_coefficient:
        raise UserError("algorithm: the comparison is GRPO without KL; set algorithm.kl_coefficient=0")
    if config.training.minibatches_per_step != 1:
        raise UserError("training.minibatches_per_step: the comparison makes one update a step; set it to 1")
    if config.policy.compute_dtype not in ("float32", "bfloat16"):
        raise UserError("policy.compute_dtype: the comparison knows float32 and bfloat16")


def write_job(run: TrainingRun, prompts: list[dict[str, str]], micro_batch: int, directory: Path) -> None:
    """Writes the job that `trl_grpo.py` reads, and the policy that it begins with.

    Args:
      run: the experiment, before its first step.
      prompts: for every step and prompt {"prompt": text with the chat template applied, "answer": text}.
      micro_batch: sequences of an update that are computed at a time: whole groups.
      directory: must exist.
    """
    config, tokenizer = run.config, run.tokenizer_directory
    save_model(directory / "policy", run.engine.config, run.state.params, "float32", tokenizer)
    job = {
        "policy": str(directory / "policy"),
        "prompts": prompts,
        "prompts_per_step": config.rollout.prompts_per_step,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "micro_batch": micro_batch,
        "steps": config.training.steps,
        "max_prompt_length": config.rollout.max_prompt_length,
        "max_response_length": config.rollout.max_response_length,
        "temperature": config.rollout.temperature,
        "eos_token_ids": list(run.engine.eos_token_ids),
        "learning_rate": config.optimizer.learning_rate,
        "beta2": config.optimizer.beta2,
        "dtype": config.policy.compute_dtype,
        "seed": config.seed,
    }
    (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")
