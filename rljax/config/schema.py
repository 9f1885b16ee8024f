"""The experiment: its sections, the small ones in full, and the checks across sections."""

import itertools
import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rljax.algorithms.registry import overlong_buffer
from rljax.config.agents import AgentsConfig
from rljax.config.algorithm import AlgorithmConfig
from rljax.config.cluster import ClusterConfig
from rljax.config.contradictions import CONTRADICTIONS
from rljax.config.decoding import EngineConfig, KernelsConfig, RolloutConfig
from rljax.config.distributed import DistributedConfig
from rljax.config.environment import EnvironmentConfig
from rljax.config.learning import OptimizerConfig, TrainingConfig, rows_for
from rljax.config.mesh import MeshConfig
from rljax.config.policy import PolicyConfig, WarmStartConfig
from rljax.config.section import Buckets, Count, CountOrOff, PathText, Section, broken_rule
from rljax.config.speculation import SpeculationConfig
from rljax.config.task import TaskConfig
from rljax.config.tools import ToolsConfig
from rljax.config.tracking import TrackingConfig


class CheckpointConfig(Section):
    """Checkpoints of the run; a run that is started again with the same config continues from the newest."""

    every: CountOrOff = Field(
        10,
        description="Steps between checkpoints; 0 saves only at the end. Lower it on preemptible machines.",
    )
    keep: Count = Field(
        2, description="Number of newest checkpoints to keep. Raise it against damaged checkpoints."
    )
    keep_every: CountOrOff = Field(
        0,
        description="Interval in steps of checkpoints that are kept for good, among those of"
        " checkpoint.every; 0 keeps none. Set it to compare policies along the run.",
    )
    keep_best: CountOrOff = Field(
        0,
        description="Number of checkpoints with the highest held-out reward to keep; every evaluation then"
        " saves one. 0 keeps none. Set it where long runs get worse at the end.",
    )
    on_failure: Literal["stop", "go_on"] = Field(
        "stop",
        description="Reaction when a checkpoint cannot be written, for example on a full disk: stop with an"
        " error, or warn, continue, and try again at the next checkpoint. Set go_on where a disk"
        " is full for a while: lines of metrics wait in memory as well, and a kill meanwhile"
        " loses more.",
    )


class EvaluationConfig(Section):
    """Held-out problems before, during and after training, and in `rljax evaluate`."""

    every: CountOrOff = Field(
        0,
        description="Steps between evaluations; 0 evaluates only before and after training. Lower it for a"
        " finer curve at the cost of time.",
    )
    problems: CountOrOff = Field(
        128,
        description="Held-out problems per evaluation; 0 turns evaluation off. Raise it for a smaller error"
        " of the mean, which falls with the square root.",
    )
    samples: Annotated[int, Field(ge=1, le=1000)] = Field(
        1,
        description="Responses to each problem, n. Raise it for pass@k and maj@k, or where single responses"
        " are too noisy.",
    )
    pass_at: Buckets = Field(
        (),
        description="Values of k for pass@k and maj@k, ascending, at most evaluation.samples; empty is"
        " powers of two up to it. Set them to compare with published numbers.",
    )
    success: str | None = Field(
        None,
        min_length=1,
        description="Part of the task's reward that is 1 where a response passes; null is the part named"
        " correct where the task has it, else the whole reward. Set it where a reward combines"
        " several parts.",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=1e4,
        description="Temperature of evaluations; 0 takes the likeliest token, null is rollout.temperature."
        " Set it to measure the policy as it will be used, or to compare with published numbers.",
    )
    top_k: CountOrOff | None = Field(
        None,
        description="rollout.top_k of evaluations; null is that of rollouts. Set it to compare with published"
        " numbers.",
    )
    top_p: float | None = Field(
        None,
        ge=1e-6,
        le=1,
        description="rollout.top_p of evaluations; null is that of rollouts. Set it to compare with published"
        " numbers.",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="rollout.min_p of evaluations; null is that of rollouts. Set it to compare with published"
        " numbers.",
    )
    by_difficulty: bool = Field(
        False, description="Report every difficulty group as well. Set it to see where a policy gains."
    )

    @property
    def sampling_changes(self) -> dict[str, float]:
        """The settings of sampling that differ from those of rollouts, by name."""
        settings = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {name: value for name, value in settings.items() if value is not None}

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
        if self.temperature is not None and 0 < self.temperature < 1e-4:
            raise ValueError(f"evaluation.temperature: {self.temperature:g}, expected 0 or 1e-4 to 1e4")
        if any(a >= b for a, b in itertools.pairwise(self.pass_at)):
            raise ValueError(f"evaluation.pass_at: {list(self.pass_at)} must ascend, without repeats")
        return self


class ExperimentConfig(Section):
    """The whole experiment."""

    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Seed of all randomness. Change it to repeat an experiment independently.",
    )
    run_dir: PathText = Field(
        min_length=1,
        description="Directory of config, metrics and checkpoints. Change it to start a new run; with the"
        " same directory a run resumes.",
    )
    policy: PolicyConfig
    warm_start: WarmStartConfig | None = None
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    tools: ToolsConfig | None = None
    environment: EnvironmentConfig = EnvironmentConfig()
    agents: AgentsConfig | None = None
    engine: EngineConfig = EngineConfig()
    kernels: KernelsConfig = KernelsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _scale_overlong_buffer(cls, data: Any) -> Any:
        """Sets DAPO's buffer from the response length, which the algorithm section does not know."""
        if not isinstance(data, dict) or not isinstance(data.get("algorithm"), dict):
            return data
        algorithm, rollout = data["algorithm"], data.get("rollout", {})
        if algorithm.get("name") != "dapo" or "overlong_buffer" in algorithm or not isinstance(rollout, dict):
            return data
        length = rollout.get("max_response_length", RolloutConfig().max_response_length)
        if not isinstance(length, int):
            return data  # validation of the rollout section reports the type error
        return {**data, "algorithm": {**algorithm, "overlong_buffer": overlong_buffer(length)}}

    @model_validator(mode="before")
    @classmethod
    def _derive_rows(cls, data: Any) -> Any:
        """Sets the rows of an update from the lengths and the mesh, which the training section does not
        know.
        """
        if not isinstance(data, dict):
            return data
        training, rollout, mesh = (data.get(name, {}) for name in ("training", "rollout", "mesh"))
        if not all(isinstance(section, dict) for section in (training, rollout, mesh)):
            return data
        defaults = RolloutConfig()
        names = ("max_prompt_length", "max_response_length")
        lengths = [rollout.get(name, getattr(defaults, name)) for name in names]
        row, devices = training.get("pack_length"), [mesh.get(name, 1) for name in ("data", "fsdp")]
        numbers = [*devices, *(lengths if row is None else [row])]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return data  # validation of these sections reports the error
        rows = rows_for(sum(lengths) if row is None else row, math.prod(devices))
        return {**data, "training": rows | training}

    @model_validator(mode="after")
    def _check(self) -> "ExperimentConfig":
        problem = broken_rule(self, CONTRADICTIONS)
        if problem is not None:
            raise ValueError(problem)
        return self
