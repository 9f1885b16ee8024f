"""A trained policy, to be used: the newest checkpoint of a run, or a Hugging Face directory.

    saved = load_saved_policy("runs/quickstart")            # or step=20, or "models/Qwen2.5-0.5B-Instruct"
    saved.policy.params, saved.policy.tokenizer, ...

What evaluates, exports, generates and serves begins here. Of the optimizer only the checksum is read.
"""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.config import ExperimentConfig, load_config
from rljax.errors import CheckpointError, ConfigError
from rljax.models.growth import grown_config
from rljax.models.huggingface import load_generation_config, load_model_config, load_params
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import param_shapes
from rljax.run_directory import RunDirectory
from rljax.training.checkpoint import RunCheckpoints
from rljax.training.policy import Policy, policy_parts


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy as it was saved.

    Attributes:
      path: the directory it came from.
      policy: with float32 weights.
      experiment: the run's config, its `run_dir` being `path`; None for a Hugging Face directory.
      step: the checkpoint's, in training steps; None for a Hugging Face directory.
    """

    path: Path
    policy: Policy
    experiment: ExperimentConfig | None
    step: int | None

    def drafter_state(self) -> dict[str, np.ndarray]:
        """What the run's drafters had learned at this step, as `Speculator.load_state` takes it; empty where
        there was none. Histories may be large: they are read by this call.
        """
        if self.experiment is None:
            return {}
        return _checkpoints(self.path).host_arrays(self.step)


def load_saved_policy(path: str | os.PathLike[str], step: int | None = None) -> SavedPolicy:
    """Loads a policy.

    Args:
      path: a run directory or a Hugging Face model directory.
      step: of a run, which checkpoint; None is the newest.

    Raises:
      UserError: there is no such directory, it is neither of the two, it has no checkpoint (of that step),
        or something in it cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give a run directory or a Hugging Face model directory")
    if is_run(path):
        return _from_run(path, step)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is neither a run (no config.yaml) nor a Hugging Face model directory (no config.json)"
            + _nearby(path)
        )
    if step is not None:
        raise CheckpointError(f"{path} is a Hugging Face directory, which has no steps, so no step {step}")
    return _from_huggingface(path)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is that of a run, which holds its config."""
    return (Path(path) / "config.yaml").is_file()


def run_config(path: str | os.PathLike[str]) -> ExperimentConfig:
    """The resolved config of the run in a directory, with `run_dir` as the directory is called now."""
    path = Path(path)
    try:
        config = load_config(RunDirectory(path).config_path)
    except ConfigError as error:
        raise ConfigError(f"{path}: the run's config cannot be used ({error})") from error
    return config.model_copy(update={"run_dir": str(path)})


def saved_steps(path: str | os.PathLike[str]) -> list[int]:
    """Steps of a run's complete checkpoints, oldest first."""
    return _checkpoints(Path(path)).steps()


def _checkpoints(path: Path) -> RunCheckpoints:
    return RunCheckpoints(RunDirectory(path).checkpoints_path, keep=1)


def _from_run(path: Path, step: int | None) -> SavedPolicy:
    experiment, checkpoints = run_config(path), _checkpoints(path)
    steps = checkpoints.steps()
    if not steps:
        every = experiment.checkpoint.every
        first = f"the first comes at step {every}" if every else "it comes at the end of the run"
        raise CheckpointError(f"{path} has no complete checkpoint yet; {first} (checkpoint.every)")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise CheckpointError(
            f"{path} has no checkpoint of step {step}; there {'are' if len(steps) > 1 else 'is'} {there}"
            " (checkpoint.keep says how many stay)"
        )
    source = experiment.policy.path
    if source is not None and not Path(source).is_dir():
        raise CheckpointError(
            f"{path} holds weights only; architecture and tokenizer come from the policy.path of its"
            f" config.yaml, {source}, which is not there"
        )
    config, tokenizer, source, eos_token_ids = policy_parts(experiment, path / "tokenizer")
    growth = experiment.policy.growth
    if growth is not None:
        config = grown_config(config, **growth.model_dump())
    template = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    step, state, _ = checkpoints.restore({"params": template}, step, partial=True)
    policy = Policy(config, state["params"], tokenizer, source, eos_token_ids)
    return SavedPolicy(path, policy, experiment, step)


def _from_huggingface(path: Path) -> SavedPolicy:
    config = load_model_config(path)
    tokenizer = Tokenizer.load(path)
    tokenizer.check_fits(config)
    eos_token_ids = load_generation_config(path).eos_token_ids
    params = load_params(path, config, dtype="float32")
    return SavedPolicy(path, Policy(config, params, tokenizer, path, eos_token_ids), None, None)


def _nearby(path: Path) -> str:
    """For a message: the run that a directory is inside of, as one easily gives its checkpoints instead."""
    for parent in path.resolve().parents[:2]:
        if is_run(parent):
            return f"; the run is {parent}, and --step chooses a checkpoint"
    return ""
