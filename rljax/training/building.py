"""Builds a training run from a config: task, policy, what rolls out, what learns, what takes part."""

import dataclasses
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from drafters.registry import make_drafters
from rljax import processes
from rljax.agents.server import AgentServer
from rljax.assembly.adapter import adapter_line, make_adapter
from rljax.assembly.checkpoint import RunCheckpoints
from rljax.assembly.decoding import (
    evaluation_sampling,
    make_numerics,
    make_scheduler,
    numerics_line,
    sampling_params,
)
from rljax.assembly.policy import check_policy, grown_policy, make_policy, turn_end_line
from rljax.assembly.task import checked_task, make_curriculum
from rljax.config import ExperimentConfig, with_compute_dtype
from rljax.config.wing import MECHANISMS
from rljax.engine.executables import ExecutablePool
from rljax.environments.use import check_environment
from rljax.evaluation.judging import check_part, check_success
from rljax.evaluation.problems import distinct_problems
from rljax.learning.optimizer import make_optimizer
from rljax.models.digest import base_digest
from rljax.models.transformer import num_params
from rljax.numerics.rows import cast_matrices
from rljax.progress import Progress
from rljax.rollout.collector import Collector
from rljax.rollout.episodes import environment_metrics
from rljax.rollout.prompts import Prompts
from rljax.rollout.sources.tool_turns import tool_metrics
from rljax.run_directory import RunDirectory
from rljax.sharding import make_mesh
from rljax.tasks.base import Task
from rljax.tasks.wrapper import fingerprint
from rljax.tracking import Trackers
from rljax.training.arrival import ArrivingBatches, ReplayedBatches
from rljax.training.batches import Batches
from rljax.training.extras import (
    Compilation,
    Drafting,
    Extra,
    Measured,
    PassRates,
    Workers,
    lag_metrics,
)
from rljax.training.interruption import StopRequest
from rljax.training.learner import Learner
from rljax.training.reference import load_teacher, teacher_line
from rljax.training.run_state import RunState
from rljax.training.training_run import TrainingRun
from rljax.training.update import Recipe, Trainer
from rljax.training.warm_start import warm_start

if TYPE_CHECKING:
    from rljax.cluster.decoder import ClusterDecoder


def make_run(
    config: ExperimentConfig,
    directory: RunDirectory,
    checkpoints: RunCheckpoints,
    progress: Progress,
    start: float,
    stop: StopRequest | None = None,
    cluster: "ClusterDecoder | None" = None,
) -> TrainingRun:
    """Returns the run of an experiment at step 0. Arguments as the attributes of `TrainingRun`; without
    `stop`, signals are noticed only while a step runs, and `cluster` has workers whose processes run.

    Raises:
      UserError: the config cannot be trained. Nothing is compiled by then except for a warm start.
    """
    # What the run is about: config, files, task.
    config, say = with_compute_dtype(config, jax.default_backend()), progress.message
    stop = StopRequest(say) if stop is None else stop
    trackers = Trackers(config, directory, say)
    rollout, mesh = config.rollout, make_mesh(config.mesh)
    server = None if config.agents is None else AgentServer(config.agents)  # binds its port
    pool = ExecutablePool(bool(config.engine.row_invariant), config.engine.compilation_cache)
    task = _task(config, progress)
    heldout = distinct_problems(task, "heldout", config.evaluation.problems, say)

    # The policy that step 0 starts from.
    drafters = make_drafters(config.speculation)
    policy = make_policy(config, task, directory.path / "tokenizer")
    curriculum, leave_out = make_curriculum(config, task), rollout.long_prompts == "leave_out"
    prompts = Prompts(task, policy.tokenizer, rollout.max_prompt_length, leave_out, curriculum)
    prompts.check(say)
    heldout = list(prompts.fitting(heldout, say))
    say(f"policy: {num_params(policy.config):,} parameters")
    say(f"algorithm: {config.algorithm.describe(rollout.max_response_length)}")
    check_policy(config, policy)
    adapter = make_adapter(config, policy.config, policy.params)
    teacher = load_teacher(config, policy)
    if teacher is not None:
        say(teacher_line(config.algorithm.teacher, teacher))
    numerics, invariance = make_numerics(config, policy.config, mesh)
    if config.warm_start is not None:
        shared = (numerics, pool, mesh, progress)
        policy = warm_start(config, policy, task, *shared, directory.warm_start_path, stop)
    if config.policy.growth is not None:
        policy = grown_policy(policy, config.policy.growth, config.seed)
        say(f"grown to {num_params(policy.config):,} parameters")
        numerics, invariance = make_numerics(config, policy.config, mesh)
    digest = None
    if adapter is not None:
        if config.policy.growth is not None:
            adapter = make_adapter(config, policy.config)
        policy = dataclasses.replace(policy, params=cast_matrices(policy.params, numerics.dtype))
        digest = base_digest(policy.params)
        say(adapter_line(config, adapter))
    say(numerics_line(config, invariance))
    if line := turn_end_line(policy):
        say(line)

    # What rolls out.
    sampling, evaluated = sampling_params(config), evaluation_sampling(config)
    scheduler = make_scheduler(config, policy, drafters, numerics, pool, mesh, task=task)
    if cluster is not None:
        cluster.build(scheduler, config, policy, invariance)
    agents = None
    if server is not None:
        from rljax.agents.collector import AgentCollector  # needs the extra of the server

        shared = (scheduler, prompts, server, directory.path.name, sampling)
        agents = AgentCollector(config, task, policy.tokenizer, *shared, say)
    decoder, longest = scheduler if cluster is None else cluster, rollout.max_response_length
    collector = agents or Collector(task, policy.tokenizer, decoder, config.seed, prompts, longest)

    # What learns.
    training = config.training
    optimizer = make_optimizer(config.optimizer, training.updates)
    recipe = Recipe(sampling, config.algorithm, training, optimizer)
    trainer = Trainer(policy.config, numerics, recipe, pool, mesh, adapter)
    learner = Learner(config, trainer, policy.params, teacher)

    # What changes from step to step, and takes part in the steps.
    state, compilation = RunState(learner.init(policy.params)), Compilation(scheduler, pool)
    parts = (config, state, scheduler.engine, prompts, collector)
    if config.cluster.replay is not None:
        batches: Batches = ReplayedBatches(config.cluster.replay, directory, *parts)
    elif rollout.max_staleness:
        batches = ArrivingBatches(cluster, progress, directory, *parts)
    else:
        batches = Batches(*parts)
    run = TrainingRun(
        config=config,
        directory=directory,
        checkpoints=checkpoints,
        progress=progress,
        trackers=trackers,
        stop=stop,
        start=start,
        state=state,
        prompts=prompts,
        heldout=heldout,
        curriculum=curriculum,
        data_digests=fingerprint(task),
        tokenizer_directory=policy.tokenizer_directory,
        pool=pool,
        numerics=numerics,
        invariance=invariance,
        base_digest=digest,
        scheduler=scheduler,
        cluster=cluster,
        agents=agents,
        collector=collector,
        evaluation_sampling=evaluated,
        trainer=trainer,
        learner=learner,
        batches=batches,
        extras=[],
        compilation=compilation,
    )
    run.extras = list(_extras(run))
    return run


def _task(config: ExperimentConfig, progress: Progress) -> Task:
    """Returns the task, checked against what the rest of the config wants of it."""
    task = checked_task(config, progress.message)
    check_environment(config, task, processes.count())
    check_success(task, "heldout", config.evaluation)
    if config.agents is None:  # else the task does not reward
        part = config.algorithm.dynamic_sampling_part
        check_part(task, "train", part, "algorithm.dynamic_sampling_part")
    return task


def _extras(run: TrainingRun) -> Iterator[Extra]:
    """Yields what takes part in the steps of a run."""
    config, state = run.config, run.state
    lag = config.rollout.oldest_lag
    yield run.compilation
    yield Drafting(run.speculator)
    for mechanism in MECHANISMS.values():
        if mechanism.extras:
            yield from pkgutil.resolve_name(mechanism.extras)(run)
    if config.tools is not None:
        yield Measured(lambda rollout: tool_metrics(rollout.statistics))
    if lag:
        yield Measured(lambda rollout: lag_metrics(rollout.groups, state.step))
    if run.collector.has_turns:
        yield Measured(lambda rollout: environment_metrics(rollout.responses, rollout.statistics))
    if run.agents is not None:
        agents = run.agents
        yield Measured(lambda rollout: agents.metrics())
    if run.cluster is not None:
        yield Workers(run.cluster, lag)
    if run.curriculum is not None:
        yield PassRates(run.curriculum, config.evaluation.success, state)
    if isinstance(run.batches, ArrivingBatches):
        yield run.batches
