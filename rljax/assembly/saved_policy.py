"""Loads a saved policy: a checkpoint of a run, or a Hugging Face directory.

    saved = load_saved_policy("runs/quickstart")            # or step=20, or "Qwen/Qwen2.5-0.5B-Instruct"
    saved.policy.params, saved.policy.tokenizer, ...

Evaluation, export, generation and serving begin here. Files of the optimizer state are verified, not loaded.
"""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.assembly.adapter import (
    BASE_DIGEST,
    base_path,
    check_base,
    factor_template,
    keeps_base,
    load_base,
    merged_in_float32,
)
from rljax.assembly.checkpoint import ROUTING, SAMPLED_BY, RunCheckpoints
from rljax.assembly.policy import Policy, checkpoint_parts, policy_parts
from rljax.config import ExperimentConfig, load_config
from rljax.errors import CheckpointError, ConfigError
from rljax.hub import hub_name, local_directory
from rljax.models.config import ModelConfig
from rljax.models.growth import grown_config
from rljax.models.huggingface import load_model_config, load_params
from rljax.models.lora import Adapter, Lora
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params, param_shapes
from rljax.run_directory import RunDirectory, check_holds_policy, is_run


@dataclasses.dataclass(frozen=True)
class SavedAdapter:
    """An adapter that was loaded from disk.

    Attributes:
      base: directory of the base, or its name on the hub.
      base_digest: name of the base, from `base_digest`.
    """

    adapter: Adapter
    base: str
    base_digest: str


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy that was loaded from disk.

    Attributes:
      path: directory of the run or of the model, or the model's name on the hub.
      policy: the policy, with float32 weights.
      experiment: config of the run, with `path` as `run_dir`; None for a Hugging Face directory.
      step: training step of the checkpoint; None for a Hugging Face directory.
      adapter: of a run with LoRA, what is merged in the policy; else None.
    """

    path: Path
    policy: Policy
    experiment: ExperimentConfig | None
    step: int | None
    adapter: SavedAdapter | None = None

    def drafter_state(self) -> dict[str, np.ndarray]:
        """Reads the state of the run's drafters at this step for `Speculator.load_state`; empty without
        drafters. It may be large (a history), so only this call reads it.
        """
        if self.experiment is None:
            return {}
        arrays = _checkpoints(self.path).host_arrays(self.step)
        others = (SAMPLED_BY, ROUTING)
        return {name: array for name, array in arrays.items() if not name.startswith(others)}


def load_saved_policy(path: str | os.PathLike[str], step: int | None = None) -> SavedPolicy:
    """Loads a policy.

    Args:
      path: a run directory, a Hugging Face model directory, or a name on the hub.
      step: step of the run's checkpoint; None loads the newest.

    Raises:
      UserError: the directory does not exist or is neither of the two, the run has no such checkpoint, or a
        file cannot be read.
    """
    path = Path(path)
    check_holds_policy(path)
    if is_run(path):
        return _from_run(path, step)
    if step is not None:
        raise CheckpointError(f"{path} is a Hugging Face directory, which has no steps, so no step {step}")
    return _from_huggingface(path)


def run_config(path: str | os.PathLike[str]) -> ExperimentConfig:
    """Returns the resolved config of the run in a directory, with `run_dir` set to the directory's present
    path.
    """
    path = Path(path)
    try:
        config = load_config(RunDirectory(path).config_path)
    except ConfigError as error:
        raise ConfigError(f"{path}: the run's config cannot be used ({error})") from error
    return config.model_copy(update={"run_dir": str(path)})


def saved_architecture(path: str | os.PathLike[str]) -> ModelConfig:
    """Returns the architecture of a run's policy, or of that in a Hugging Face directory, without weights."""
    path = local_directory(path, weights=False)
    return _parts_of_run(path, run_config(path))[0] if is_run(path) else load_model_config(path)


def _parts_of_run(
    path: Path, experiment: ExperimentConfig
) -> tuple[ModelConfig, Tokenizer, Path, tuple[int, ...]]:
    """As `policy_parts`, with the growth of the run."""
    config, *others = policy_parts(experiment, path / "tokenizer")
    growth = experiment.policy.growth
    return config if growth is None else grown_config(config, **growth.model_dump()), *others


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
    try:
        there, why = source is None or local_directory(source, weights=False).is_dir(), ""
    except CheckpointError as error:
        there, why = False, f" ({error})"
    if not there:
        raise CheckpointError(
            f"{path} holds weights only; architecture and tokenizer come from the policy.path of its"
            f" config.yaml, {source}, which is not there{why}"
        )
    config, tokenizer, source, eos_token_ids = _parts_of_run(path, experiment)
    if experiment.policy.lora is not None:
        step, params, adapter = _merged(checkpoints, experiment, config, step)
    else:
        template = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            param_shapes(config),
            is_leaf=lambda node: isinstance(node, tuple),
        )
        step, state, _ = checkpoints.restore({"params": template}, step, partial=True)
        params, adapter = state["params"], None
    policy = Policy(config, params, tokenizer, source, eos_token_ids)
    return SavedPolicy(path, policy, experiment, step, adapter)


def _merged(
    checkpoints: RunCheckpoints, experiment: ExperimentConfig, model: ModelConfig, step: int | None
) -> tuple[int, Params, SavedAdapter]:
    """Reads the factors of a run with LoRA, and merges them with its base."""
    lora = Lora.of(experiment.policy.lora, model)
    template = {"factors": factor_template(model, lora)}
    step, state, host_state = checkpoints.restore(template, step, partial=True)
    base, found = load_base(experiment, model)
    source = base_path(experiment)
    check_base(checkpoints.directory / str(step), host_state.get(BASE_DIGEST), found, source)
    params = merged_in_float32(base, state["factors"], lora)
    name = None if keeps_base(experiment) else hub_name(experiment.policy.path)
    base_name = str(source.resolve()) if name is None else name[0]
    return step, params, SavedAdapter(Adapter(lora, state["factors"], is_trained=True), base_name, found)


def _from_huggingface(path: Path) -> SavedPolicy:
    directory = local_directory(path)
    config, *others = checkpoint_parts(directory)
    params = load_params(directory, config, dtype="float32")
    return SavedPolicy(path, Policy(config, params, *others), None, None)
