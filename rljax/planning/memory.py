"""Memory of a run on one device: what it holds all the time, and the programs that need most besides that."""

import dataclasses

import jax
import jax.numpy as jnp

from rljax.engine.weight_blocks import most_block_bytes
from rljax.errors import ConfigError
from rljax.planning.hardware import GIB, Hardware
from rljax.planning.programs import PlannedRun, device_bytes, shard_size, shared_bytes

PHASES = ("rollout", "update")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. Arrays are counted without padding, programs by their compiler.

    Attributes:
      weights: float32 weights of policy and critic; under LoRA the policy's are merged weights, base and
        factors.
      moments: the optimizer's.
      reference: weights of the reference of a KL penalty.
      gradients: sums of gradients in an update.
      copies: matrices in the compute dtype, which its micro-batches read (`training.cast_once`).
      decode_weights: the engine's copy of the weights, as far as it is not shared with the trainer.
      draft_weights: drafters' weights on the device.
      draft_training: weights and moments of heads that are trained.
      draft_state: what drafters hold for the slots: caches, and features that heads have not read yet.
      cache: the largest decode state.
      cache_growth: the state before it, which exists while its slots move to the largest.
      temporaries: by phase, the most that a program needs besides its arguments and results.
      peaks: by phase, the most memory in use at any time, and the program that is then running.
      available: bytes that there are.
    """

    weights: int
    moments: int
    reference: int
    gradients: int
    copies: int
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
        return {"rollout": rollout, "update": held + self.gradients + self.copies}


def plan_memory(run: PlannedRun, hardware: Hardware) -> Memory:
    """Returns the memory of a run; with `run.programs` empty, only what its arrays take."""
    state, config = run.train_state, run.config
    lora, critic, drafters = state.factors is not None, state.critic, run.drafters.values()
    params = device_bytes(state.params)
    trained = device_bytes(state.factors) if lora else params
    base = device_bytes(state.base)
    critic_weights = 0 if critic is None else device_bytes(critic.params)
    weights = params + critic_weights + (trained + base if lora else 0)
    moments = device_bytes(state.optimizer_state)
    moments += 0 if critic is None else device_bytes(critic.optimizer_state)
    reference, copies = _reference_bytes(run), _copied_bytes(run)
    decode = device_bytes(run.decode_params)
    blocks = config.engine.weight_blocks and config.policy.compute_dtype == "float32"
    if hardware.platform == "cpu" and blocks and config.mesh.num_devices == 1:
        decode += most_block_bytes(run.decode_params, run.model)
    shared = shared_bytes(run.decode_params, state.params)
    training = sum(device_bytes(drafter.training) for drafter in drafters)
    draft = sum(map(device_bytes, run.draft_params.values()))
    draft += sum(device_bytes(drafter.weights) for drafter in drafters)
    draft_state = sum(device_bytes(drafter.state) + drafter.unread for drafter in drafters)
    cache, lengths = device_bytes(run.state), run.buckets.cache
    growth = 0 if len(lengths) < 2 else int(cache * lengths[-2] / lengths[-1])

    # What there is in each phase, and what of it is among the arguments of its programs.
    held = weights + moments + reference + training
    rollout = held + decode - shared + draft + draft_state + cache
    arguments = dict.fromkeys(("insert", "grow", "compact", "free", "count"), cache)
    arguments |= {"prefill": decode}
    arguments |= dict.fromkeys(("generate", "generate fixed", "append", "verify"), decode + cache)
    of_update = {
        "score": params,
        "score without filters": params,
        "values": params,
        "gradients": params + (trained if lora else 0),
        "apply": 3 * trained,  # weights and both moments
        "merge": 2 * base + trained,  # and the merged matrices of before are deleted
    }
    # Drafters draft for fewer slots than the largest decode state may have.
    verified = run.buckets.verified_batches(config.speculation.max_batch)
    share = verified[-1] / run.buckets.batch[-1] if verified else 1.0
    drafting = held + decode - shared + draft + int(share * (draft_state + cache))
    peaks: dict[str, tuple[int, str]] = {}
    temporaries = dict.fromkeys(PHASES, 0)
    for program in run.programs:
        kind, phase = program.kind, "rollout"
        if program.drafter is not None:  # the largest, whose arguments are all among what is held
            beside = rollout - program.arguments
        elif kind == "draft":
            beside = drafting - program.arguments
        elif kind in arguments:
            beside = rollout - arguments[kind]
        elif kind == "begin":  # whose arguments are all held
            phase, beside = "update", held - program.arguments
        else:
            phase, beside = "update", held - of_update.get(kind, 0)
            if lora and critic is not None:  # whose programs are of all its weights
                if "values" in program.name and kind in ("values", "gradients"):
                    beside = held - critic_weights
                elif kind == "apply" and program.arguments > critic_weights:
                    beside = held - 3 * critic_weights
        if program.total + beside > peaks.get(phase, (0, ""))[0]:
            peaks[phase] = program.total + beside, program.name
        temporaries[phase] = max(temporaries[phase], program.temporaries)
    return Memory(
        weights,
        moments,
        reference,
        trained,
        copies,
        decode - shared,
        draft,
        training,
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


def _copied_bytes(run: PlannedRun) -> int:
    """Returns the bytes of the copies of matrices that an update reads, as from `weight_copies`."""
    config, state = run.config, run.train_state
    if config.policy.compute_dtype == "float32" or not config.training.cast_once:
        return 0
    trained = [] if state.factors is not None else state.params["layers"]
    if state.critic is not None:  # one of the two at a time
        trained = state.critic.params["trunk"]["layers"]
    matrices = (leaf for leaf in jax.tree.leaves(trained) if len(leaf.shape) > 1)
    return sum(shard_size(leaf) * jnp.dtype(config.policy.compute_dtype).itemsize for leaf in matrices)


def check_memory(memory: Memory, run: PlannedRun, where: str) -> None:
    """Raises a ConfigError of one line, with the key to change, where the run does not fit.

    Args:
      memory: from `plan_memory`. Before anything is compiled, it has no peaks, and only what must be held in
        any case is compared.
      where: the device, for the message.
    """
    needs = memory.peaks or {phase: (size, "") for phase, size in memory.least.items()}
    phase, (needed, program) = max(needs.items(), key=lambda item: item[1][0])
    if needed <= memory.available:
        return
    at_least = "" if program else "at least "
    during = f" ({program})" if program else ""
    key, remedy = _remedy(memory, run, phase, needed)
    raise ConfigError(
        f"{key}: the {phase}{during} needs {at_least}{needed / GIB:.1f} GiB a device, but {where} has"
        f" {memory.available / GIB:.1f}; {remedy}"
    )


def _remedy(memory: Memory, run: PlannedRun, phase: str, needed: int) -> tuple[str, str]:
    """Returns the key to change, and how."""
    config, rollout, available = run.config, phase == "rollout", memory.available
    mesh, training = config.mesh, config.training
    trained = memory.weights + memory.moments + memory.reference
    decoding = memory.decode_weights + memory.draft_weights
    held = trained + memory.draft_training + (decoding if rollout else memory.gradients)
    if held > 0.8 * available:
        larger = memory.decode_weights > trained
        if config.policy.compute_dtype == "float32" and rollout and larger:
            return "policy.compute_dtype", "set bfloat16"
        split = needed - memory.decode_weights * (1 - 1 / mesh.fsdp)
        if rollout and config.engine.weights != "fsdp" and mesh.fsdp > 1 and split <= available:
            return (
                "engine.weights",
                "set fsdp, which gathers a layer of the weights at a time and decodes slower",
            )
        if trained > memory.decode_weights or not rollout:
            return "mesh.fsdp", f"raise it above {mesh.fsdp}, with as many more devices"
        return "mesh.tensor", f"raise it above {mesh.tensor}"
    multiple = mesh.data * mesh.fsdp
    if rollout:  # everything besides weights is in proportion to the number of slots
        slots = int(run.buckets.batch[-1] * (available - held) / (needed - held)) // multiple * multiple
        about = f"about {slots} fit" if slots else "or lower rollout.max_response_length"
        return "engine.max_slots", f"lower it from {config.engine.max_slots} ({about})"
    if training.rows_per_microbatch > multiple:
        return "training.rows_per_microbatch", f"lower it from {training.rows_per_microbatch}"
    if training.remat and memory.copies:
        return "training.cast_once", "set it to false, which casts weights in every micro-batch"
    if training.remat:
        return "mesh.fsdp", f"raise it above {mesh.fsdp}, with as many more devices"
    return "training.remat", "set it to true, which recomputes activations"
