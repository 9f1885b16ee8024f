"""What decodes a policy as a config says: engine, drafters and scheduler, for training and for what comes
after it.

    numerics, pool = make_numerics(config, mesh), ExecutablePool(...)
    scheduler = make_scheduler(config, policy, make_drafters(config.speculation), numerics, pool, mesh)
    params = scheduler.engine.load_params(policy.params)
    warm_up(scheduler, params, config)
    completions, statistics = scheduler.run(params, requests)
"""

from jax.sharding import Mesh

from drafters.base import Drafter
from drafters.registry import rehearse_drafters, states_read
from rljax.config import ExperimentConfig
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.errors import ConfigError
from rljax.models.transformer import Params
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.rows import Numerics
from rljax.rollout.scheduler import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.distribution import SamplingParams
from rljax.sharding import row_multiple
from rljax.speculation.managers.manager import strategy_choice
from rljax.speculation.managers.papers.calibration import calibration_key, load_calibration
from rljax.speculation.managers.papers.roofline import Roofline
from rljax.speculation.run_ahead import RunAhead
from rljax.speculation.speculative_pass import Speculator
from rljax.tools.use import make_tool_use
from rljax.training.policy import Policy


def make_numerics(config: ExperimentConfig, mesh: Mesh | None) -> Numerics:
    """How the policy computes."""
    kernels = KernelChoice(**config.kernels.model_dump())
    if mesh is not None:
        kernels = kernels.on_mesh()
    return Numerics(config.engine.row_invariant, config.policy.compute_dtype, kernels)


def sampling_params(config: ExperimentConfig) -> SamplingParams:
    """The distribution that is sampled, and trained."""
    rollout = config.rollout
    return SamplingParams(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p,
        rollout.repetition_penalty,
        rollout.frequency_penalty,
        rollout.presence_penalty,
    )


def make_scheduler(
    config: ExperimentConfig,
    policy: Policy,
    drafters: dict[str, Drafter],
    numerics: Numerics,
    pool: ExecutablePool,
    mesh: Mesh | None,
) -> Scheduler:
    """A scheduler with its engine and, with drafters, its speculator.

    Args:
      config: the experiment; of the speculation section, what says how drafts are used.
      policy: whose tokens; its weights are given to `Scheduler.run`.
      drafters: by name, from `make_drafters`; empty decodes plainly.
      numerics: see `make_numerics`.
      pool: for compiled programs.
      mesh: see `rljax.sharding.make_mesh`.

    Raises:
      UserError: drafters and policy, or drafters and the way to choose among them, do not go together.
    """
    rollout, speculation = config.rollout, config.speculation
    engine = DecodeEngine(
        policy.config,
        numerics,
        sampling_params(config),
        make_buckets(
            config.engine.max_slots,
            rollout.max_prompt_length + rollout.max_response_length,
            config.engine.row_invariant,
            config.engine.batch_buckets,
            config.engine.cache_buckets,
            row_multiple(mesh),
            speculation.verify_buckets if drafters else (),
            speculation.max_drafts,
        ),
        policy.eos_token_ids,
        config.engine.decode_steps_per_visit,
        pool,
        mesh,
        config.engine.verification,
        states_read(drafters, policy.config, policy.tokenizer),
    )
    speculator = None
    if drafters:
        run_ahead = None
        if speculation.run_ahead_below:
            run_ahead = RunAhead(speculation.run_ahead_below, speculation.run_ahead_share)
        speculator = Speculator(
            engine,
            drafters,
            speculation.max_batch,
            run_ahead,
            strategies=strategy_choice(speculation, config.seed, _roofline(config, engine, drafters)),
        )
    stop = StopStrings(rollout.stop, policy.tokenizer.decode) if rollout.stop else None
    tools = None if config.tools is None else make_tool_use(config.tools, policy.tokenizer)
    return Scheduler(engine, config.engine.max_slots, stop, speculator, speculation.overlap, tools)


def warm_up(
    scheduler: Scheduler,
    params: Params,
    config: ExperimentConfig,
    late_inserts: bool = False,
    widens: bool = False,
) -> None:
    """Compiles all that decoding the config's prompts and responses needs.

    Args:
      scheduler: from `make_scheduler`.
      params: weights from `engine.load_params`.
      config: as given to `make_scheduler`.
      late_inserts: see `DecodeEngine.warm_up`.
      widens: also what states of fewer slots need to become wider.
    """
    prompt_length, speculator = config.rollout.max_prompt_length, scheduler.speculator
    late = late_inserts or (speculator is not None and speculator.run_ahead is not None)
    scheduler.engine.warm_up(params, scheduler.max_slots, prompt_length, late)
    if config.tools is not None:
        scheduler.engine.warm_up_append(params, scheduler.max_slots)
    if widens:
        for length in scheduler.engine.buckets.cache:
            scheduler.engine.widen(scheduler.engine.init_state(1, length), scheduler.max_slots)
    if speculator is not None:
        rehearse_drafters(config.speculation)
        speculator.warm_up(params, prompt_length, widens)


def _roofline(
    config: ExperimentConfig, engine: DecodeEngine, drafters: dict[str, Drafter]
) -> Roofline | None:
    """The device's constants, where the rollout manager predicts from them."""
    speculation = config.speculation
    if speculation.choice != "roofline":
        return None
    key = calibration_key(
        engine.config, engine.numerics, drafters["quantized"].format, config.mesh.num_devices
    )
    found = load_calibration(speculation.calibration_dir, key)
    if found is None:
        raise ConfigError(
            f"speculation.choice: roofline finds no constants of this policy and device in"
            f" {speculation.calibration_dir}; run scripts/calibrate.py with this config first"
        )
    return found.roofline
