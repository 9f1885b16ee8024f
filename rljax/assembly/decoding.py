"""Builds engine, drafters and scheduler from a config, for training, evaluation and serving.

numerics, invariance = make_numerics(config, policy.config, mesh)
pool = ExecutablePool(...)
scheduler = make_scheduler(config, policy, make_drafters(config.speculation), numerics, pool, mesh)
params = scheduler.engine.load_params(policy.params)
warm_up(scheduler, params, config)
completions, statistics = scheduler.run(params, requests)
"""

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jax.sharding import Mesh

from drafters.base import Drafter
from drafters.registry import rehearse_drafters, states_read
from rljax import processes, target
from rljax.assembly.policy import Policy
from rljax.config import ExperimentConfig, with_compute_dtype
from rljax.config.learning import TrainingConfig
from rljax.engine.background import CompilerThread
from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.invariance import Invariance, measured, row_counts
from rljax.engine.loop_choice import choose_loop, is_measured
from rljax.engine.plain_programs import PlainPrograms
from rljax.engine.shapes import Shapes, warm_up_plain
from rljax.environments.use import make_environment_use
from rljax.errors import ConfigError
from rljax.kernels.token_logprobs.base import chunk_columns, chunk_tokens
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.rows import Numerics
from rljax.rollout.collector import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.slots import check_settings
from rljax.sharding import row_multiple
from rljax.speculation.idle_requests import make_idle_requests
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.speculator import Speculator
from rljax.tasks.base import Task
from rljax.tools.use import make_tool_use

_OUTLINED_FROM = 4  # layers; with fewer, little time and memory is saved


def make_numerics(
    config: ExperimentConfig, policy: ModelConfig, mesh: Mesh | None
) -> tuple[Numerics, Invariance | None]:
    """Returns the numerics of the policy, and the row-invariance measured for them (None without
    row-invariance, or on a mesh).

    Raises:
      ConfigError: row-invariance does not hold on this device, and `engine.row_invariant` asks for it.
    """
    engine, numerics = config.engine, unmeasured_numerics(config, policy, mesh)
    if mesh is not None or not (engine.row_invariant or engine.weight_blocks):
        return numerics, None
    training_rows = _training_rows(config.training, policy.vocab_size)
    counts = row_counts(make_buckets_of(config, mesh, speculative=True), training_rows)
    invariance = measured(policy, numerics, counts, engine.compilation_cache)
    if not engine.weight_blocks:
        form = dataclasses.replace(invariance.form, blocks=())
        invariance = dataclasses.replace(invariance, form=form)
    if not engine.row_invariant:
        return dataclasses.replace(numerics, measured_form=invariance.form), None
    if not invariance.exact and stops_unless_exact(engine.row_invariant, target.platform()):
        raise ConfigError(
            f"engine.row_invariant: does not hold here, {'; '.join(invariance.failures)}; set warn to go"
            " on and count the tokens that differ, or false"
        )
    return dataclasses.replace(numerics, measured_form=invariance.form), invariance


def stops_unless_exact(row_invariant: bool | str, platform: str) -> bool:
    """Whether a run under this `engine.row_invariant` stops where its numerics are not exact. auto stops on a
    CPU, where a form of products is exact on every processor seen so far.
    """
    return row_invariant is True or (row_invariant == "auto" and platform == "cpu")


def unmeasured_numerics(config: ExperimentConfig, policy: ModelConfig, mesh: Mesh | None) -> Numerics:
    """Returns the numerics of the policy before row-invariance is measured."""
    kernels = KernelChoice(**config.kernels.model_dump())
    outline, platform = config.policy.outline_layers, target.platform()
    dtype = with_compute_dtype(config, platform).policy.compute_dtype
    if outline == "on" and platform == "gpu":
        raise ConfigError(
            "policy.outline_layers: on makes slow programs on a GPU, whose compiler fuses nothing in a called"
            " layer; set auto"
        )
    if outline == "auto":
        # In bfloat16 layers that are not called are traced one by one (`transformer.forward`).
        pays = config.training.remat or dtype == "bfloat16"
        pays = pays and platform == "cpu" and policy.num_layers >= _OUTLINED_FROM
        outline = "on" if pays else "off"
    return Numerics(
        bool(config.engine.row_invariant),
        dtype,
        kernels if mesh is None else kernels.on_mesh(mesh),
        outline_layers=outline == "on",
    )


def numerics_line(config: ExperimentConfig, invariance: Invariance | None) -> str:
    """Returns one line for the user on whether bits depend on the batch."""
    if invariance is not None:
        dtype = with_compute_dtype(config, target.platform()).policy.compute_dtype
        summary = invariance.summary(dtype)
        if invariance.exact:
            return summary
        return f"{summary}; near-ties may flip, and training counts the tokens that differ (mismatch/tokens)"
    if config.engine.row_invariant:
        return "numerics: exactness is not measured on a mesh"
    return "numerics: engine.row_invariant is off, so bits may depend on the batch"


def _training_rows(training: TrainingConfig, vocab_size: int) -> tuple[int, ...]:
    """Numbers of rows in an update's matrix products: in the layers, and in the LM head."""
    rows = training.rows_per_microbatch
    columns = chunk_columns(rows, training.pack_length, chunk_tokens(training.logprob_chunk, vocab_size))
    return rows * training.pack_length, rows * columns


def make_buckets_of(config: ExperimentConfig, mesh: Mesh | None, speculative: bool) -> Buckets:
    """Returns the shapes of decoding that a config asks for."""
    rollout, speculation = config.rollout, config.speculation
    return make_buckets(
        config.engine.max_slots,
        rollout.max_prompt_length + rollout.max_response_length,
        bool(config.engine.row_invariant),
        config.engine.batch_buckets,
        config.engine.cache_buckets,
        row_multiple(mesh),
        speculation.verify_buckets if speculative and speculation.drafter is not None else (),
        speculation.max_drafts,
        rollout.prompts_per_step,
    )


def sampling_params(config: ExperimentConfig) -> SamplingParams:
    """Returns the distribution that rollouts sample from and training scores."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return SamplingParams(**{name: getattr(config.rollout, name) for name in names})


def evaluation_sampling(config: ExperimentConfig) -> SamplingParams | None:
    """Returns the distribution that evaluations sample from; None where it is that of rollouts.

    Raises:
      ConfigError: no slot can have such settings.
    """
    sampling = sampling_params(config)
    evaluated = dataclasses.replace(sampling, **config.evaluation.sampling_changes)
    if evaluated == sampling:
        return None
    try:
        check_settings(evaluated)
    except ValueError as error:
        raise ConfigError(f"evaluation.{error}") from error
    return evaluated


def make_scheduler(
    config: ExperimentConfig,
    policy: Policy,
    drafters: dict[str, Drafter],
    numerics: Numerics,
    pool: ExecutablePool,
    mesh: Mesh | None,
    per_slot_sampling: bool = False,
    task: Task | None = None,
) -> Scheduler:
    """Returns a scheduler with its engine and, if there are drafters, its speculator.

    Args:
      config: the experiment. Its speculation section says how drafts are used, not which drafters exist.
      policy: the policy to decode. `Scheduler.run` takes its weights separately.
      drafters: drafters by name, from `make_drafters`; without any, decoding is plain.
      mesh: from `rljax.sharding.make_mesh`.
      per_slot_sampling: whether requests may have their own temperature and filters; in any case where
        evaluations have others than rollouts.
      task: task of the problems, where it may be an environment.

    Raises:
      UserError: a drafter does not fit the policy, or the drafters do not fit the manager.
    """
    rollout, speculation = config.rollout, config.speculation
    engine = DecodeEngine(
        policy.config,
        numerics,
        sampling_params(config),
        make_buckets_of(config, mesh, speculative=bool(drafters)),
        policy.eos_token_ids,
        config.engine.decode_steps_per_sync,
        pool,
        mesh,
        config.engine.verification,
        states_read(drafters, policy.config, policy.tokenizer),
        per_slot_sampling or evaluation_sampling(config) is not None,
        config.engine.weights,
    )
    engine.fixed_gain = math.inf if config.engine.decode_loop == "fixed" else 0.0
    speculator, overlap = None, config.engine.overlap
    if drafters:
        overlap = speculation.overlap
        speculator = Speculator(
            engine,
            drafters,
            speculation.max_batch,
            make_idle_requests(speculation),
            strategies=StrategyChoice(speculation, config.seed, engine),
        )
    stop = StopStrings(rollout.stop, policy.tokenizer.decode) if rollout.stop else None
    tools = None if config.tools is None else make_tool_use(config.tools, policy.tokenizer)
    environment = None if task is None else make_environment_use(config, task, policy.tokenizer)
    return Scheduler(engine, config.engine.max_slots, stop, speculator, overlap, environment or tools)


def warm_up(
    scheduler: Scheduler,
    params: Params,
    config: ExperimentConfig,
    requests_join: bool = False,
    resumes: bool = False,
    wait: bool | None = None,
    first_prompts: Sequence[int] = (),
    thread: CompilerThread | None = None,
) -> None:
    """Compiles every program that decoding the config's prompts and responses needs.

    Args:
      params: weights from `engine.load_params`.
      requests_join: whether requests also join while others decode, as in a server. Then prompts enter decode
        states of any size, and decode states grow to more slots.
      resumes: whether requests may arrive with response tokens, which are prefilled after the prompt.
      wait: whether to wait for everything, and to measure verifying passes; None for `engine.compile`. If
        not, programs that decoding does not begin with are compiled in a thread that `DecodeEngine.close` and
        `Speculator.close` end. A server, whose requests join, leaves only drafting and verifying to the
        thread.
      first_prompts: lengths of the first prompts, in tokens. The programs that they use come first.
      thread: the thread to compile in, with whatever else it has to compile; None for one of its own. For
        requests of any length it is not used.
    """
    engine, slots, speculator = scheduler.engine, scheduler.max_slots, scheduler.speculator
    prompt_length, tools = config.rollout.max_prompt_length, scheduler.tools is not None
    any_request = requests_join or resumes  # of any length that fits
    longest = None if any_request else prompt_length + config.rollout.max_response_length
    late_inserts = requests_join or speculator.idle.late_inserts
    in_background = not (config.engine.compile == "before" if wait is None else wait)
    if processes.several():  # a thread compiles by the clock, and all processes must run the same programs
        in_background = False
    engine.close()
    engine.background = None
    measures_loop = is_measured(config.engine.decode_loop, processes.several())
    if measures_loop and not any_request:  # calls of servers are shorter than a fixed loop
        batches = engine.buckets.batch[0], engine.buckets.batch_for(slots)
        choose_loop(engine, params, batches, prompt_length + 1, config.engine.compilation_cache)
    if longest is not None and not in_background:
        first_prompts = [1]  # nothing that shorter prompts need is left out
    kinds = {"late_inserts": late_inserts, "appends": tools, "resumes": resumes, "widens": requests_join}
    with ThreadPoolExecutor(1) as rehearsal:  # numba compiles in Python, while XLA compiles outside of it
        rehearsed = rehearsal.submit(rehearse_drafters, config.speculation)
        if longest is not None:
            thread = CompilerThread(engine.buckets, (slots, longest)) if thread is None else thread
            prompts = first_prompts or [prompt_length]
            shapes = Shapes(engine.buckets, slots, prompt_length, longest, 0, prompts, **kinds)
            plain = PlainPrograms(engine, params, thread, shapes)
            if in_background:
                engine.background = plain
            else:
                plain.finish()
        else:
            warm_up_plain(engine, params, slots, prompt_length, **kinds)
    rehearsed.result()
    if in_background:
        speculator.warm_up_in_background(
            params, slots, prompt_length, requests_join, first_prompts, longest, thread
        )
    else:
        speculator.warm_up(params, prompt_length, requests_join, slots, longest)
