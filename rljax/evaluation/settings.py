"""The config of an evaluation: a run's config, or a config file or overrides for a Hugging Face directory,
without the keys that only training reads. Nothing here imports JAX, so that errors are instant.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.config import ExperimentConfig, make_config, read_mapping
from rljax.config.speculation import OF_STEPS, WITHOUT_STEPS
from rljax.errors import ConfigError

_SECTIONS = (
    "task", "rollout", "tools", "environment", "engine", "kernels", "speculation", "mesh", "evaluation",
)  # fmt: skip
_READ = ("seed", "policy.compute_dtype", *_SECTIONS, "cluster")  # a run's own workers are not taken over
_NOT_READ = {
    "rollout.prompts_per_step": "evaluation.problems says how many problems",
    "rollout.samples_per_prompt": "evaluation.samples says how many responses",
    "engine.verification": "evaluation samples coupled, whose tokens no draft changes",
    **{f"speculation.{key}": why for key, why in OF_STEPS.items()},
    "evaluation.every": "it is evaluated once, now",
}
_FIXED = {"engine": {"verification": "coupled"}, "speculation": WITHOUT_STEPS}
_ANY_LENGTH = 2**30


def evaluation_config(
    path: str | os.PathLike[str], config_file: str | os.PathLike[str] | None, overrides: Sequence[str]
) -> ExperimentConfig:
    """Returns the config of an evaluation.

    Args:
      path: a run directory or a Hugging Face model directory.
      config_file: source of the task and the sampling; by default the run's config, and for a Hugging Face
        directory the overrides alone.
      overrides: `key=value` of keys that an evaluation reads.

    Returns:
      A config with `run_dir`, and for a Hugging Face directory `policy.path`, set to `path`.

    Raises:
      ConfigError: as in `load_config`, or for a key that an evaluation does not read.
    """
    path = Path(path)
    run = path / "config.yaml"
    source = config_file
    if source is None and run.is_file():
        source = run
    source_data = {} if source is None else read_mapping(source)
    data: dict[str, Any] = {
        name: source_data[name] for name in ("seed", *_SECTIONS) if source_data.get(name) is not None
    }
    data |= {"run_dir": str(path), "policy": _policy(path, source_data)}
    data["training"] = {"pack_length": _ANY_LENGTH}  # an evaluation packs no rows
    data["algorithm"] = {"name": "reinforce++"}  # unused; valid with groups of any size
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


def _policy(path: Path, source_data: dict[str, Any]) -> dict[str, Any]:
    """Returns the run's policy section, else one of the directory; the config file decides the dtype."""
    section = source_data.get("policy") if isinstance(source_data.get("policy"), dict) else {}
    if (path / "config.yaml").is_file():
        run_section = read_mapping(path / "config.yaml").get("policy")
        run_section = run_section if isinstance(run_section, dict) else {}
        return run_section | {key: value for key, value in section.items() if key == "compute_dtype"}
    dtype = section.get("compute_dtype")
    return {"path": str(path)} | ({} if dtype is None else {"compute_dtype": dtype})


def _check_read(name: str) -> None:
    if name in _NOT_READ:
        raise ConfigError(f"{name}: not a key of an evaluation; {_NOT_READ[name]}")
    if not any(name == read or name.startswith(f"{read}.") for read in _READ):
        raise ConfigError(
            f"{name}: not a key of an evaluation, which reads {', '.join(_READ)}; the policy is the saved one"
        )
