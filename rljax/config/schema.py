"""The experiment: all sections together, the small ones, and what cannot go together."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rljax.algorithms.registry import overlong_buffer
from rljax.config.algorithm import AlgorithmConfig
from rljax.config.decoding import (
    MAX_NODES,
    EngineConfig,
    KernelsConfig,
    RolloutConfig,
    SpeculationConfig,
)
from rljax.config.learning import OptimizerConfig, TrainingConfig
from rljax.config.policy import PolicyConfig, WarmStartConfig
from rljax.config.section import Buckets, Count, CountOrOff, Section
from rljax.config.task import TaskConfig
from rljax.config.tools import ToolsConfig, mistaken_answers
from rljax.config.tracking import TrackingConfig
from rljax.errors import ConfigError


class MeshConfig(Section):
    """Devices along each axis of the mesh; the product may not exceed the devices there are."""

    data: Count = Field(
        1, description="Replicas, each with its share of the batch. The cheapest way to use more devices."
    )
    fsdp: Count = Field(
        1, description="Devices that share the weights and optimizer state. Raise when these do not fit."
    )
    tensor: Count = Field(
        1, description="Devices that split every layer. Raise to decode faster where links are fast."
    )

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes."""
        return self.data * self.fsdp * self.tensor


class CheckpointConfig(Section):
    """Checkpoints of the run; a run that is started again with the same config continues from the newest."""

    every: CountOrOff = Field(
        10,
        description="Steps between checkpoints; 0 saves only at the end. Lower where machines are taken"
        " away.",
    )
    keep: Count = Field(
        2, description="Newest checkpoints kept. Raise to have more to go back to when a disk fails."
    )
    keep_every: CountOrOff = Field(
        0,
        description="Keep checkpoints of every so many steps for good, where checkpoint.every makes one; 0 is"
        " none. Set it to compare policies along the run.",
    )
    keep_best: CountOrOff = Field(
        0,
        description="Keep so many with the highest held-out reward, and make one at every evaluation; 0 is"
        " none. Set it where long runs get worse in the end.",
    )
    on_failure: Literal["stop", "go_on"] = Field(
        "stop",
        description="When a checkpoint cannot be written, on a full disk for example: stop with an error, or"
        " warn, go on, and try again when the next is due. go_on where others fill the disk for a while:"
        " lines of metrics wait in memory, too. What is killed meanwhile loses more.",
    )


class EvaluationConfig(Section):
    """Held-out problems before, during and after training, and in scripts/evaluate.py."""

    every: CountOrOff = Field(
        0,
        description="Steps between evaluations; 0 is only before and after. More show the curve, and cost"
        " time.",
    )
    problems: CountOrOff = Field(
        128,
        description="Held-out problems each time; 0 turns evaluation off. The error of the mean falls with"
        " the root.",
    )
    samples: Annotated[int, Field(ge=1, le=1000)] = Field(
        1,
        description="Responses to each, n. Raise for pass@k and maj@k, or where single ones say little.",
    )
    pass_at: Buckets = Field(
        (),
        description="The k of pass@k and maj@k, ascending, at most samples; empty is powers of two up to it.",
    )
    success: str | None = Field(
        None,
        min_length=1,
        description="Part of the task's reward that is 1 where a response passes; null is correct, where"
        " there is such a part, else the whole reward.",
    )
    by_difficulty: bool = Field(
        False, description="Report every group of difficulty as well, to see where a policy gains."
    )

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
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
        description="All randomness derives from it. Change it to repeat an experiment independently.",
    )
    run_dir: str = Field(
        min_length=1,
        description="Where config, metrics and checkpoints go; starting again with the same one resumes"
        " the run.",
    )
    policy: PolicyConfig
    warm_start: WarmStartConfig | None = None
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    tools: ToolsConfig | None = None
    engine: EngineConfig = EngineConfig()
    kernels: KernelsConfig = KernelsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _scale_overlong_buffer(cls, data: Any) -> Any:
        """DAPO's buffer follows the response length, which the algorithm section does not know."""
        if not isinstance(data, dict) or not isinstance(data.get("algorithm"), dict):
            return data
        algorithm, rollout = data["algorithm"], data.get("rollout", {})
        if algorithm.get("name") != "dapo" or "overlong_buffer" in algorithm or not isinstance(rollout, dict):
            return data
        length = rollout.get("max_response_length", RolloutConfig().max_response_length)
        if not isinstance(length, int):
            return data  # the type error is reported where it is
        return {**data, "algorithm": {**algorithm, "overlong_buffer": overlong_buffer(length)}}

    @model_validator(mode="after")
    def _check(self) -> "ExperimentConfig":
        problem = next(_impossible_combinations(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self


def _impossible_combinations(config: ExperimentConfig) -> Iterator[str]:
    """One line for each pair of keys in different sections that cannot hold together."""
    rollout, engine, algorithm, training = config.rollout, config.engine, config.algorithm, config.training
    group, num_samples = rollout.samples_per_prompt, rollout.prompts_per_step * rollout.samples_per_prompt
    length = rollout.max_prompt_length + rollout.max_response_length
    length_sum = f"rollout.max_prompt_length + max_response_length = {length}"
    if algorithm.dynamic_sampling and group < 2:
        yield (
            "algorithm.dynamic_sampling: needs rollout.samples_per_prompt of at least 2, got 1;"
            " a group of one always has equal rewards, so no batch would ever fill"
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
    for stop, name in itertools.product(rollout.stop, () if config.tools is None else config.tools.names):
        if stop in config.tools.closing.replace("{name}", name):
            yield f"rollout.stop: {stop!r} is part of tools.closing, so responses would end before any call"
    if config.tools is not None:
        yield from mistaken_answers(config.tools, config.task)
    drafters = config.speculation.kinds.values()
    if "quantized" in drafters and engine.verification != "coupled":
        yield (
            "speculation.drafter: quantized needs engine.verification: coupled, got"
            f" {engine.verification}; how much of a chain is verified depends on its noise"
        )
    if "eagle" in drafters and config.mesh.num_devices > 1:
        yield (
            f"speculation.drafter: eagle drafts on one device, but mesh has {config.mesh.num_devices};"
            " use another drafter there"
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


def check_devices(mesh: MeshConfig, num_devices: int) -> None:
    """Raises a ConfigError if the mesh needs more devices than there are; called once they are known."""
    if mesh.num_devices > num_devices:
        raise ConfigError(
            f"mesh: data {mesh.data} * fsdp {mesh.fsdp} * tensor {mesh.tensor} = {mesh.num_devices} devices,"
            f" but there {'is' if num_devices == 1 else 'are'} {num_devices}"
        )
