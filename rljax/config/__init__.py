"""The experiment: one YAML file plus `key=value` overrides, typed and validated before anything is compiled.

The description of every key says why one would change it; `describe_keys` prints them for `--help`. An
invalid config (an unknown key, a wrong type, two keys that contradict each other) raises a `ConfigError` of
one line that names the dotted key. Nothing here imports JAX, so that help and errors are instant.

    schema.py        the experiment: its sections, and keys that exclude each other; read this one first
    policy.py        keys of the policy and its warm start
    lora.py          keys of LoRA
    tools.py         keys of tools
    environment.py   keys of environments of several turns
    agents.py        keys of agents that talk to the run over HTTP
    decoding.py      keys of sampling, the engine and kernels
    speculation.py   keys of speculation, and the policies that they choose among
    speculation_keys.py   those that do not belong to a single policy
    task.py          keys of the task, its rewards and their sandbox
    algorithm.py     keys of the algorithm and its critic
    learning.py      keys of the optimizer and the update
    cluster.py       keys of rollout workers in processes of their own
    cluster_keys.py  those that do not belong to a single paper
    wing.py          what the papers add: the only import from rljax/papers
    tracking.py      keys of trackers and reports
    contradictions.py   the table of keys that contradict each other
    limits.py        what does not work on so many devices, in several processes, with workers
    section.py       base class and types of all sections
    loading.py       reads an ExperimentConfig from a file and overrides, and writes one
    packaged.py      finds the configs that come with rljax, from any directory
    compute_dtype.py what policy.compute_dtype: auto stands for
    keys.py          the schema as a list of keys; suggests the nearest key for a misspelt one
    yaml_dialect.py  the YAML dialect of configs
    help.py          the text of --help
"""

from rljax.config.agents import AgentsConfig
from rljax.config.algorithm import AlgorithmConfig, CriticConfig
from rljax.config.cluster import ClusterConfig
from rljax.config.compute_dtype import with_compute_dtype
from rljax.config.decoding import EngineConfig, KernelsConfig, RolloutConfig
from rljax.config.environment import EnvironmentConfig
from rljax.config.help import describe_keys
from rljax.config.learning import OptimizerConfig, TrainingConfig
from rljax.config.limits import check_devices, check_over_processes, check_with_workers
from rljax.config.loading import load_config, make_config, read_mapping, to_yaml
from rljax.config.lora import LoraConfig
from rljax.config.policy import GrowthConfig, PolicyConfig, ShapeConfig, WarmStartConfig
from rljax.config.schema import (
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    MeshConfig,
)
from rljax.config.section import Buckets
from rljax.config.speculation import SpeculationConfig
from rljax.config.task import MixtureConfig, RewardConfig, SandboxConfig, TaskConfig
from rljax.config.tools import ToolsConfig
from rljax.config.tracking import TrackingConfig

__all__ = [
    "AgentsConfig", "AlgorithmConfig", "Buckets", "CheckpointConfig", "ClusterConfig", "CriticConfig",
    "EngineConfig", "EnvironmentConfig", "EvaluationConfig", "ExperimentConfig", "GrowthConfig",
    "KernelsConfig", "LoraConfig", "MeshConfig", "MixtureConfig", "OptimizerConfig", "PolicyConfig",
    "RewardConfig", "RolloutConfig", "SandboxConfig", "ShapeConfig", "SpeculationConfig", "TaskConfig",
    "ToolsConfig", "TrackingConfig", "TrainingConfig", "WarmStartConfig", "check_devices",
    "check_over_processes", "check_with_workers", "describe_keys", "load_config", "make_config",
    "read_mapping", "to_yaml", "with_compute_dtype",
]  # fmt: skip
