"""The policy that a run starts from: a Hugging Face checkpoint, or a new one with random weights."""

import dataclasses
import datetime
from pathlib import Path

from rljax import processes
from rljax.config import ExperimentConfig, GrowthConfig, PolicyConfig, ShapeConfig
from rljax.environments.use import training_texts
from rljax.errors import ConfigError, TokenizerError
from rljax.models.config import ModelConfig
from rljax.models.growth import grow
from rljax.models.huggingface import load_generation_config, load_model_config, load_params
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params, init_params
from rljax.tasks.base import Task
from rljax.tasks.tokenizer_training import train_tokenizer
from rljax.training.adapter import keeps_base, load_in_compute_dtype

_TOKENIZER_PROBLEMS = 2000
TOKENIZER_VOCAB = 320
_VOCAB_MULTIPLE = 64  # rows of the embedding are rounded up: even shapes for kernels and meshes


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy with its tokenizer.

    Attributes:
      config: architecture.
      params: float32 weights; of a run with LoRA, matrices in the compute dtype.
      tokenizer: tokenizer.
      tokenizer_directory: directory of the tokenizer's files.
      eos_token_ids: tokens that end a response.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    tokenizer_directory: Path
    eos_token_ids: tuple[int, ...]


def make_policy(config: ExperimentConfig, task: Task, directory: Path) -> Policy:
    """Loads `policy.path`, or creates a policy of `policy.shape` and trains a tokenizer on the task's texts.

    Args:
      config: the experiment.
      task: task whose texts a new tokenizer is trained on.
      directory: directory to save a new tokenizer in.
    """
    if config.policy.path is None:
        processes.from_first(lambda: _make_tokenizer(task, directory))
    model_config, tokenizer, source, eos_token_ids = policy_parts(config, directory)
    if config.policy.lora is not None and not keeps_base(config):
        params = load_in_compute_dtype(source, model_config, config.policy.compute_dtype)
    elif config.policy.path is not None:
        params = load_params(source, model_config, dtype="float32")
    else:
        params = init_params(model_config, config.seed)
    return Policy(model_config, params, tokenizer, source, eos_token_ids)


def _make_tokenizer(task: Task, directory: Path) -> None:
    """Trains a tokenizer on the task's texts, unless the directory has one."""
    if (directory / "tokenizer.json").exists():
        return
    problems = [task.problem("warm_start", index) for index in range(_TOKENIZER_PROBLEMS)]
    texts = [text for problem in problems for text in training_texts(task, problem)]
    try:
        train_tokenizer(texts, TOKENIZER_VOCAB, directory)
    except OSError as error:
        raise TokenizerError(f"{directory}: cannot be written ({error.strerror})") from error


def policy_parts(
    config: ExperimentConfig, directory: Path
) -> tuple[ModelConfig, Tokenizer, Path, tuple[int, ...]]:
    """Returns the policy of `make_policy` without its weights, in the order of `Policy`'s attributes. The
    tokenizer must exist.
    """
    if config.policy.path is not None:
        path = Path(config.policy.path)
        model_config = load_model_config(path)
        tokenizer = _tokenizer(path, config.policy)
        tokenizer.check_fits(model_config)
        return model_config, tokenizer, path, load_generation_config(path).eos_token_ids
    tokenizer = _tokenizer(directory, config.policy)
    model_config = shape_config(config.policy.shape, tokenizer.vocab_size)
    return model_config, tokenizer, directory, (tokenizer.eos_token_id,)


def shape_config(shape: ShapeConfig, vocab_size: int) -> ModelConfig:
    """Returns the architecture of a new policy for a tokenizer of so many tokens."""
    vocab_size = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    architecture = "qwen3" if shape.qk_norm else "qwen2" if shape.attention_bias else "llama"
    return ModelConfig(architecture=architecture, vocab_size=vocab_size, **shape.model_dump())


def _tokenizer(directory: Path, config: PolicyConfig) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    tokenizer.chat_date = datetime.date.fromisoformat(config.chat_date)
    tokenizer.template_args = config.chat_template_args
    return tokenizer


def grown_policy(policy: Policy, growth: GrowthConfig, seed: int) -> Policy:
    """Returns a larger policy that computes the same function; a smaller one is a ConfigError."""
    try:
        params, config = grow(policy.params, policy.config, **growth.model_dump(), seed=seed)
    except ValueError as error:
        raise ConfigError(f"policy.growth: {error}") from error
    return dataclasses.replace(policy, params=params, config=config)


def check_policy(config: ExperimentConfig, policy: Policy) -> None:
    """Raises a ConfigError if the config's sequences are longer than the policy's maximum, before anything is
    compiled. `Prompts.check` is about the prompts.
    """
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    if policy.config.max_positions < longest:
        raise ConfigError(
            f"policy: it is made for sequences of {policy.config.max_positions} tokens, less than"
            f" rollout.max_prompt_length + max_response_length = {longest}"
        )
