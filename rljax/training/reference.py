"""The reference of a KL penalty: the policy before RL, or a teacher (`algorithm.teacher`). Under LoRA the
policy before RL is the base, which the trainer holds anyway.

With a teacher and the KL in the reward, every token is rewarded by how much likelier the teacher finds it.
This is on-policy distillation: the reverse KL of GKD (Agarwal et al., arXiv 2306.13649) on samples
of the policy, as a policy gradient (Gu et al., MiniLLM, arXiv 2306.08543, section 2.2).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.assembly.policy import Policy
from rljax.assembly.saved_policy import load_saved_policy
from rljax.config import ExperimentConfig
from rljax.errors import CheckpointError, ConfigError, TokenizerError
from rljax.learning.accumulation import TrainState
from rljax.learning.packing import PackedBatch
from rljax.models.digest import weights_digest
from rljax.models.lora import matrices_of, with_matrices
from rljax.models.transformer import Params, num_params
from rljax.training.factor_updates import base_params
from rljax.training.update import Trainer


class Reference:
    """Frozen weights that score the responses of a step.

    Args:
      trainer: trainer of the reference's architecture; it only scores.
      params: weights; copied, unless the trainer trains an adapter beside them: then `share` gives the copy
        that it has.

    Attributes:
      digest: digest of the weights.
    """

    def __init__(self, trainer: Trainer, params: Params) -> None:
        self.digest = weights_digest(params)
        self._trainer = trainer
        self._params: Params | None = None
        if trainer.adapter is None:
            self._params = trainer.place(jax.tree.map(jnp.copy, params))
        elif trainer.adapter.is_trained:
            self.digest = weights_digest({"base": params, "factors": trainer.adapter.factors})

    def share(self, state: TrainState) -> None:
        """Takes the weights from the state before the first update, unless they are there: the base or, where
        the adapter was trained before, a copy of what is merged.
        """
        if self._params is not None:
            return
        self._params = base_params(state)
        if self._trainer.adapter.is_trained:
            merged = matrices_of(state.params, self._trainer.adapter.lora)
            self._params = with_matrices(state.params, jax.tree.map(jnp.copy, merged))

    def score(self, batches: Sequence[PackedBatch]) -> list[np.ndarray]:
        """Returns logprobs of the targets, float32 [R, T] per batch; see `Trainer.score`."""
        return self._trainer.score(self._params, batches, unfiltered=True)

    def warm_up(self, sizes: Sequence[int] | None = None) -> None:
        """Compiles every program that `score` needs, without running any; `sizes` as in `Trainer.warm_up`."""
        self._trainer.warm_up_score(self._params, sizes, unfiltered=True)


def load_teacher(config: ExperimentConfig, policy: Policy) -> Policy | None:
    """Loads the teacher of an experiment; returns None if it has none.

    Raises:
      ConfigError: there is no such model, it has other tokens than the policy, or its sequences are too
        short.
    """
    path = config.algorithm.teacher
    if path is None:
        return None
    try:
        teacher = load_saved_policy(path).policy
    except (CheckpointError, TokenizerError) as error:
        raise ConfigError(f"algorithm.teacher: {error}") from error
    if not teacher.tokenizer.same_tokens(policy.tokenizer):
        raise ConfigError(
            f"algorithm.teacher: {path} has another tokenizer than the policy; a teacher judges the policy's"
            " tokens one by one, so it needs the same ones"
        )
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    if teacher.config.max_positions < longest:
        raise ConfigError(
            f"algorithm.teacher: {path} is made for sequences of {teacher.config.max_positions} tokens, less"
            f" than rollout.max_prompt_length + max_response_length = {longest}"
        )
    return teacher


def teacher_line(path: str, teacher: Policy) -> str:
    """Returns one line for the user."""
    return f"teacher: {path}, {num_params(teacher.config):,} parameters"
