"""Memory of a run on one device: what it holds all the time, and the programs that need most beside that."""

import dataclasses

from rljax.engine.weight_blocks import most_block_bytes
from rljax.errors import ConfigError
from rljax.learning.accumulation import TrainState
from rljax.planning.hardware import GIB, Hardware
from rljax.planning.heads import heads_bytes
from rljax.planning.programs import PlannedRun, Program, device_bytes, shared_bytes
from rljax.planning.small_models import small_model_bytes

_ROLLOUT = ("prefill", "insert", "generate", "verify", "grow", "compact", "draft")
_UPDATE = ("score", "score without filters", "values", "zeros", "gradients", "apply", "merge")
PHASES = {"rollout": _ROLLOUT, "update": _UPDATE}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. Arrays are counted without padding, programs by their compiler.

    Attributes:
      weights: float32 weights of policy and critic; under LoRA the policy's are merged weights, base and
        factors.
      moments: the optimizer's.
      reference: weights of the reference of a KL penalty.
      gradients: sums of gradients in an update.
      decode_weights: the engine's copy of the weights, as far as it is not shared with the trainer.
      draft_weights: drafters' weights on the device.
      draft_training: weights and moments of heads that are trained.
      draft_state: what drafters hold for the slots: caches, and features that heads have not read yet.
      cache: the largest decode state.
      cache_growth: the state before it, which exists while its slots move to the largest.
      temporaries: by phase, the most that a program needs beside its arguments and results.
      peaks: by phase, the most memory in use at any time, and the program that is then running.
      available: bytes that there are.
    """

    weights: int
    moments: int
    reference: int
    gradients: int
    decode_weights: int
    draft_weights: int
    draft_training: int
    draft_state: int
    cache: int
    cache_growth: int
    temporaries: dict[str, int]
    peaks: dict[str, tuple[int, str]]
    available: float

    @property
    def peak(self) -> int:
        """The most bytes in use in any phase."""
        return max((peak for peak, _ in self.peaks.values()), default=0)

    @property
    def least(self) -> dict[str, int]:
        """Bytes that a phase needs without temporaries of any program."""
        held = self.weights + self.moments + self.reference + self.draft_training
        rollout = held + self.decode_weights + self.draft_weights + self.draft_state + self.cache
        return {"rollout": rollout, "update": held + self.gradients}


def plan_memory(run: PlannedRun, hardware: Hardware) -> Memory:
    """Returns the memory of a run; with `run.programs` empty, only what its arrays take."""
    state = run.train_state
    critic = state.critic
    params = device_bytes(state.params)
    trained = params if state.factors is None else device_bytes(state.factors)
    weights = params + (0 if critic is None else device_bytes(critic.params))
    if state.factors is not None:
        weights += trained + device_bytes(state.base)
    moments = device_bytes(state.optimizer_state)
    moments += 0 if critic is None else device_bytes(critic.optimizer_state)
    reference = _reference_bytes(run)
    decode = device_bytes(run.decode_params)
    config = run.config
    in_float32 = config.policy.compute_dtype == "float32"
    if (
        hardware.platform == "cpu"
        and in_float32
        and config.engine.weight_blocks
        and config.mesh.num_devices == 1
    ):
        decode += most_block_bytes(run.decode_params, run.model)
    shared = shared_bytes(run.decode_params, state.params)
    head_weights, head_training, head_state = heads_bytes(run.heads)
    small_weights, small_caches = small_model_bytes(run.small_models)
    draft = sum(map(device_bytes, run.draft_params.values())) + head_weights + small_weights
    draft_state = small_caches + head_state
    cache = device_bytes(run.state)
    lengths = run.buckets.cache
    growth = 0 if len(lengths) < 2 else int(cache * lengths[-2] / lengths[-1])

    held = weights + moments + reference + head_training
    # Drafters draft for fewer slots than the largest decode state may have.
    verified = run.buckets.verified_batches(run.config.speculation.max_batch)
    share = verified[-1] / run.buckets.batch[-1] if verified else 1.0
    drafting = held + decode - shared + draft + int(share * (draft_state + cache))
    peaks: dict[str, tuple[int, str]] = {}
    temporaries = dict.fromkeys(PHASES, 0)
    for program in run.programs:
        of_drafter = program.drafter is not None
        phase = "rollout" if program.kind in _ROLLOUT or of_drafter else "update"
        if of_drafter:  # the largest, whose arguments are all among what is held
            beside = held + decode - shared + draft + draft_state + cache - program.arguments
        elif program.kind == "draft":
            beside = drafting - program.arguments
        else:
            beside = _beside(
                program, held, decode, shared, draft + draft_state, cache, params, trained, state
            )
        if program.total + beside > peaks.get(phase, (0, ""))[0]:
            peaks[phase] = program.total + beside, program.name
        temporaries[phase] = max(temporaries[phase], program.temporaries)
    return Memory(
        weights,
        moments,
        reference,
        trained,
        decode - shared,
        draft,
        head_training,
        draft_state,
        cache,
        growth,
        temporaries,
        peaks,
        hardware.memory,
    )


def _reference_bytes(run: PlannedRun) -> int:
    """Returns the bytes of the reference that no other weights share."""
    if run.reference is None:
        return 0
    lora = run.config.policy.lora
    if lora is None or run.config.algorithm.teacher is not None:
        return device_bytes(run.reference)
    return 0 if lora.path is None else device_bytes(run.train_state.base)


def _beside(
    program: Program,
    held: int,
    decode: int,
    shared: int,
    draft: int,
    cache: int,
    params: int,
    trained: int,
    state: TrainState,
) -> int:
    """Returns the bytes of arrays that exist while a program runs and that are none of its arguments."""
    kind = program.kind
    if kind in ("generate", "verify"):
        return held - shared + draft
    if kind == "prefill":
        return held - shared + draft + cache
    if kind in ("insert", "grow", "compact"):
        return held + decode - shared + draft
    if kind == "merge":
        # Base and factors are arguments, and the merged matrices of before are deleted.
        return held - 2 * device_bytes(state.base) - trained
    if state.factors is not None and state.critic is not None:
        # Programs of the critic are of all its weights.
        critic = device_bytes(state.critic.params)
        if "values" in program.name:
            params, trained = critic, 0
        elif kind == "apply" and program.arguments > critic:
            trained = critic
    if kind == "gradients":
        return held - params - (trained if state.factors is not None else 0)  # weights are arguments
    if kind == "apply":
        return held - 3 * trained  # weights and both moments are arguments
    return held - params if kind.startswith("score") or kind == "values" else held


def check_memory(memory: Memory, run: PlannedRun, where: str) -> None:
    """Raises a ConfigError of one line, with the key to change, where the run does not fit.

    Args:
      memory: from `plan_memory`. Before anything is compiled, it has no peaks, and only what must be held in
        any case is compared.
      run: the planned run.
      where: the device, for the message.
    """
    needs = memory.peaks or {phase: (size, "") for phase, size in memory.least.items()}
    phase, (needed, program) = max(needs.items(), key=lambda item: item[1][0])
    if needed <= memory.available:
        return
    at_least = "" if program else "at least "
    during = f" ({program})" if program else ""
    raise ConfigError(
        f"{_key(memory, run, phase, needed)}: the {phase}{during} needs {at_least}{needed / GIB:.1f} GiB a"
        f" device, but {where} has {memory.available / GIB:.1f}; {_remedy(memory, run, phase, needed)}"
    )


def _held(memory: Memory, phase: str) -> int:
    held = memory.weights + memory.moments + memory.reference + memory.draft_training
    if phase == "rollout":
        return held + memory.decode_weights + memory.draft_weights
    return held + memory.gradients


def _fits_split(memory: Memory, run: PlannedRun, needed: int) -> bool:
    """Whether a rollout fits with the engine's copy split along fsdp."""
    fsdp = run.config.mesh.fsdp
    if run.config.engine.weights == "fsdp" or fsdp == 1:
        return False
    return needed - memory.decode_weights * (1 - 1 / fsdp) <= memory.available


def _remedy_kind(memory: Memory, run: PlannedRun, phase: str, needed: int) -> str:
    mesh, training = run.config.mesh, run.config.training
    held = memory.weights + memory.moments + memory.reference
    if _held(memory, phase) > 0.8 * memory.available:
        split = held > memory.decode_weights or phase == "update"
        if (
            run.config.policy.compute_dtype == "float32"
            and phase == "rollout"
            and memory.decode_weights > held
        ):
            return "dtype"
        if phase == "rollout" and _fits_split(memory, run, needed):
            return "weights"
        return "fsdp" if split else "tensor"
    if phase == "rollout":
        return "slots"
    if training.rows_per_microbatch > mesh.data * mesh.fsdp:
        return "rows"
    return "fsdp" if training.remat else "remat"


def _key(memory: Memory, run: PlannedRun, phase: str, needed: int) -> str:
    return {
        "dtype": "policy.compute_dtype",
        "weights": "engine.weights",
        "fsdp": "mesh.fsdp",
        "tensor": "mesh.tensor",
        "slots": "engine.max_slots",
        "rows": "training.rows_per_microbatch",
        "remat": "training.remat",
    }[_remedy_kind(memory, run, phase, needed)]


def _remedy(memory: Memory, run: PlannedRun, phase: str, needed: int) -> str:
    kind = _remedy_kind(memory, run, phase, needed)
    mesh, training = run.config.mesh, run.config.training
    if kind == "dtype":
        return "set bfloat16"
    if kind == "weights":
        return "set fsdp, which gathers a layer of the weights at a time and decodes slower"
    if kind == "fsdp":
        return f"raise it above {mesh.fsdp}, with as many more devices"
    if kind == "tensor":
        return f"raise it above {mesh.tensor}"
    if kind == "slots":
        # Everything beside weights is in proportion to the number of slots.
        rest = needed - _held(memory, phase)
        room = memory.available - _held(memory, phase)
        multiple = mesh.data * mesh.fsdp
        slots = int(run.buckets.batch[-1] * room / rest) // multiple * multiple
        about = f"about {slots} fit" if slots else "or lower rollout.max_response_length"
        return f"lower it from {run.config.engine.max_slots} ({about})"
    if kind == "rows":
        return f"lower it from {training.rows_per_microbatch}"
    return "set it to true, which recomputes activations"
