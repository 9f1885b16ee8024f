"""The parts of a training run, built from a config."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
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
    warm_up,
)
from rljax.assembly.policy import check_policy, grown_policy, make_policy, turn_end_line
from rljax.assembly.task import checked_task, make_curriculum
from rljax.config import ExperimentConfig, with_compute_dtype
from rljax.engine.background import BackgroundCompiler, CompilerThread, Shape
from rljax.engine.executables import ExecutablePool
from rljax.environments.use import check_environment
from rljax.evaluation.judging import check_part, check_success
from rljax.evaluation.problems import distinct_problems
from rljax.learning.optimizer import make_optimizer
from rljax.models.digest import base_digest
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import num_params
from rljax.numerics.rows import cast_matrices
from rljax.progress import Progress
from rljax.rollout.collector import TRAINING, Collector, WantedGroups
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
from rljax.training.extras import Drafting, Extra, Measured, PassRates, PlansAhead, Workers, lag_metrics
from rljax.training.interruption import StopRequest
from rljax.training.learner import Learner
from rljax.training.reference import load_teacher, teacher_line
from rljax.training.run_state import RunState
from rljax.training.update import Trainer
from rljax.training.warm_start import warm_start

if TYPE_CHECKING:
    from rljax.agents.collector import AgentCollector
    from rljax.cluster.decoder import ClusterDecoder

_AFTER_BUCKETS = 2  # programs of updates are compiled after those of decode states so many buckets away


class UpdatePrograms(Extra):
    """Programs of updates, compiled while the first rollout decodes.

    Attributes:
      compiler: compiles them; None where they are compiled with all others, or all are there.
    """

    compiler: BackgroundCompiler | None = None

    def before_update(self) -> None:
        if self.compiler is not None:
            self.compiler.complete()
            self.compiler = None


class TrainingRun:
    """The parts of a run, and its state. `loop.train` advances it; `saving.py` and `resuming.py` write and
    read its checkpoints.

    Args:
      config: the experiment.
      directory: the run's files.
      checkpoints: the run's checkpoints.
      progress: shows messages and steps to the user.
      start: `time.perf_counter()` when the process began to work on the run; `time/elapsed` counts from it.
      stop: requests by signals to stop; None makes one that reacts only while a step runs.
      cluster: decodes in workers, whose processes run; None decodes here.

    Attributes:
      state: all that changes from step to step.
      batches: which problems a step learns from, and the weights that sample them.
      extras: what takes part in the steps beside the loop.
      prompts: the task's prompts in tokens.
      tokenizer_directory: directory of the tokenizer's files.
      curriculum: pass rates of the training problems; None without a curriculum.
      evaluation_sampling: the distribution that evaluations sample from; None for that of rollouts.
      heldout: indices of the held-out problems that evaluations ask.
      data_digests: digest of each data set of the task; resuming compares them.
      base_digest: under LoRA the name of the weights that the adapter is merged with; else None.
      speculator: the speculative part of the scheduler.
      invariance: the measured row-invariance of the policy, or None where it is not measured.

    Raises:
      UserError: the config cannot be trained. Nothing is compiled by then except for a warm start.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        directory: RunDirectory,
        checkpoints: RunCheckpoints,
        progress: Progress,
        start: float,
        stop: StopRequest | None = None,
        cluster: "ClusterDecoder | None" = None,
    ) -> None:
        # What the run is about: config, files, task.
        config = with_compute_dtype(config, jax.default_backend())
        self.config, self.directory, self.start = config, directory, start
        self.stop = StopRequest(progress.message) if stop is None else stop
        self.checkpoints, self.progress, self.cluster = checkpoints, progress, cluster
        self.trackers = Trackers(config, directory, progress.message)
        rollout, engine = config.rollout, config.engine
        mesh = make_mesh(config.mesh)
        self.agent_server = None if config.agents is None else AgentServer(config.agents)  # binds its port
        self.pool = ExecutablePool(bool(engine.row_invariant), engine.compilation_cache)
        task = checked_task(config, progress.message)
        check_environment(config, task, processes.count())
        check_success(task, "heldout", config.evaluation)
        if config.agents is None:  # else the task does not judge
            part = config.algorithm.dynamic_sampling_part
            check_part(task, "train", part, "algorithm.dynamic_sampling_part")
        heldout = distinct_problems(task, "heldout", config.evaluation.problems, progress.message)

        # The policy that step 0 starts from.
        drafters = make_drafters(config.speculation)
        policy = make_policy(config, task, directory.path / "tokenizer")
        leave_out = rollout.long_prompts == "leave_out"
        self.curriculum = make_curriculum(config, task)
        longest = rollout.max_prompt_length
        self.prompts = Prompts(task, policy.tokenizer, longest, leave_out, self.curriculum)
        self.prompts.check(progress.message)
        self.heldout = list(self.prompts.fitting(heldout, progress.message))
        self.tokenizer_directory = policy.tokenizer_directory
        progress.message(f"policy: {num_params(policy.config):,} parameters")
        progress.message(f"algorithm: {config.algorithm.describe(rollout.max_response_length)}")
        check_policy(config, policy)
        adapter = make_adapter(config, policy.config, policy.params)
        teacher = load_teacher(config, policy)
        if teacher is not None:
            progress.message(teacher_line(config.algorithm.teacher, teacher))
        self.numerics, self.invariance = make_numerics(config, policy.config, mesh)
        if config.warm_start is not None:
            shared = (self.numerics, self.pool, mesh, progress)
            policy = warm_start(config, policy, task, *shared, directory.warm_start_path, self.stop)
        if config.policy.growth is not None:
            policy = grown_policy(policy, config.policy.growth, config.seed)
            progress.message(f"grown to {num_params(policy.config):,} parameters")
            self.numerics, self.invariance = make_numerics(config, policy.config, mesh)
        self.base_digest: str | None = None
        if adapter is not None:
            if config.policy.growth is not None:
                adapter = make_adapter(config, policy.config)
            policy = dataclasses.replace(policy, params=cast_matrices(policy.params, self.numerics.dtype))
            self.base_digest = base_digest(policy.params)
            progress.message(adapter_line(config, adapter))
        progress.message(numerics_line(config, self.invariance))
        if line := turn_end_line(policy):
            progress.message(line)

        # What rolls out.
        self.evaluation_sampling = evaluation_sampling(config)
        scheduler = make_scheduler(config, policy, drafters, self.numerics, self.pool, mesh, task=task)
        self.engine, self.speculator = scheduler.engine, scheduler.speculator
        self._updates, self._scheduler = UpdatePrograms(), scheduler
        if cluster is not None:
            cluster.build(scheduler, config, policy, self.invariance)
        self.agents: AgentCollector | None = None
        if config.agents is not None:
            self.collector = self.agents = self._agent_collector(task, policy.tokenizer)
        else:
            self.collector = Collector(
                task,
                policy.tokenizer,
                scheduler if cluster is None else cluster,
                config.seed,
                self.prompts,
                rollout.max_response_length,
            )

        # What learns.
        updates_per_step = config.training.minibatches_per_step * config.training.epochs_per_step
        optimizer = make_optimizer(
            **config.optimizer.model_dump(), total_updates=config.training.steps * updates_per_step
        )
        self.trainer = Trainer(
            policy.config,
            self.numerics,
            sampling_params(config),
            config.algorithm,
            config.training,
            optimizer,
            self.pool,
            mesh,
            adapter,
        )
        shared = (self.numerics, self.trainer, self.pool)
        self.learner = Learner(config, policy.config, *shared, policy.params, teacher)

        # What changes from step to step.
        self.state = RunState(self.learner.init(policy.params))
        self.extras = list(self._extras())
        parts = (config, self.state, self.engine, self.prompts, self.collector)
        if config.cluster.replay is not None:
            self.batches: Batches = ReplayedBatches(config.cluster.replay, directory, *parts)
        elif rollout.max_staleness:
            self.batches = arriving = ArrivingBatches(cluster, progress, directory, *parts)
            self.extras.append(arriving)
        else:
            self.batches = Batches(*parts)
        self.data_digests: dict[str, str] = fingerprint(task)

    def _extras(self) -> Iterator[Extra]:
        """Yields what takes part in the steps of this run."""
        config, state, speculator = self.config, self.state, self.speculator
        lag = config.rollout.oldest_lag
        yield self._updates
        yield Drafting(speculator)
        if speculator.run_ahead is not None:
            yield PlansAhead(speculator.run_ahead, config, state, self.prompts, self.collector)
        if config.tools is not None:
            yield Measured(lambda rollout: tool_metrics(rollout.statistics))
        if lag:
            yield Measured(lambda rollout: lag_metrics(rollout.groups, state.step))
        if self.collector.has_turns:
            yield Measured(lambda rollout: environment_metrics(rollout.responses, rollout.statistics))
        if self.agents is not None:
            agents = self.agents
            yield Measured(lambda rollout: agents.metrics())
        if self.cluster is not None:
            yield Workers(self.cluster, lag)
        if self.curriculum is not None:
            yield PassRates(self.curriculum, config.evaluation.success, state)

    def _agent_collector(self, task: Task, tokenizer: Tokenizer) -> "AgentCollector":
        from rljax.agents.collector import AgentCollector  # needs the extra of the server

        sampling, name = sampling_params(self.config), self.directory.path.name
        return AgentCollector(
            self.config,
            task,
            tokenizer,
            self._scheduler,
            self.prompts,
            self.agent_server,
            name,
            sampling,
            self.progress.message,
        )

    def compile(self, wait: bool | None = None) -> None:
        """Compiles every program that the run begins with. Others may follow in the background, see
        `decoding.warm_up`; `close` ends that.

        Args:
          wait: whether to wait for these, too; None for `engine.compile`.
        """
        self.progress.message("compiling")
        params = self.engine.load_params(self.state.params)
        sampler = params if self.config.rollout.oldest_lag else None
        if self.cluster is not None:  # the workers compile what decodes
            self.learner.warm_up(self.state.trained, sampler)
            self.progress.message(self.pool.summary())
            self.cluster.wait()
            return
        if self.agents is not None:  # requests of any length join at any time
            warm_up(self._scheduler, params, self.config, requests_join=True, resumes=True)
            self.learner.warm_up(self.state.trained)
            self.progress.message(self.pool.summary())
            self.agents.start()
            return
        num_prompts = self.config.rollout.prompts_per_step
        indices, _ = self.prompts.next_problems("train", self.state.data_position, num_prompts)
        requests = self.collector.requests(WantedGroups("train", indices, 1, TRAINING, self.state.step))
        first_prompts = [len(request.prompt_ids) for request in requests]
        trained, buckets = self.state.trained, self.engine.buckets
        near = buckets.batch[-1], buckets.cache[0]
        thread = CompilerThread(buckets, near)

        def compile_updates(shape: Shape, should_stop: Callable[[], bool]) -> None:
            with contextlib.suppress(Exception):  # an update compiles it again, and raises
                self.learner.warm_up(trained, sampler, [shape[0]])

        # The programs of shared prompts depend on the responses, and the others would not be run.
        shares = self.learner.expects_sharing([request.prompt_ids for request in requests])
        sizes = [] if shares else self.learner.sizes
        self._updates.compiler = BackgroundCompiler(
            compile_updates,
            buckets,
            [(rows, self.config.training.pack_length) for rows in sizes],
            near,
            start=False,
            thread=thread,
            distance=lambda shape: _AFTER_BUCKETS,
        )
        warm_up(self._scheduler, params, self.config, False, False, wait, first_prompts, thread)
        if self.engine.behind is None:  # all is compiled; say now what could not be
            self.learner.warm_up(trained, sampler, sizes)
        self.progress.message(self.pool.summary())
        if self.compiling:
            self.progress.message(f"{self.compiling} more shapes are compiled meanwhile")

    @property
    def compiling(self) -> int:
        """Number of shapes whose programs are still compiled in the background: of prefill, plain decoding
        and verifying passes.
        """
        plain = 0 if self.engine.behind is None else self.engine.behind.left
        return plain + self.speculator.compiling

    @property
    def compilation_metrics(self) -> dict[str, float]:
        """Metrics of the run so far: `engine/compilations`, programs compiled or loaded by the thread that
        decodes and learns. Where others are compiled in the background, too: `engine/compiled_behind`, their
        number, `time/compiled_behind`, the seconds that they took, and
        `engine/waited_for_compilation_seconds`, seconds in which decoding waited for them.
        """
        metrics: dict[str, float] = {"engine/compilations": len(self.pool) - self.pool.behind}
        if self.engine.behind is not None:
            metrics |= {
                "engine/compiled_behind": self.pool.behind,
                "engine/waited_for_compilation_seconds": self.engine.behind.seconds_waited,
                "time/compiled_behind": self.pool.seconds_behind,
            }
        return metrics

    def close(self) -> None:
        """Ends what goes on in the background."""
        if self.agents is not None:
            self.agents.close()
        self.engine.close()
        self.speculator.close()
