"""Opens a saved policy for decoding, for `scripts/generate.py` and `scripts/serve.py`.

    served = open_policy("runs/quickstart", Options(slots=8), say=print)
    served.worker.submit([Job(served.request(prompt_ids, seed=0, sample=0, max_tokens=64), deliver)])

Sampling, lengths, engine and drafters follow the run's config, unless `Options` changes them. A Hugging Face
directory has the config's defaults, with the sampling of its generation_config.json. The noise of a response
depends only on seed and sample, so the same prompt and seed give the same tokens from either script, whatever
else is decoded at the same time.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from pydantic import ValidationError

from drafters.base import Drafter
from drafters.history import HISTORY
from drafters.names import check_name
from drafters.registry import make_drafters, rehearse_drafters
from rljax.assembly.decoding import make_numerics, make_scheduler, numerics_line, sampling_params, warm_up
from rljax.assembly.saved_policy import SavedPolicy, load_saved_policy
from rljax.assembly.task import configured_task
from rljax.cluster.starting import cluster_of
from rljax.config import (
    ExperimentConfig,
    MeshConfig,
    PolicyConfig,
    RolloutConfig,
    TaskConfig,
    check_with_workers,
)
from rljax.config.cluster import ClusterConfig
from rljax.config.cluster_keys import ClusterKeys
from rljax.config.speculation import WITHOUT_STEPS, SpeculationConfig
from rljax.engine.background import CompilerThread
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.engine.invariance import Invariance
from rljax.engine.number_type import with_number_type
from rljax.environments.task import environment_of
from rljax.errors import ConfigError
from rljax.models.huggingface import load_generation_config
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.rollout.stop_strings import StopStrings
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.serving.cluster_worker import ClusterWorker
from rljax.serving.programs import JoiningPrograms, compiling_lines
from rljax.serving.scoring import Scorer, Scores
from rljax.serving.worker import EngineWorker
from rljax.sharding import make_mesh
from rljax.tasks.base import Problem, Task

SERVING = 2
"""Purpose of served requests' noise; see `TRAINING` and `EVALUATION` in `rljax.rollout.collector`."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """Changes to the config; None changes nothing.

    Attributes:
      step: step of the run's checkpoint; None for the newest.
      temperature: temperature of sampling; 0 is greedy.
      top_p: see `SamplingParams`.
      slots: most responses decoded at a time.
      max_prompt_tokens: most tokens of a prompt.
      max_tokens: most tokens of a response.
      drafter: a name, or an import path, `module:Class` (`drafters/registry.py`), with the run's arguments
        where the run uses this drafter, else with its defaults; "none" decodes without drafts.
      workers: number of rollout workers that decode; None decodes in this process.
      ray: address of the Ray cluster of the workers; None for the run's `cluster.address`.
      compile: see `engine.compile`.
      cache: directory that keeps compiled programs; "none" keeps none.
    """

    step: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    slots: int | None = None
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    drafter: str | None = None
    workers: int | None = None
    ray: str | None = None
    compile: str | None = None
    cache: str | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class ServedPolicy:
    """A policy that is ready for requests.

    Attributes:
      vocab_size: number of rows of the embedding; token ids are below it.
      config: config of the decoding.
      sampling: sampling distribution of requests that name none.
      worker: worker that decodes, not yet started. It holds the weights in the engine's dtype.
      drafters: names of the drafters in use.
      scorer: scores finished responses; None where several devices decode.
      programs: what is compiled in the background; None where nothing is.
      task: environment whose episodes requests are; None for none.
    """

    tokenizer: Tokenizer
    vocab_size: int
    config: ExperimentConfig
    sampling: SamplingParams
    worker: EngineWorker | ClusterWorker
    drafters: tuple[str, ...]
    scorer: Scorer | None
    programs: JoiningPrograms | None = None
    task: Task | None = None

    @property
    def max_prompt_tokens(self) -> int:
        return self.config.rollout.max_prompt_length

    @property
    def max_tokens(self) -> int:
        return self.config.rollout.max_response_length

    def request(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        sample: int,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        problem: Problem | None = None,
    ) -> Request:
        """Returns a request with the noise of (seed, sample), and with `sampling` in place of the server's;
        that of an episode with its problem. Seeds are taken modulo 2^64, so negative ones are valid.
        """
        key = request_key(seed % 2**64, SERVING, sample)
        return Request(tuple(prompt_ids), key, max_tokens, training=False, sampling=sampling, problem=problem)

    def requested_sampling(self, changes: Mapping[str, float]) -> SamplingParams | None:
        """Returns the server's sampling distribution with a request's changes; None without any.

        Raises:
          ValueError: a setting that is impossible; the message begins with its name.
        """
        if not changes:
            return None
        requested = dataclasses.replace(self.sampling, **changes)
        self.worker.engine.check_sampling(requested)
        return requested

    def score(self, request: Request, tokens: Sequence[int]) -> Scores:
        """Scores a request's prompt and the response to it: a forward pass, which may be compiled first."""
        sampling = self.sampling if request.sampling is None else request.sampling
        ids = [*request.prompt_ids, *tokens]
        return self.scorer.score(self.worker.params, ids, len(request.prompt_ids), sampling)

    def stop_strings(self, more: Sequence[str] = ()) -> tuple[str, ...]:
        """Returns the stop strings of the config, and further ones of a request."""
        return tuple(dict.fromkeys((*self.config.rollout.stop, *more)))

    def stop(self, strings: Sequence[str]) -> StopStrings | None:
        """Returns the stop strings of one response; None without strings."""
        return StopStrings(strings, self.tokenizer.decode) if strings else None


def open_policy(
    path: str | os.PathLike[str],
    options: Options,
    say: Say,
    max_waiting: int = 256,
    steps_per_sync: int = 4,
    compile_first: bool = True,
    plays: bool = False,
) -> ServedPolicy:
    """Loads a policy and makes the worker that decodes it.

    Args:
      path: a run directory, a Hugging Face directory, or a name on the hub.
      options: changes to the config.
      say: called with a line about each part that is loaded or left out.
      max_waiting, steps_per_sync: see `EngineWorker`.
      compile_first: compile programs before they are used: all of them now, or with `engine.compile:
        background` those of the first request now and the others in a thread. False compiles each at its
        first use; with drafters all are compiled now, since the choice of drafts depends on measured times.
      plays: whether responses are episodes of the run's environment.

    Raises:
      UserError: the policy cannot be loaded, or not be decoded with these options.
    """
    if options.drafter is not None:
        check_name("--drafter", options.drafter, "none")
    saved = load_saved_policy(path, options.step)
    config = _config(saved, options, steps_per_sync, say)
    if config.engine.compilation_cache is not None:
        enable_compilation_cache(config.engine.compilation_cache)
    # The engine and the drafters, as in the run.
    mesh = make_mesh(config.mesh)
    pool = ExecutablePool(bool(config.engine.row_invariant), config.engine.compilation_cache)
    drafters = _drafters(config.speculation, options)
    numerics, invariance = make_numerics(config, saved.policy.config, mesh)
    say(numerics_line(config, invariance))
    task = configured_task(config.task, config.seed, say) if plays else None
    if plays and environment_of(task) is None:
        raise ConfigError(f"--episode: {config.task.name} is no environment; give a prompt")
    scheduler = make_scheduler(
        config, saved.policy, drafters, numerics, pool, mesh, per_slot_sampling=True, task=task
    )
    engine, speculator = scheduler.engine, scheduler.speculator
    # The drafters' state from the checkpoint; nothing trains them here.
    state: Mapping[str, np.ndarray] = {}
    if drafters:
        speculator.freeze()
        state = saved.drafter_state()
        if state:
            speculator.load_state(state)
    params = engine.load_params(saved.policy.params)
    say(
        f"{saved.path}"
        + ("" if saved.step is None else f", step {saved.step}")
        + f": temperature {config.rollout.temperature:g}, top_p {config.rollout.top_p:g}, drafter"
        f" {', '.join(drafters) or 'none'}"
    )
    worker: EngineWorker | ClusterWorker
    programs = None
    if options.workers is None:
        with compiling_lines(pool, say):
            if compile_first and config.engine.compile == "background" and mesh is None:
                programs = _compile_in_background(scheduler, params, config)
            elif compile_first or drafters:  # the programs of all shapes that requests may need
                warm_up(scheduler, params, config, requests_join=True)
        worker = EngineWorker(
            engine,
            params,
            scheduler.max_slots,
            speculator,
            max_waiting,
            steps_per_sync,
            learned_together=dict.fromkeys(_prompts(state), config.rollout.samples_per_prompt),
            environment=scheduler.tools,
        )
    else:
        worker = _cluster_worker(config, saved, scheduler, invariance, params, max_waiting, say)
    _report_untrained(drafters, say)
    tokenizer, vocab_size = saved.policy.tokenizer, saved.policy.config.vocab_size
    scorer = Scorer(engine) if mesh is None else None
    return ServedPolicy(
        tokenizer, vocab_size, config, engine.sampling, worker, tuple(drafters), scorer, programs, task
    )


def _compile_in_background(scheduler: Scheduler, params: Params, config: ExperimentConfig) -> JoiningPrograms:
    """Compiles what the first request needs, and begins with the rest in a thread: plain decoding, and what
    drafts and verifies. Where drafters on the device follow the slots, their programs are compiled now.
    """
    engine, slots, prompt_length = scheduler.engine, scheduler.max_slots, config.rollout.max_prompt_length
    thread = CompilerThread(engine.buckets, (engine.buckets.batch[0], engine.buckets.cache[0]))
    programs = JoiningPrograms(engine, params, thread, slots, prompt_length)
    rehearse_drafters(config.speculation)
    scheduler.speculator.warm_up_in_background(params, slots, prompt_length, True, thread=thread)
    thread.start()
    return programs


def _cluster_worker(
    config: ExperimentConfig,
    saved: SavedPolicy,
    scheduler: Scheduler,
    invariance: Invariance | None,
    params: Params,
    max_waiting: int,
    say: Say,
) -> ClusterWorker:
    """Starts the workers of a config, and waits until they have compiled."""
    check_with_workers(config)
    with contextlib.ExitStack() as parts:
        cluster = parts.enter_context(cluster_of(config, say))
        say("the workers compile")
        cluster.build(scheduler, config, saved.policy, invariance, serves=True)
        cluster.wait()
        end = parts.pop_all().close
    return ClusterWorker(cluster, scheduler.engine, params, scheduler.max_slots, max_waiting, end)


def _drafters(config: SpeculationConfig, options: Options) -> dict[str, Drafter]:
    try:
        return make_drafters(config)
    except ConfigError as error:  # names the config's key
        if options.drafter is None:
            raise
        raise ConfigError(str(error).replace("speculation.drafter:", "--drafter:", 1)) from error


def _report_untrained(drafters: Mapping[str, Drafter], say: Say) -> None:
    for name, drafter in drafters.items():
        if drafter.training is not None and not drafter.training.trained:
            say(f"drafter {name}: nothing has trained it yet, so few of its drafts will be right")


def _prompts(state: Mapping[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Returns the prompts in a run's history."""
    tokens, lengths = (state.get(f"{HISTORY}/prompt_{part}", ()) for part in ("tokens", "lengths"))
    ends = np.cumsum(lengths, dtype=int)
    return [tuple(tokens[end - length : end].tolist()) for end, length in zip(ends, lengths, strict=True)]


def _config(saved: SavedPolicy, options: Options, steps_per_sync: int, say: Say) -> ExperimentConfig:
    """Returns the run's config, or the defaults, with the changes of the options."""
    config = _defaults(saved, say) if saved.experiment is None else saved.experiment
    changes = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_prompt_length": options.max_prompt_tokens,
        "max_response_length": options.max_tokens,
    }
    rollout = config.rollout.model_copy(
        update={name: value for name, value in changes.items() if value is not None}
    )
    rollout = _fitting(rollout, options, saved.policy.config.max_positions, say)
    steps = max(steps_per_sync, config.engine.decode_steps_per_sync)
    # Under the other rules tokens would depend on the drafts, and so on earlier requests.
    engine = config.engine.model_copy(update={"verification": "coupled", "decode_steps_per_sync": steps})
    if options.slots is not None:
        engine = engine.model_copy(update={"max_slots": options.slots, "batch_buckets": None})
    if options.max_prompt_tokens is not None or options.max_tokens is not None:
        engine = engine.model_copy(update={"cache_buckets": None})
    if options.compile is not None:
        engine = engine.model_copy(update={"compile": options.compile})
    if options.cache is not None:
        cache = None if options.cache == "none" else options.cache
        engine = engine.model_copy(update={"compilation_cache": cache})
    mesh = config.mesh
    if mesh.num_devices > jax.device_count():
        say(f"the run used {mesh.num_devices} devices; here is {jax.device_count()}: decoding on one")
        mesh, engine = MeshConfig(), engine.model_copy(update={"weights": "replicated"})
    speculation = _speculation(config.speculation, options.drafter)
    if config.tools is not None:
        say("the run's tools are not called here: a response continues after a call without its answer")
    cluster = _cluster(config.cluster, options)
    parts = {"rollout": rollout, "engine": engine, "speculation": speculation, "mesh": mesh, "tools": None}
    parts |= {"cluster": cluster}
    if options.dtype is not None:
        parts["policy"] = config.policy.model_copy(update={"compute_dtype": options.dtype})
    config = with_number_type(config.model_copy(update=parts))
    try:
        sampling_params(config)
    except ValueError as error:
        raise ConfigError(f"--temperature, --top-p: {error}") from error
    return config


def _fitting(rollout: RolloutConfig, options: Options, most: int, say: Say) -> RolloutConfig:
    """Returns the section with lengths that fit into `most` positions together: a default gives way to what
    an option sets, and two defaults share the positions.

    Raises:
      ConfigError: what options set does not fit.
    """
    prompt, response = rollout.max_prompt_length, rollout.max_response_length
    if prompt + response <= most:
        return rollout
    if options.max_tokens is not None and options.max_prompt_tokens is None:
        prompt = most - response
    elif options.max_tokens is None:
        prompt = prompt if options.max_prompt_tokens is not None else min(prompt, most // 2)
        response = min(response, most - prompt)
    if min(prompt, response) < 1 or prompt + response > most:
        raise ConfigError(
            f"--max-prompt-tokens, --max-tokens: {rollout.max_prompt_length} +"
            f" {rollout.max_response_length} are more than the {most} positions the policy is made for"
        )
    say(f"prompts of up to {prompt} tokens, responses of up to {response}: the policy has {most} positions")
    return rollout.model_copy(update={"max_prompt_length": prompt, "max_response_length": response})


def _cluster(config: ClusterConfig, options: Options) -> ClusterConfig:
    """Returns the section of workers that serve: what it says of rollouts has no meaning for them."""
    changes = {"workers": options.workers or 0, "address": options.ray or config.address}
    kept = config.model_dump(include=set(ClusterKeys.model_fields) - {"balance", "replay"})
    try:
        return ClusterConfig.model_validate(kept | changes)
    except ValidationError as error:
        raise ConfigError(f"--ray: {error.errors()[0]['msg']}") from error


def _defaults(saved: SavedPolicy, say: Say) -> ExperimentConfig:
    """Returns the config of a Hugging Face directory, with the sampling of its generation_config.json."""
    generation, path = load_generation_config(saved.policy.tokenizer_directory), str(saved.path)
    if generation.repetition_penalty != 1.0:
        say(
            f"the directory's repetition_penalty {generation.repetition_penalty:g} is left out: it is meant"
            " for the prompt's tokens, too, which are not penalized here"
        )
    sampling = {name: getattr(generation, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    rollout = RolloutConfig().model_copy(update=sampling)
    policy, task = PolicyConfig(path=path), TaskConfig(name="chain_arithmetic")  # the task is not used
    return ExperimentConfig(run_dir=path, policy=policy, task=task).model_copy(update={"rollout": rollout})


def _speculation(config: SpeculationConfig, drafter: str | None) -> SpeculationConfig:
    """Returns the speculation section for requests that arrive at any time, with the chosen drafters."""
    named, kinds = config.arguments, config.kinds
    if drafter is not None:
        named = {} if drafter == "none" else {drafter: named.get(drafter, {})}
    run_files = ("spill_dir", "save_dir")  # a server must not write the run's files
    named = {
        name: {key: value for key, value in args.items() if key not in run_files}
        for name, args in named.items()
    }
    changes = {**WITHOUT_STEPS, "overlap": False}
    if list(named) != config.drafters:
        changes |= {"choice": "expected", "mix": False, "strategies": []}
    first = next(iter(named), None)
    changes |= {"drafter": kinds.get(first, first), "args": named.pop(first, {})}
    changes["others"] = {
        name: args if kinds[name] == name else {"kind": kinds[name], **args} for name, args in named.items()
    }
    return config.model_copy(update=changes)
