"""The experiment: one YAML file plus `key=value` overrides, typed and validated before anything is compiled.

Every key says in its description why one would change it; `describe_keys` prints them for `--help`. What
cannot work (an unknown key, a wrong type, two keys that contradict each other) is a `ConfigError` of one line
that names the dotted key. Nothing here imports JAX, so that help and errors are instant.

    schema.py        the experiment: its sections, and what cannot go together: read this one
    policy.py        the keys of the policy and its warm start
    tools.py         the keys of tools
    decoding.py      those of sampling, the engine, kernels and speculation
    task.py          those of the task, its rewards and their sandbox
    algorithm.py     those of the algorithm and its critic
    learning.py      those of the optimizer and the update
    tracking.py      those of what others see of a run
    section.py       what every section is made of
    loading.py       from a file and overrides to an ExperimentConfig, and back
    keys.py          the schema as a list of keys; which one a misspelt key was meant to be
    yaml_dialect.py  YAML as the config reads it
    help.py          the text of --help
"""

from rljax.config.algorithm import AlgorithmConfig, CriticConfig
from rljax.config.decoding import EngineConfig, KernelsConfig, RolloutConfig, SpeculationConfig
from rljax.config.help import describe_keys
from rljax.config.learning import OptimizerConfig, TrainingConfig
from rljax.config.loading import load_config, make_config, read_mapping, to_yaml
from rljax.config.policy import GrowthConfig, PolicyConfig, ShapeConfig, WarmStartConfig
from rljax.config.schema import (
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    MeshConfig,
    check_devices,
)
from rljax.config.section import Buckets
from rljax.config.task import MixtureConfig, RewardConfig, SandboxConfig, TaskConfig
from rljax.config.tools import ToolsConfig
from rljax.config.tracking import TrackingConfig

__all__ = [
    "AlgorithmConfig",
    "Buckets",
    "CheckpointConfig",
    "CriticConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "GrowthConfig",
    "KernelsConfig",
    "MeshConfig",
    "MixtureConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "ShapeConfig",
    "SpeculationConfig",
    "TaskConfig",
    "ToolsConfig",
    "TrackingConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "check_devices",
    "describe_keys",
    "load_config",
    "make_config",
    "read_mapping",
    "to_yaml",
]
