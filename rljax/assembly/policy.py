"""The policy that a run starts from: a Hugging Face checkpoint, or a new one with random weights."""

import dataclasses
import datetime
from pathlib import Path

from rljax import processes
from rljax.assembly.adapter import keeps_base, load_in_compute_dtype
from rljax.config import ExperimentConfig, GrowthConfig, ShapeConfig
from rljax.environments.use import training_texts
from rljax.errors import CheckpointError, ConfigError, TokenizerError
from rljax.hub import local_directory
from rljax.models.chat_turns import ChatTurns
from rljax.models.config import ModelConfig
from rljax.models.growth import grow
from rljax.models.huggingface import load_generation_config, load_model_config, load_params
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params, init_params
from rljax.tasks.base import Task
from rljax.tasks.tokenizer_training import train_tokenizer

_TOKENIZER_PROBLEMS = 2000
TOKENIZER_VOCAB = 320
_VOCAB_MULTIPLE = 64  # rows of the embedding are rounded up: even shapes for kernels and meshes


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy with its tokenizer.

    Attributes:
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
      task: task whose texts a new tokenizer is trained on.
      directory: directory to save a new tokenizer in.
    """
    if config.policy.path is None:
        processes.from_first(lambda: _make_tokenizer(task, directory))
    model_config, tokenizer, source, eos_token_ids = policy_parts(config, directory)
    if config.policy.lora is not None and not keeps_base(config):
        weights = local_directory(config.policy.path)
        params = load_in_compute_dtype(weights, model_config, config.policy.compute_dtype)
    elif config.policy.path is not None:
        params = load_params(local_directory(config.policy.path), model_config, dtype="float32")
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
        model_config, tokenizer, source, eos_token_ids = checkpoint_parts(
            local_directory(config.policy.path, weights=False)
        )
    else:
        source, tokenizer = directory, Tokenizer.load(directory)
        model_config = shape_config(config.policy.shape, tokenizer.vocab_size)
        eos_token_ids = tokenizer.eos_token_ids
    tokenizer.chat_date = datetime.date.fromisoformat(config.policy.chat_date)
    tokenizer.set_template_args(config.policy.chat_template_args)
    extra = [_token_id(token, tokenizer) for token in config.policy.extra_eos_tokens]
    tokenizer.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *extra)))
    return model_config, tokenizer, source, tokenizer.eos_token_ids


def checkpoint_parts(path: Path) -> tuple[ModelConfig, Tokenizer, Path, tuple[int, ...]]:
    """Returns the policy of a Hugging Face directory without its weights, in the order of `Policy`'s
    attributes.

    Raises:
      UserError: a file cannot be read, the tokenizer is not the policy's, or it has no token of the EOS ids.
    """
    model_config, tokenizer = load_model_config(path), Tokenizer.load(path)
    tokenizer.check_fits(model_config)
    padding = model_config.vocab_size - tokenizer.vocab_size
    model_config = dataclasses.replace(model_config, padding_rows=padding)
    tokenizer.eos_token_ids = load_generation_config(path).eos_token_ids
    if min(tokenizer.eos_token_ids) >= tokenizer.vocab_size:
        raise CheckpointError(
            f"{path}: eos_token_id is {min(tokenizer.eos_token_ids)}, but the tokenizer has tokens 0 to"
            f" {tokenizer.vocab_size - 1}; no response would ever end"
        )
    return model_config, tokenizer, path, tokenizer.eos_token_ids


def _token_id(token: int | str, tokenizer: Tokenizer) -> int:
    """Returns the id of an entry of `policy.extra_eos_tokens`."""
    found = tokenizer.token_id(token) if isinstance(token, str) else token
    if found is None or not 0 <= found < tokenizer.vocab_size:
        raise ConfigError(
            f"policy.extra_eos_tokens: {token!r} is no token of {tokenizer.directory}; give the text of one"
            f" token, or an id below {tokenizer.vocab_size} (rollout.stop takes any text)"
        )
    return found


def turn_end_line(policy: Policy) -> str | None:
    """Returns a line for the user where a response goes on after the token that ends a turn in the chat
    template; None where it ends there, or the template names none.
    """
    tokenizer = policy.tokenizer
    end = ChatTurns(tokenizer).turn_end() if tokenizer.has_chat_template else None
    if end is None or end in policy.eos_token_ids:
        return None
    names = ", ".join(tokenizer.decode([token]) for token in policy.eos_token_ids)
    return (
        f"policy: the chat template ends a turn with {tokenizer.decode([end])}, but a response ends only with"
        f" {names} and goes on behind it; policy.extra_eos_tokens adds it"
    )


def shape_config(shape: ShapeConfig, vocab_size: int) -> ModelConfig:
    """Returns the architecture of a new policy for a tokenizer of so many tokens."""
    rows = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    architecture = "qwen3" if shape.qk_norm else "qwen2" if shape.attention_bias else "llama"
    padding = rows - vocab_size
    return ModelConfig(architecture=architecture, vocab_size=rows, padding_rows=padding, **shape.model_dump())


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
