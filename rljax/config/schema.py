"""The experiment: its sections, the small ones in full, and the checks across sections."""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rljax.algorithms.registry import NEED_TEACHER, overlong_buffer
from rljax.config.agents import AgentsConfig
from rljax.config.algorithm import AlgorithmConfig
from rljax.config.cluster import ClusterConfig
from rljax.config.decoding import (
    MAX_NODES,
    EngineConfig,
    KernelsConfig,
    RolloutConfig,
)
from rljax.config.distributed import DistributedConfig
from rljax.config.environment import EnvironmentConfig
from rljax.config.learning import OptimizerConfig, TrainingConfig, rows_for
from rljax.config.mesh import MeshConfig
from rljax.config.policy import PolicyConfig, WarmStartConfig
from rljax.config.section import Buckets, Count, CountOrOff, PathText, Section
from rljax.config.speculation import SpeculationConfig
from rljax.config.task import TaskConfig
from rljax.config.tools import ToolsConfig, mistaken_answers
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
        if self.pass_at and self.pass_at[-1] > self.samples:
            raise ValueError(
                f"evaluation.pass_at: {self.pass_at[-1]} is more than evaluation.samples {self.samples}"
            )
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
        problem = next(_impossible_combinations(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self


def _impossible_combinations(config: ExperimentConfig) -> Iterator[str]:
    """Yields one line for each contradiction between keys of different sections."""
    rollout, engine, algorithm, training = config.rollout, config.engine, config.algorithm, config.training
    group, num_samples = rollout.samples_per_prompt, rollout.prompts_per_step * rollout.samples_per_prompt
    length = rollout.max_prompt_length + rollout.max_response_length
    length_sum = f"rollout.max_prompt_length + max_response_length = {length}"
    if algorithm.dynamic_sampling and group < 2:
        yield (
            "algorithm.dynamic_sampling: needs rollout.samples_per_prompt of at least 2, got 1;"
            " a group of one always has equal rewards, so no batch would ever fill"
        )
    if algorithm.name in NEED_TEACHER and algorithm.teacher is None:
        yield (
            f"algorithm.teacher: {algorithm.name} needs one; give the directory of a model with the policy's"
            " tokenizer, or of a run"
        )
    yield from _impossible_staleness(config)
    lora = config.policy.lora
    if lora is not None and lora.path is not None and config.warm_start is not None:
        yield (
            "policy.lora.path: an adapter belongs to the base that it was trained on, but warm_start trains"
            " that further; leave warm_start out (null)"
        )
    if group < 2 and algorithm.compares_groups:
        yield (
            "rollout.samples_per_prompt: 1 makes every advantage 0 (rewards are compared within the group);"
            " set at least 2"
        )
    if config.policy.shape is not None and config.policy.shape.max_positions < length:
        yield f"policy.shape.max_positions: {config.policy.shape.max_positions} is less than {length_sum}"
    if training.pack_length < length:
        yield (
            f"training.pack_length: {training.pack_length} is less than {length_sum};"
            " a row must hold the longest sequence"
        )
    if algorithm.overlong_buffer >= rollout.max_response_length:
        yield (
            f"algorithm.overlong_buffer: {algorithm.overlong_buffer} must be less than"
            f" rollout.max_response_length {rollout.max_response_length}"
        )
    if training.minibatches_per_step > num_samples:
        yield (
            f"training.minibatches_per_step: {training.minibatches_per_step} is more than the {num_samples}"
            " responses of a step (rollout.prompts_per_step * samples_per_prompt)"
        )
    if config.speculation.run_ahead_below and engine.verification != "coupled":
        yield (
            f"speculation.run_ahead_below: needs engine.verification: coupled, got {engine.verification}; the"
            " other rules want drafts that know nothing of the noise"
        )
    yield from config.speculation.contradictions(rollout, engine)
    if config.evaluation.sampling_changes and engine.verification != "coupled":
        name = next(iter(config.evaluation.sampling_changes))
        yield (
            f"evaluation.{name}: needs engine.verification: coupled, got {engine.verification}; the other"
            " rules sample every request alike"
        )
    if config.checkpoint.keep_best and not (config.evaluation.every and config.evaluation.problems):
        yield (
            "checkpoint.keep_best: needs evaluation.every and evaluation.problems above 0; the best by"
            " held-out reward are kept"
        )
    penalties = (rollout.repetition_penalty, rollout.frequency_penalty, rollout.presence_penalty)
    if config.tools is not None and penalties != (1.0, 0.0, 0.0):
        yield (
            "tools: need rollout.repetition_penalty 1.0, frequency_penalty 0 and presence_penalty 0; what a"
            " paused response has decoded behind its call would stay counted"
        )
    if config.tools is not None:
        for stop, name in itertools.product(rollout.stop, config.tools.names):
            if stop in config.tools.closing.replace("{name}", name):
                yield (
                    f"rollout.stop: {stop!r} is part of tools.closing, so responses would end before any call"
                )
        yield from mistaken_answers(config.tools, config.task)
    if config.agents is not None:
        yield from _impossible_with_agents(config)
    drafters = config.speculation.kinds.values()
    if "quantized" in drafters and engine.verification != "coupled":
        yield (
            "speculation.drafter: quantized needs engine.verification: coupled, got"
            f" {engine.verification}; how much of a chain is verified depends on its noise"
        )
    if engine.weights == "fsdp" and config.mesh.fsdp == 1:
        yield (
            "engine.weights: fsdp splits the weights over mesh.fsdp, which is 1; set replicated, or raise"
            " mesh.fsdp"
        )
    if config.speculation.max_drafts >= MAX_NODES:
        yield f"speculation.max_drafts: {config.speculation.max_drafts} is more than {MAX_NODES - 1}"
    slots, slots_named = engine.max_slots, f"engine.max_slots {engine.max_slots}"
    for key, buckets, largest, what in (
        ("engine.batch_buckets", engine.batch_buckets, slots, slots_named),
        ("engine.cache_buckets", engine.cache_buckets, length, length_sum),
        ("speculation.verify_buckets", config.speculation.verify_buckets, 4, "a pass over two responses"),
    ):
        if buckets is None:
            continue
        if not buckets:
            yield f"{key}: is empty; list at least one size, or leave the key out"
        elif any(a >= b for a, b in itertools.pairwise(buckets)):
            yield f"{key}: {list(buckets)} must ascend, without repeats"
        elif buckets[-1] < largest:
            yield f"{key}: the largest, {buckets[-1]}, is less than {what}"


def _impossible_staleness(config: ExperimentConfig) -> Iterator[str]:
    """Yields one line for each contradiction between the age of weights and other keys."""
    rollout, cluster = config.rollout, config.cluster
    key = "rollout.staleness" if rollout.staleness else "rollout.max_staleness"
    if rollout.staleness and rollout.max_staleness:
        yield (
            "rollout.max_staleness: is another mode than staleness: 1; set one of them to 0 (staleness: 1 can"
            " be repeated without a log)"
        )
    if rollout.max_staleness and not cluster.workers and cluster.replay is None:
        yield (
            "rollout.max_staleness: needs cluster.workers; without them nothing is decoded during an update,"
            " and rollout.staleness: 1 does the same"
        )
    if rollout.max_staleness and config.algorithm.dynamic_sampling:
        yield (
            "rollout.max_staleness: is not possible with algorithm.dynamic_sampling; set that to false, or"
            " use rollout.staleness: 1"
        )
    if cluster.replay is not None and not rollout.max_staleness:
        yield (
            "cluster.replay: repeats a run with rollout.max_staleness; set that as it was there (other runs"
            " are repeated by their config alone)"
        )
    if (rollout.staleness or rollout.max_staleness) and config.speculation.run_ahead_below:
        yield f"{key}: is not possible with speculation.run_ahead_below; set that to 0"
    if rollout.max_staleness and config.tools is not None:
        yield "rollout.max_staleness: is not possible with tools; leave one of them out"
    if cluster.weights_dir is not None and cluster.weights != "files":
        yield f"cluster.weights_dir: is not used with cluster.weights: {cluster.weights}; set files"


def _impossible_with_agents(config: ExperimentConfig) -> Iterator[str]:
    """Yields one line for each key that does not go with agents."""
    speculation = config.speculation
    for key, used, instead in (
        ("tools", config.tools is not None, "agents have tools of their own; leave the section out"),
        ("cluster.workers", bool(config.cluster.workers), "the server decodes in this process; set 0"),
        ("distributed", config.distributed.is_wanted(), "one process serves; set distributed.enabled=off"),
        ("speculation.run_ahead_below", bool(speculation.run_ahead_below), "its requests are unknown; set 0"),
        ("speculation.overlap", speculation.overlap, "requests join at any time; set false"),
        ("algorithm.overlong_buffer", bool(config.algorithm.overlong_buffer), "set 0"),
        (
            "engine.verification",
            config.engine.verification != "coupled",
            "tokens would depend on earlier requests; set coupled",
        ),
    ):
        if used:
            yield f"{key}: is not supported with agents: {instead}"
