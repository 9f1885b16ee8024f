"""What an evaluation is: the config of a run, or a config file or overrides for a Hugging Face directory,
less all that only training reads. Nothing here imports JAX, so that errors are instant.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.config import ExperimentConfig, make_config, read_mapping
from rljax.errors import ConfigError

_SECTIONS = ("task", "rollout", "tools", "engine", "kernels", "speculation", "mesh", "evaluation")
_READ = ("seed", "policy.compute_dtype", *_SECTIONS)
_NOT_READ = {
    "rollout.prompts_per_step": "evaluation.problems says how many problems",
    "rollout.samples_per_prompt": "evaluation.samples says how many responses",
    "engine.verification": "evaluation samples coupled, whose tokens no draft changes",
    "speculation.run_ahead_below": "there is no next step to sample ahead for",
    "evaluation.every": "it is evaluated once, now",
}
_FIXED = {"engine": {"verification": "coupled"}, "speculation": {"run_ahead_below": 0}}
_ANY_LENGTH = 2**30


def evaluation_config(
    path: str | os.PathLike[str], config_file: str | os.PathLike[str] | None, overrides: Sequence[str]
) -> ExperimentConfig:
    """The config of an evaluation.

    Args:
      path: a run directory or a Hugging Face model directory.
      config_file: where the task and the sampling come from; by default the run's own config, and for a
        Hugging Face directory the overrides alone.
      overrides: `key=value`, of what an evaluation reads.

    Returns:
      A config whose `policy.path`, for a Hugging Face directory, and `run_dir` are `path`.

    Raises:
      ConfigError: as `load_config`; or a key that an evaluation does not read.
    """
    path = Path(path)
    run = path / "config.yaml"
    source = config_file
    if source is None and run.is_file():
        source = run
    given = {} if source is None else read_mapping(source)
    data: dict[str, Any] = {name: given[name] for name in ("seed", *_SECTIONS) if given.get(name) is not None}
    data |= {"run_dir": str(path), "policy": _policy(path, given)}
    data["training"] = {"pack_length": _ANY_LENGTH}  # nothing is packed, so nothing is too long for it
    data["algorithm"] = {"name": "reinforce++"}  # nothing is learned; this one takes groups of any size
    for section, changes in _FIXED.items():
        if isinstance(data.get(section), dict):
            data[section] = data[section] | changes
    for override in overrides:
        _check_read(override.partition("=")[0].strip())
    if source is None and not any(override.startswith("task") for override in overrides):
        raise ConfigError(
            f"task: {path} is no run, so say what to evaluate on: --config FILE, or task.name=..."
        )
    config = make_config(data, overrides, str(source or "the command line"))
    if config.evaluation.problems == 0:
        raise ConfigError("evaluation.problems: is 0, so there is nothing to evaluate; set at least 1")
    return config


def _policy(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The run's own section; else the directory, computed as the config file says."""
    section = given.get("policy") if isinstance(given.get("policy"), dict) else {}
    if (path / "config.yaml").is_file():
        own = read_mapping(path / "config.yaml").get("policy")
        own = own if isinstance(own, dict) else {}
        return own | {key: value for key, value in section.items() if key == "compute_dtype"}
    dtype = section.get("compute_dtype")
    return {"path": str(path)} | ({} if dtype is None else {"compute_dtype": dtype})


def _check_read(name: str) -> None:
    if name in _NOT_READ:
        raise ConfigError(f"{name}: not a key of an evaluation; {_NOT_READ[name]}")
    if not any(name == read or name.startswith(f"{read}.") for read in _READ):
        raise ConfigError(
            f"{name}: not a key of an evaluation, which reads {', '.join(_READ)}; the policy is the saved one"
        )
