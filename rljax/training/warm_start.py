"""Supervised training on the task's worked solutions before RL: the "cold start" of DeepSeek-R1 (arXiv
2501.12948, section 2.3). The trained policy is cached, so only the first run waits for it. A warm start that
is stopped or killed resumes from its last checkpoint in the run directory.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import safetensors

from rljax import processes
from rljax.assembly.checkpoint import RunCheckpoints
from rljax.assembly.policy import Policy
from rljax.config import ExperimentConfig
from rljax.engine.executables import ExecutablePool
from rljax.environments.task import environment_of
from rljax.environments.use import EnvironmentUse, make_environment_use
from rljax.errors import CheckpointError, ConfigError
from rljax.learning.accumulation import TrainState
from rljax.learning.optimizer import make_optimizer
from rljax.learning.packing import TrainingSequence, build_batch, pack_sequences
from rljax.models.digest import weights_digest
from rljax.models.huggingface import load_params, save_model
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.progress import Progress
from rljax.sampling.distribution import SamplingParams
from rljax.tasks.base import Problem, Task
from rljax.tasks.wrapper import fingerprint
from rljax.tools.markup import Markup
from rljax.tools.use import make_tool_use
from rljax.training.interruption import StopRequest
from rljax.training.update import Recipe, Trainer

_CACHE_VERSION = 1  # raise when a change to the warm start makes cached policies stale
_SAVED_EVERY = 100  # updates


def warm_start(
    config: ExperimentConfig,
    policy: Policy,
    task: Task,
    numerics: Numerics,
    pool: ExecutablePool,
    mesh,
    progress: Progress,
    directory: Path,
    stop: StopRequest,
) -> Policy:
    """Returns the policy after `config.warm_start`, trained or from the cache.

    Args:
      config: the experiment.
      policy: policy to begin with.
      task: task with worked solutions.
      numerics: numerics of the run.
      pool: pool of compiled programs.
      mesh: devices to use; None for one.
      progress: shows steps and messages to the user.
      directory: directory for checkpoints during the warm start; deleted at the end.
      stop: requests by signals to stop; the current update is finished and saved first.
    """
    settings = config.warm_start
    key = _cache_key(config, policy, task)
    cached = Path(settings.cache_dir) / key
    if processes.from_first(cached.exists):
        progress.message(f"warm start: cached in {cached}")
        return dataclasses.replace(policy, params=load_params(cached, policy.config, dtype="float32"))
    rule = {
        "learning_rate": settings.learning_rate,
        "schedule": "cosine",
        "warmup_steps": settings.steps // 20,
    }
    optimizer = make_optimizer(config.optimizer.model_copy(update=rule), settings.steps)
    recipe = Recipe(SamplingParams(), config.algorithm, config.training, optimizer)
    trainer = Trainer(policy.config, numerics, recipe, pool, mesh)
    state = trainer.init(policy.params)
    done, next_problem = 0, 0
    checkpoints = RunCheckpoints(directory, keep=1)
    try:
        newest = processes.from_first(checkpoints.latest_step)
        if newest is not None and checkpoints.host_state(newest).get("key") != key:
            progress.message("warm start: begins anew; the one that was in progress is another one")
            processes.from_first(lambda: shutil.rmtree(directory))
        elif newest is not None:
            done, state, host_state = checkpoints.restore(state)
            next_problem = host_state["next_problem"]
        progress.stage("warm start", settings.steps, completed=done, sparse=True)
        with stop.finish_first("this update"):
            while done < settings.steps:
                sequences, next_problem = _demonstrations(config, policy, task, next_problem)
                state, metrics = _update(config, trainer, state, sequences)
                done += 1
                progress.step(done, {"loss": metrics["loss/supervised"]})
                stopped_by = stop.agreed()
                if (stopped_by is not None or done % _SAVED_EVERY == 0) and done < settings.steps:
                    checkpoints.save(done, state, {"next_problem": next_problem, "key": key})
                if stopped_by is not None and done < settings.steps:
                    checkpoints.wait()
                    progress.message(f"warm start: {done} updates are saved")
                    stop.check()
        try:
            params = processes.to_host(state.params) if processes.several() else state.params
            processes.from_first(lambda: _put_into_cache(cached, policy, params))
        except CheckpointError:
            if done > (checkpoints.latest_step() or 0):
                with contextlib.suppress(CheckpointError):  # a second error would hide the first
                    checkpoints.save(done, state, {"next_problem": next_problem, "key": key})
                    checkpoints.wait()
            raise
    finally:
        checkpoints.close()
    processes.from_first(lambda: shutil.rmtree(directory, ignore_errors=True))
    stop.check()
    return dataclasses.replace(policy, params=params)


def _put_into_cache(cached: Path, policy: Policy, params: Params) -> None:
    source = policy.tokenizer_directory
    try:
        save_model(cached, policy.config, params, "float32", tokenizer_source=source)
    except (OSError, safetensors.SafetensorError, CheckpointError) as error:
        if (cached / "config.json").is_file():
            return  # another run has written the same policy meanwhile
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"warm_start.cache_dir: {cached} cannot be written ({getattr(error, 'strerror', None) or error});"
            " started again, the run goes on from what the warm start has saved"
        ) from error


def _update(
    config: ExperimentConfig, trainer: Trainer, state: TrainState, sequences: list[TrainingSequence]
) -> tuple[TrainState, dict[str, float]]:
    packing = pack_sequences([sequence.length for sequence in sequences], config.training.pack_length)
    ranges = packing.microbatches(config.training.rows_per_microbatch, trainer.row_multiple)
    return trainer.supervised_update(state, [build_batch(sequences, packing, rows) for rows in ranges])


def _demonstrations(
    config: ExperimentConfig, policy: Policy, task: Task, first: int
) -> tuple[list[TrainingSequence], int]:
    """Returns worked solutions of about `tokens_per_step` tokens from problem `first` on, and the index of
    the next problem. Tools' answers and an environment's turns are read, but not learned.
    """
    pairs, tokens, index = [], 0, first
    markup = None if config.tools is None else make_tool_use(config.tools, policy.tokenizer).markup
    environment = make_environment_use(config, task, policy.tokenizer)
    while tokens < config.warm_start.tokens_per_step:
        problem = task.problem("warm_start", index)
        index += 1
        if environment is None and problem.solution is None:
            raise ConfigError(
                f"warm_start: task {config.task.name} has no worked solution of {problem.id}; leave the"
                " section out"
            )
        prompt = policy.tokenizer.encode_chat(problem.messages)
        response, sampled = _response(policy, problem, markup, environment)
        if len(prompt) + len(response) > config.training.pack_length:
            continue
        tokens += len(prompt) + len(response)
        pairs.append((prompt, response, sampled))
    weight = 1.0 / sum(len(response) if sampled is None else sum(sampled) for _, response, sampled in pairs)
    sequences = [
        TrainingSequence(
            prompt, np.asarray(response), None, advantage=0.0, weight=weight, sampled_mask=sampled
        )
        for prompt, response, sampled in pairs
    ]
    return sequences, index


def _response(
    policy: Policy, problem: Problem, markup: Markup | None, environment: EnvironmentUse | None
) -> tuple[list[int], list[bool] | None]:
    """Returns the tokens of a worked solution with EOS, and which of them are learned; None for all."""
    eos = policy.eos_token_ids[0]
    if environment is not None:
        return environment.demonstrate(problem, eos)
    if markup is None:
        return [*policy.tokenizer.encode(problem.solution), eos], None
    response, sampled = markup.encode_response(problem.solution)
    return [*response, eos], [*sampled, True]


def _cache_key(config: ExperimentConfig, policy: Policy, task: Task) -> str:
    """Returns a digest of everything that the trained weights depend on, including the contents of files."""
    parts = {
        "version": _CACHE_VERSION,
        "seed": config.seed,
        "policy": config.policy.model_dump(exclude={"growth", "lora"}),
        "task": config.task.model_dump(
            include={"name", "args", *(["mixture"] if config.task.mixture else [])}
        ),
        "warm_start": config.warm_start.model_dump(exclude={"cache_dir"}),
        "optimizer": config.optimizer.model_dump(exclude={"learning_rate", "schedule", "warmup_steps"}),
        "training": config.training.model_dump(include={"pack_length"}),
        "model": dataclasses.asdict(policy.config),
    }
    data = fingerprint(task)
    if data:
        parts["data"] = data
    if config.tools is not None:
        parts["tools"] = config.tools.model_dump()
    if environment_of(task) is not None:
        parts["environment"] = config.environment.model_dump()
    if config.policy.path is not None:
        files = Tokenizer.files(policy.tokenizer_directory)
        texts = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        parts["start"] = [weights_digest(policy.params), policy.eos_token_ids[0], *texts]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
