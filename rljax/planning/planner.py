"""Makes a plan from a config: `plan = make_plan(config, parse_topology("v5e:2x4"), lengths)`."""

import collections
import contextlib
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from drafters.registry import make_drafters, states_read
from rljax import target
from rljax.assembly.decoding import make_buckets_of, unmeasured_numerics
from rljax.assembly.policy import TOKENIZER_VOCAB, checkpoint_parts, shape_config
from rljax.config import ExperimentConfig, check_devices, with_compute_dtype
from rljax.errors import ConfigError
from rljax.hub import local_directory
from rljax.learning.packing import pack_sequences
from rljax.models.config import ModelConfig
from rljax.models.growth import grown_config
from rljax.models.huggingface import load_generation_config, load_model_config
from rljax.models.sharding import replicated_axes
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import num_params
from rljax.planning.drafters import planned_drafters
from rljax.planning.hardware import Hardware, Work
from rljax.planning.memory import Memory, check_memory, plan_memory
from rljax.planning.pool import PlanningPool, Program
from rljax.planning.programs import PlannedRun, Planning
from rljax.planning.rollout import Lengths, RolloutTime, rollout_time
from rljax.planning.roofline import Roofline, pass_sizes
from rljax.planning.topologies import Topology, compile_devices, hardware_of, platform_of
from rljax.speculation.draft_length import expected_tokens

_FULL_DEPTH = 8  # deeper policies are compiled at two small depths
DEPTHS = (2, 4)
"""Depths that are compiled in the place of a deeper policy."""


@dataclasses.dataclass(frozen=True)
class PassTime:
    """Predicted time of a pass.

    Attributes:
      rows: tokens that it computes; as many as slots in a decode step.
      length: positions of the cache.
      work: work of a device.
    """

    slots: int
    rows: int
    length: int
    work: Work
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of a training step.

    Attributes:
      prefill: seconds of prefilling the prompts.
      plain: decoding without drafts.
      drafted: decoding with drafts, or None without a drafter.
      update: seconds of all updates of the step.
      scoring: seconds of scoring for the reference and the correction.
      tokens: tokens of prompts and responses that the updates read.
    """

    prefill: float
    plain: RolloutTime
    drafted: RolloutTime | None
    update: float
    scoring: float
    tokens: int

    def rollout_share(self, rollout: RolloutTime) -> float:
        """Share of the step that is rollout."""
        whole = self.prefill + rollout.seconds
        return whole / (whole + self.update + self.scoring)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan; see the fields' types.

    Attributes:
      run: the shapes of the run.
      memory: bytes a device.
      programs: compiled programs at full depth.
      depths: depths that were compiled; None if it was the policy's.
      counts: programs of the whole warm-up, by kind.
      compile_seconds: expected time of the whole warm-up on this machine.
      decoding: decode steps at the mean length, by batch bucket.
      verifying: verifying passes at the mean length.
      microbatch: time of the gradients of one micro-batch.
      lengths: the distribution of response lengths.
      acceptance: assumed probability that a draft is accepted.
      notes: sentences for the user.
    """

    topology: Topology
    hardware: Hardware
    run: PlannedRun
    memory: Memory
    programs: tuple[Program, ...]
    depths: tuple[int, int] | None
    counts: dict[str, int]
    compile_seconds: float
    decoding: tuple[PassTime, ...]
    verifying: tuple[PassTime, ...]
    microbatch: tuple[Work, float]
    step: StepTime
    lengths: Lengths
    acceptance: float
    notes: tuple[str, ...]


def default_lengths(config: ExperimentConfig, mean: int | None, longest: int | None, sigma: float) -> Lengths:
    """Returns response lengths of a config: by default the longest is the config's, and the mean a quarter of
    it. Prompts have half of their largest length.

    Raises:
      ConfigError: they do not fit the config.
    """
    most = config.rollout.max_response_length
    longest = most if longest is None else longest
    mean = max(longest // 4, 1) if mean is None else mean
    if not 0 < mean <= longest <= most:
        raise ConfigError(
            f"lengths: mean {mean} and longest {longest} should be positive, in this order, and at most"
            f" rollout.max_response_length {most}"
        )
    return Lengths(mean, longest, sigma, max(config.rollout.max_prompt_length // 2, 1))


def planned_policy(config: ExperimentConfig) -> tuple[ModelConfig, tuple[int, ...]]:
    """Returns architecture and end-of-sequence tokens of the policy. Neither weights nor a tokenizer need
    exist.

    Raises:
      UserError: config.json cannot be read, or the policy is too short for the config's sequences.
    """
    if config.policy.path is not None:
        path = local_directory(config.policy.path, weights=False)
        if (path / "tokenizer.json").exists():
            model, _, _, eos = checkpoint_parts(path)
        else:
            model, eos = load_model_config(path), load_generation_config(path).eos_token_ids
    else:
        trained = Path(config.run_dir) / "tokenizer"
        size, eos = TOKENIZER_VOCAB, (0,)
        if (trained / "tokenizer.json").exists():
            tokenizer = Tokenizer.load(trained)
            size, eos = tokenizer.vocab_size, (tokenizer.eos_token_id,)
        model = shape_config(config.policy.shape, size)
    if config.policy.growth is not None:
        model = grown_config(model, **config.policy.growth.model_dump())
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    if model.max_positions < longest:
        raise ConfigError(
            f"policy: it is made for sequences of {model.max_positions} tokens, less than"
            f" rollout.max_prompt_length + max_response_length = {longest}"
        )
    return model, eos


def make_plan(
    config: ExperimentConfig,
    topology: Topology,
    lengths: Lengths,
    acceptance: float = 0.7,
    full_depth: bool | None = None,
    report: Callable[[str], None] = lambda line: None,
    hardware: Hardware | None = None,
) -> Plan:
    """Returns the plan of a run.

    Args:
      acceptance: probability that a draft is accepted.
      full_depth: compile all layers; None for policies of up to 8 layers.
      report: called with a line before every part that takes long, and for every program that is compiled.
      hardware: figures to use instead of the topology's.

    Raises:
      UserError: the run does not fit the devices. Where shapes tell so, nothing is compiled before.
    """
    # libtpu was seen to overrun the stack of one of its threads while two programs were compiled at a time.
    at_a_time = 1 if platform_of(topology) == "tpu" else os.cpu_count() or 1
    compilers = ThreadPoolExecutor(at_a_time)
    planning, hardware = make_planning(config, topology, hardware, compilers)
    config = planning.config
    where = f"one of {topology.name} ({hardware.kind})"
    depth = planning.model.num_layers
    with tracing(planning, topology), contextlib.ExitStack() as ended:
        ended.callback(compilers.shutdown, cancel_futures=True)
        shapes = _shapes(planning)
        check_memory(plan_memory(shapes, hardware), shapes, where)
        if full_depth is None:
            full_depth = depth <= _FULL_DEPTH
        run, depths = _compiled(planning, shapes, full_depth or depth <= max(DEPTHS), report)
        for name, drafter in run.drafters.items():
            report(f"compiling the programs of {name}")
            run = _with_programs(run, drafter.begin(run), report)
    buckets = planning.buckets
    memory = plan_memory(run, hardware)
    check_memory(memory, run, where)
    counts = _counts(run)
    roofline = Roofline(run, hardware)
    mean_length = buckets.cache_for(min(lengths.prompt + lengths.mean, buckets.cache[-1]))
    decoding = [_pass(roofline, batch, batch, mean_length) for batch in buckets.batch]
    verifying = [_pass(roofline, slots, rows, mean_length) for slots, rows in pass_sizes(run)]
    microbatch = roofline.microbatch()
    notes = []
    if config.mesh.num_devices < topology.num_devices:
        notes.append(
            f"mesh.data * fsdp * tensor is {config.mesh.num_devices}: the other"
            f" {topology.num_devices - config.mesh.num_devices} devices of {topology.name} are idle"
        )
    return Plan(
        topology,
        hardware,
        run,
        memory,
        run.programs,
        depths,
        counts,
        _compile_seconds(run.programs, counts),
        tuple(decoding),
        tuple(verifying),
        (microbatch, roofline.seconds(microbatch)),
        _step(run, roofline, lengths, acceptance),
        lengths,
        acceptance,
        tuple(notes),
    )


def plan_shapes(config: ExperimentConfig, topology: Topology) -> Memory:
    """Returns the memory that a run's arrays take, without compiling anything.

    Raises:
      UserError: already these do not fit the devices.
    """
    planning, hardware = make_planning(config, topology)
    with tracing(planning, topology):
        shapes = _shapes(planning)
    memory = plan_memory(shapes, hardware)
    check_memory(memory, shapes, f"one of {topology.name} ({hardware.kind})")
    return memory


def _shapes(planning: Planning) -> PlannedRun:
    """Returns the shapes of a run, of which nothing is compiled yet."""
    return dataclasses.replace(planning.shapes(), drafters=planned_drafters(planning))


def make_planning(
    config: ExperimentConfig,
    topology: Topology,
    hardware: Hardware | None = None,
    compilers: Executor | None = None,
) -> tuple[Planning, Hardware]:
    """Returns what a run is planned from, and the figures of a device; `compilers` as of `PlanningPool`."""
    if config.speculation.drafting_devices:
        raise ConfigError(
            "speculation.decoupled.window: the devices that draft are not planned; set 0, which plans those"
            " of the mesh"
        )
    config = with_compute_dtype(config, platform_of(topology))
    model, eos_token_ids = planned_policy(config)
    check_devices(config.mesh, topology.num_devices)
    devices = compile_devices(topology)
    if hardware is None:
        hardware = hardware_of(topology, config.policy.compute_dtype)
    mesh, axes = None, ("data", "fsdp", "tensor")
    if config.mesh.num_devices > 1:  # as `rljax.sharding.make_mesh`, over other devices
        sizes = tuple(getattr(config.mesh, axis) for axis in axes)
        mine = np.array(devices[: config.mesh.num_devices]).reshape(sizes)
        mesh = Mesh(mine, axes, axis_types=(AxisType.Auto,) * 3)
        replicated_axes(model, mesh)  # raises where the mesh does not divide the policy
    with target.tracing_for(devices[0], topology.num_devices, platform_of(topology)):
        buckets = make_buckets_of(config, mesh, speculative=True)
        drafters = make_drafters(config.speculation)
        numerics = unmeasured_numerics(config, model, mesh)
        read = states_read(drafters, model)
    planning = Planning(
        config,
        model,
        eos_token_ids,
        numerics,
        buckets,
        drafters,
        mesh,
        devices[0],
        several_processes=topology.has_several_hosts or config.distributed.is_wanted(),
        hidden_layers=read,
        compilers=compilers,
    )
    return planning, hardware


@contextlib.contextmanager
def tracing(planning: Planning, topology: Topology) -> Iterator[None]:
    """Context in which the programs of a topology are traced and compiled."""
    platform, caching = platform_of(topology), jax.config.jax_enable_compilation_cache
    if platform != "cpu":  # a cached program for a device that is not there cannot be read back
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX asks once whether there is one
    try:
        with target.tracing_for(planning.device, topology.num_devices, platform):
            yield
    finally:
        jax.config.update("jax_enable_compilation_cache", caching)
        compilation_cache.reset_cache()


def _compiled(
    planning: Planning, shapes: PlannedRun, full_depth: bool, report: Callable[[str], None]
) -> tuple[PlannedRun, tuple[int, int] | None]:
    """Compiles the programs, of all layers or of two small depths. Returns the run of the whole policy, and
    the depths.
    """
    depth = planning.model.num_layers
    if full_depth:
        report(f"compiling all {depth} layers")
        run, pool = planning.begin()
        return _with_programs(dataclasses.replace(run, drafters=shapes.drafters), pool, report), None
    begun = []
    for layers in DEPTHS:
        report(f"compiling {layers} of {depth} layers")
        model = dataclasses.replace(planning.model, num_layers=layers)
        begun.append(dataclasses.replace(planning, model=model).begin())
    first, second = (_with_programs(run, pool, report) for run, pool in begun)
    programs = extrapolated(first.programs, second.programs, DEPTHS, depth)
    weights = {
        name: params | {"layers": [params["layers"][-1]] * depth}
        for name, params in second.draft_params.items()
    }
    run = dataclasses.replace(shapes, programs=programs, draft_params=weights, skipped=second.skipped)
    return run, DEPTHS


def extrapolated(
    shallow: Sequence[Program], deeper: Sequence[Program], depths: tuple[int, int], depth: int
) -> tuple[Program, ...]:
    """Returns the programs of a policy of some depth from the same ones, in the same order, at two ascending
    depths.

    Layers are equal, so every figure of a program is a constant and a share per layer. A layer is traced
    once, but compiled as often as it is called (`rljax/models/outlining.py`). A test compares with a whole
    compile.

    Raises:
      ValueError: the programs differ.
    """
    share = (depth - depths[0]) / (depths[1] - depths[0])
    programs = []
    for a, b in zip(shallow, deeper, strict=True):
        if a.kind != b.kind:
            raise ValueError(f"programs differ between depths: {a.name} and {b.name}")
        figures = {}
        for field in ("arguments", "outputs", "temporaries", "seconds", "flops", "accessed"):
            low, high = getattr(a, field), getattr(b, field)
            # A depth compiled while the machine was busy must not make a deeper policy cheaper.
            value = max(low + share * (high - low), high)
            figures[field] = round(value) if isinstance(low, int) else value
        programs.append(dataclasses.replace(a, **figures))
    return tuple(programs)


def _with_programs(run: PlannedRun, pool: PlanningPool, report: Callable[[str], None]) -> PlannedRun:
    """Returns the run with the programs of `pool` behind its own, which it waits for."""
    programs = list(run.programs)
    for program in pool.programs():
        report(f"  {program.name} in {program.seconds:.1f} s")
        programs.append(program)
    return dataclasses.replace(run, programs=tuple(programs), skipped=run.skipped | pool.skipped)


def _counts(run: PlannedRun) -> dict[str, int]:
    """Returns how many programs of each kind the run compiles."""
    counts = collections.Counter(program.kind for program in run.programs)
    counts.update(run.skipped)
    return {kind: count for kind, count in counts.items() if count}


def _compile_seconds(programs: tuple[Program, ...], counts: dict[str, int]) -> float:
    """Time of all programs, each as long as the compiled ones of its kind are on average."""
    return sum(
        count * statistics.fmean(program.seconds for program in programs if program.kind == kind)
        for kind, count in counts.items()
    )


def _pass(roofline: Roofline, slots: int, rows: int, length: int) -> PassTime:
    work = roofline.decode_pass(slots, rows, length)
    return PassTime(slots, rows, length, work, roofline.seconds(work))


def _step(run: PlannedRun, roofline: Roofline, lengths: Lengths, acceptance: float) -> StepTime:
    config, buckets, time = run.config, run.buckets, roofline.seconds
    rollout, training = config.rollout, config.training
    count = rollout.prompts_per_step * rollout.samples_per_prompt
    responses = lengths.sample(count)
    slots = config.engine.max_slots

    @functools.cache
    def plain_pass(batch: int, length: int) -> tuple[float, float]:
        return time(roofline.decode_pass(batch, batch, length)), 1.0

    @functools.cache
    def best_pass(batch: int, length: int) -> tuple[float, float]:
        """The pass with the most tokens a second, as the manager would choose."""
        choices = [plain_pass(batch, length)]
        for size, rows in pass_sizes(run):
            if size == batch:
                accepted = expected_tokens(acceptance, rows // batch - 1)
                choices.append((time(roofline.decode_pass(batch, rows, length)), accepted))
        return min(choices, key=lambda choice: choice[0] / choice[1])

    arguments = (responses, lengths.prompt, slots, buckets)
    plain = rollout_time(*arguments, plain_pass)
    drafted = rollout_time(*arguments, best_pass) if config.speculation.drafter is not None else None

    sequences = responses + lengths.prompt
    packed = pack_sequences(sequences, training.pack_length)
    microbatches = -(-packed.num_rows // training.rows_per_microbatch) * training.epochs_per_step
    gradients = time(roofline.microbatch())
    updates = training.minibatches_per_step * training.epochs_per_step
    forward = time(roofline.microbatch(backward=False))
    scored = (run.reference is not None) + bool(config.algorithm.corrects_rollout)
    update = microbatches * gradients + updates * time(roofline.optimizer())
    if run.train_state.critic is not None:
        update, scored = 2 * update, scored + 1
    padded = next(size for size in buckets.prefill()[1] if size >= lengths.prompt)
    prefill = time(roofline.prefill(rollout.prompts_per_step, padded))
    scoring = scored * forward * microbatches / training.epochs_per_step
    return StepTime(prefill, plain, drafted, update, scoring, int(sequences.sum()))


def summary_line(plan: Plan) -> str:
    """Returns one line: what is planned, and for which devices."""
    mesh = plan.run.config.mesh
    return (
        f"{num_params(plan.run.model):,} parameters in {plan.run.model.num_layers} layers on"
        f" {plan.topology.name} ({plan.topology.num_devices} x {plan.hardware.kind}), mesh: data {mesh.data},"
        f" fsdp {mesh.fsdp}, tensor {mesh.tensor}; {plan.run.config.policy.compute_dtype}"
    )
