"""The training loop: from a config to a finished run. Read it from top to bottom.

A step rolls out groups of responses with the current policy, rewards them, and updates the policy on them
(`learner.py`), by GRPO (arXiv 2402.03300) or another algorithm of `rljax/algorithms/registry.py`. A run that
is started again continues from its newest checkpoint, with the same numbers.
"""

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from drafters.base import Outcome
from drafters.registry import make_drafters
from rljax.algorithms.dynamic_sampling import DynamicSampler
from rljax.config import CheckpointConfig, ExperimentConfig, check_devices
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.errors import (
    CheckpointError,
    DrafterError,
    Interrupted,
    PolicyError,
    RunDirectoryError,
    UserError,
)
from rljax.evaluation.judging import check_success, group_metrics
from rljax.evaluation.problems import distinct_problems
from rljax.learning.optimizer import make_optimizer
from rljax.models.transformer import Params, num_params
from rljax.reports import write_report_of_run
from rljax.rollout.collector import EVALUATION, TRAINING, Collector, Group, Timing, check_prompts
from rljax.rollout.metrics import mean_rewards, rollout_metrics
from rljax.rollout.records import DecodeStatistics, Request, accumulate
from rljax.rollout.summary import summarize_rollout
from rljax.rollout.tool_turns import tool_metrics
from rljax.sharding import make_mesh
from rljax.tasks.registry import checked_task
from rljax.tasks.wrapper import fingerprint
from rljax.tracking import Trackers
from rljax.training.assembly import make_numerics, make_scheduler, numerics_line, sampling_params, warm_up
from rljax.training.checkpoint import RunCheckpoints, template_of
from rljax.training.interruption import StopRequest
from rljax.training.learner import Learner
from rljax.training.policy import check_policy, grown_policy, make_policy
from rljax.training.progress import Progress
from rljax.training.run_directory import RunDirectory
from rljax.training.update import Trainer
from rljax.training.warm_start import warm_start


def run(config: ExperimentConfig, allow_changes: bool = False) -> None:
    """Trains as `config` says, resuming `config.run_dir` if it holds a checkpoint.

    Args:
      config: the experiment.
      allow_changes: go on also where that changes the experiment of the run that is resumed.

    Raises:
      UserError: what the user can mend, in one line.
      Interrupted: a signal asked to stop; what was finished is saved.
    """
    check_devices(config.mesh, jax.device_count())
    if config.engine.compilation_cache is not None:
        enable_compilation_cache(config.engine.compilation_cache)
    start = time.perf_counter()
    progress, directory = Progress(), RunDirectory(config.run_dir)
    with directory.locked(), StopRequest(progress.message, first=None) as stop:
        changes = directory.begin(config, allow_changes)
        checkpoints = open_checkpoints(directory, config.checkpoint)
        try:
            with progress:
                for change in changes:
                    progress.message(f"changed since the last start: {change}")
                training = TrainingRun(config, directory, checkpoints, progress, start, stop)
                with training.trackers:
                    training.train(allow_changes)
        except KeyboardInterrupt:
            if stop.signal is None:
                raise
            if stop.insisted:
                raise Interrupted("stopped at once", stop.signal) from None
            step = checkpoints.latest_step()
            where = "before the first checkpoint" if step is None else f"at step {step}, which is saved"
            raise Interrupted(f"stopped {where}", stop.signal) from None
        finally:
            checkpoints.close()


def open_checkpoints(directory: RunDirectory, config: CheckpointConfig) -> RunCheckpoints:
    """A run's checkpoints, kept as its config says."""
    kept = (config.keep, config.keep_every, config.keep_best)
    return RunCheckpoints(directory.checkpoints_path, *kept)


class TrainingRun:
    """Everything a run holds between steps."""

    def __init__(
        self,
        config: ExperimentConfig,
        directory: RunDirectory,
        checkpoints: RunCheckpoints,
        progress: Progress,
        start: float,
        stop: StopRequest | None = None,
    ) -> None:
        self.config, self.directory, self.start = config, directory, start
        self.stop = StopRequest(progress.message) if stop is None else stop
        self.checkpoints, self.progress = checkpoints, progress
        self.trackers = Trackers(config, directory, progress.message)
        rollout, engine = config.rollout, config.engine
        mesh = make_mesh(config.mesh)
        self.pool = ExecutablePool(bool(engine.row_invariant), engine.compilation_cache)
        task = checked_task(config, progress.message)
        check_success(task, "heldout", config.evaluation)
        wanted = config.evaluation.problems
        self.heldout = list(distinct_problems(task, "heldout", wanted, progress.message))  # indices
        drafters = make_drafters(config.speculation)
        policy = make_policy(config, task, directory.path / "tokenizer")
        check_prompts(task, policy.tokenizer, rollout.max_prompt_length)
        progress.message(f"policy: {num_params(policy.config):,} parameters")
        described = config.algorithm.describe(config.rollout.max_response_length)
        progress.message(f"algorithm: {described}")
        check_policy(config, policy, task)
        self.numerics, self.invariance = make_numerics(config, policy.config, mesh)
        if config.warm_start is not None:
            shared = (self.numerics, self.pool, mesh, progress)
            policy = warm_start(config, policy, task, *shared, directory.warm_start_path, self.stop)
        if config.policy.growth is not None:
            policy = grown_policy(policy, config.policy.growth, config.seed)
            progress.message(f"grown to {num_params(policy.config):,} parameters")
            self.numerics, self.invariance = make_numerics(config, policy.config, mesh)
        progress.message(numerics_line(config, self.invariance))
        scheduler = make_scheduler(config, policy, drafters, self.numerics, self.pool, mesh)
        self.engine, self.speculator = scheduler.engine, scheduler.speculator
        self.run_ahead = None if self.speculator is None else self.speculator.run_ahead
        self.collector = Collector(
            task,
            policy.tokenizer,
            scheduler,
            config.seed,
            rollout.max_prompt_length,
            rollout.max_response_length,
        )
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
        )
        self.learner = Learner(config, policy.config, self.numerics, self.trainer, self.pool, policy.params)
        self.state = self.learner.init(policy.params)
        self.step = 0
        self.data_position = 0  # the next training problem
        self.owes_evaluation = False  # of the step that the run resumes from: it failed
        self.data_digests: dict[str, str] = fingerprint(task)
        self.drafter_state: dict[str, np.ndarray] = {}  # of an earlier session, in a run without a drafter

    def train(self, allow_changes: bool = False) -> None:
        config = self.config
        self.resume(allow_changes)
        self.record_session()
        self.directory.write_config(config, allow_changes=True)  # `run` has asked about them
        self.trackers.begin()
        self.compile()
        if self.step == 0:
            self.write_metrics(self.evaluate())
        elif self.owes_evaluation:
            self.directory.extend_metrics({"step": self.step} | self.evaluate())
            self.owes_evaluation = False
        first = self.step
        try:
            with self.stop.finish_first("this step"):
                while self.step < config.training.steps:
                    stopped_by = self.advance(self.stop)
                    if stopped_by is not None and self.step < config.training.steps:
                        self.checkpoints.wait()
                        raise Interrupted(f"stopped at step {self.step}, which is saved", stopped_by)
                self.checkpoints.wait()
        except (UserError, Interrupted):
            if self.step > first:
                with contextlib.suppress(KeyboardInterrupt):  # what ends the run is the other one
                    self.show_report()
            raise
        self.report()

    def record_session(self) -> None:
        """Notes this process among those that worked on the run, and says if its numerics are others."""
        fingerprint = None if self.invariance is None else self.invariance.fingerprint
        known = [line["numerics"] for line in self.directory.read_sessions() if "numerics" in line]
        if fingerprint is not None and known and fingerprint != known[-1]:
            self.progress.message(
                f"numerics: this machine computes other bits than the last (fingerprint {known[-1]}, now"
                f" {fingerprint}): tokens after step {self.step} may be others, nothing else changes"
            )
        self.directory.record_session(self.step, fingerprint)

    def compile(self) -> None:
        """Every program that the run needs."""
        self.progress.message("compiling")
        params = self.engine.load_params(self.state.params)
        warm_up(self.collector.scheduler, params, self.config)
        self.learner.warm_up(self.state)
        self.progress.message(self.pool.summary())

    def advance(self, stop: StopRequest) -> signal.Signals | None:
        """One step, with all that is due after it: progress, evaluation, metrics, checkpoint.

        Returns the signal that asked to stop, if one came before the state was saved.
        """
        config, progress = self.config, self.progress
        progress.stage("train", config.training.steps, completed=self.step)
        if self.speculator is not None:
            self.speculator.decisions.take()  # those of evaluation are nobody's
        metrics = self.training_step()
        decisions = [] if self.speculator is None else self.speculator.decisions.take()
        self.step += 1
        progress.step(
            self.step,
            {
                "reward": metrics["reward/mean"],
                "tokens_per_second": metrics["rollout/tokens_per_second"],
                "length": metrics["response_length/mean"],
            },
        )
        if self.speculator is not None:
            self.keep_for_report(self.directory.append_decisions, self.step, decisions)
        last = self.step == config.training.steps
        if last or (config.evaluation.every and self.step % config.evaluation.every == 0):
            try:
                metrics |= self.evaluate()
            except (DrafterError, PolicyError):  # what is broken is what would be saved
                raise
            except UserError:
                self.owes_evaluation = True
                self.save_after_failure(metrics)
                raise
        self.write_metrics(metrics)
        due = config.checkpoint.every and self.step % config.checkpoint.every == 0
        score = metrics.get("evaluation/reward")
        due = due or (config.checkpoint.keep_best and score is not None)
        stopped_by = stop.signal
        final = last or stopped_by is not None
        self.checkpoint(bool(due or final), final, score)
        return stopped_by

    def checkpoint(self, due: bool, final: bool, score: float | None) -> None:
        """Begins a checkpoint if one is due, and tells of the last one if that has failed. A `final` one must
        not; others as `checkpoint.on_failure` says.
        """
        save = functools.partial(self.save, score)
        for attempt in (self.checkpoints.wait, save) if due else (self.checkpoints.check,):
            try:
                attempt()
            except (CheckpointError, RunDirectoryError) as error:
                if self.config.checkpoint.on_failure == "stop" or (final and attempt is save):
                    raise
                self.progress.message(
                    f"warning: {error}; the run goes on, and the next one is tried as usual"
                )

    def save(self, score: float | None) -> None:
        """Starts a checkpoint of all that going on takes; `score` is the held-out reward, if it is known."""
        self.directory.write_metrics_left()  # a run that resumes from it would lack them
        drafter = self.drafter_state if self.speculator is None else self.speculator.state()
        host_state = {
            "data_position": self.data_position,
            "seed": self.config.seed,
            "data": self.data_digests,
        }
        if self.owes_evaluation:
            host_state["owes_evaluation"] = True
        if self.learner.reference_digest is not None:
            host_state["reference"] = self.learner.reference_digest
        self.checkpoints.save(self.step, self.state, host_state, drafter, score)

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        elapsed = time.perf_counter() - self.start
        line = {"step": self.step} | metrics | {"time/elapsed": elapsed}
        try:
            self.directory.append_metrics(line)
        except RunDirectoryError as error:
            if self.config.checkpoint.on_failure == "stop":
                raise
            self.progress.message(f"warning: {error}; for now it goes on, and the line is kept")
        self.trackers.write(line)

    def keep_for_report(self, append: Callable[..., None], step: int, content: Any) -> None:
        """What only reports read: a disk that cannot take it stops no run."""
        try:
            append(step, content)
        except RunDirectoryError as error:
            self.progress.message(f"warning: {error}; for now it goes on, and the report will lack it")

    def save_after_failure(self, metrics: dict[str, Any] | None = None) -> None:
        """A rollout or an evaluation has failed: the last finished step, whose state this is, is not lost.
        `metrics` are its own, if they are not written yet.
        """
        try:
            if metrics is not None:
                self.write_metrics(metrics)
            self.checkpoints.wait()
            if self.step > (self.checkpoints.latest_step() or 0):
                self.save(None)
                self.checkpoints.wait()
                self.progress.message(f"step {self.step} is saved")
        except (CheckpointError, RunDirectoryError) as error:  # what stops the run is the other one
            self.progress.message(f"warning: {error}")

    def resume(self, allow_changes: bool = False) -> None:
        """Takes up the newest checkpoint, if there is one.

        Raises:
          CheckpointError: it is unreadable or of something else; or its KL penalty had another reference, or
            its problems other data, and not `allow_changes`.
        """
        if self.checkpoints.latest_step() is None:
            self.directory.truncate_after(-1)
            return
        template, self.state = template_of(self.state), None  # two states may be more than there is room for
        self.step, self.state, host_state = self.checkpoints.restore(template)
        if "data_position" not in host_state:
            path = self.checkpoints.directory / str(self.step)
            raise CheckpointError(f"{path}: is no checkpoint of a training run (it has no data_position)")
        reference = self.learner.reference_digest
        held = host_state.get("data", {})
        changes = [
            f"{name} holds other data than when the run was at step {self.step}"
            for name, digest in self.data_digests.items()
            if held.get(name, digest) != digest
        ]
        if None not in (reference, host_state.get("reference")) and reference != host_state["reference"]:
            changes.append(
                "the reference of the KL penalty, the policy as the run began, has other weights than before:"
                " policy.path holds something else now, or the warm start is another one"
            )
        if changes and not allow_changes:
            raise CheckpointError(f"{'; '.join(changes)}; --allow-changes goes on all the same")
        for change in changes:
            self.progress.message(f"changed since the last start: {change}")
        self.data_position = host_state["data_position"]
        self.owes_evaluation = host_state.get("owes_evaluation", False)
        drafter_state = self.checkpoints.host_arrays(self.step)
        if self.speculator is None:
            self.drafter_state = drafter_state
        else:
            self.speculator.load_state(drafter_state)
        self.directory.truncate_after(self.step)
        seed = host_state.get("seed", self.config.seed)
        before = "" if seed == self.config.seed else f", which was reached with seed {seed}"
        self.progress.message(f"resumed from step {self.step}{before}")

    # -- one step --------------------------------------------------------------------------------------------

    def training_step(self) -> dict[str, Any]:
        start = time.perf_counter()
        position = self.data_position
        try:
            groups, statistics, timing, sampled = self.roll_out(self.engine.load_params(self.state.params))
        except (DrafterError, PolicyError):  # what is broken is what would be saved
            raise
        except UserError:
            self.data_position = position
            self.save_after_failure()
            raise
        update_metrics = self.learn(groups)
        end = time.perf_counter()
        summary = summarize_rollout(
            sampled,
            statistics.running,
            self.config.rollout.max_response_length,
            self.config.tracking.samples_per_step,
            self.collector.tokenizer.decode,
        )
        self.keep_for_report(self.directory.append_rollout, self.step + 1, summary)
        return {
            **rollout_metrics(groups, sampled, statistics, timing),
            **({} if self.speculator is None else self.speculator.metrics(statistics)),
            **({} if self.config.tools is None else tool_metrics(statistics)),
            **update_metrics,
            "engine/compilations": self.pool.compilations,
            "time/rollout": timing.decode,
            "time/reward": timing.reward,
            "time/step": end - start,
        }

    def roll_out(self, params: Params) -> tuple[list[Group], DecodeStatistics, Timing, list[Group]]:
        """The step's groups: one round, or with dynamic sampling as many as it takes. Last, all that was
        sampled.
        """
        config = self.config
        wanted = config.rollout.prompts_per_step
        statistics, timing, sampled = DecodeStatistics(), Timing(), []
        sampler = DynamicSampler(wanted, config.algorithm.dynamic_sampling_max_rounds)
        while True:
            indices = range(self.data_position, self.data_position + wanted)
            self.data_position += wanted
            if self.run_ahead is not None and not sampled and self.step + 1 < config.training.steps:
                self.run_ahead.plan(self.next_requests())
            total = wanted * config.rollout.samples_per_prompt
            groups, round_statistics, round_timing = self.collector.collect(
                params,
                "train",
                indices,
                config.rollout.samples_per_prompt,
                TRAINING,
                self.step,
                functools.partial(self.show_rollout, total),
            )
            sampled += groups
            if self.speculator is not None:
                self.speculator.learn(outcomes(groups))
            accumulate(statistics, round_statistics)
            accumulate(timing, round_timing)
            if not config.algorithm.dynamic_sampling:
                return groups, statistics, timing, sampled
            sampler.offer(groups, np.stack([group.reward for group in groups]))
            if sampler.full:
                return sampler.take(), statistics, timing, sampled

    def next_requests(self) -> list[Request]:
        """What the next step will sample first, if dynamic sampling needs no further round in this one."""
        rollout = self.config.rollout
        indices = range(self.data_position, self.data_position + rollout.prompts_per_step)
        return self.collector.requests("train", indices, rollout.samples_per_prompt, TRAINING, self.step + 1)

    def show_rollout(self, total: int, tokens: int, finished: int) -> None:
        self.progress.update("rollout", f"{tokens:,} tokens, {finished}/{total} done")

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """All of the step's updates, and their metrics."""

        def show(number: int) -> None:
            self.progress.update("update", f"{number}")

        self.state, metrics = self.learner.learn(self.state, groups, self.step, show)
        return metrics

    # -- evaluation and the end ------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Mean rewards on held-out problems, sampled as in training, and what `evaluation` adds to them."""
        evaluation = self.config.evaluation
        problems, samples = len(self.heldout), evaluation.samples
        if problems == 0:
            return {}
        self.progress.stage("evaluate", 1)
        groups, statistics, timing = self.collector.collect(
            self.engine.load_params(self.state.params),
            "heldout",
            self.heldout,
            samples,
            EVALUATION,
            0,  # the same noise at every evaluation: differences come from the policy
            functools.partial(self.show_rollout, problems * samples),
        )
        means = mean_rewards(groups)
        means |= group_metrics(groups, self.collector.task, self.collector.tokenizer, evaluation)
        metrics = {f"evaluation/{name}": value for name, value in means.items()}
        self.progress.message(
            f"step {self.step}: reward {metrics['evaluation/reward']:.3f} on {problems} held-out problems"
        )
        return metrics | {"evaluation/tokens": statistics.tokens, "time/evaluation": timing.decode}

    def report(self) -> None:
        """Says what came out, and where it is."""
        lines = self.directory.read_metrics()
        before = next((line for line in lines if "evaluation/reward" in line), None)
        after = next((line for line in reversed(lines) if "evaluation/reward" in line), None)
        if before is not None and after is not None:
            self.progress.message(
                f"held-out reward: {before['evaluation/reward']:.3f} at step {before['step']}, "
                f"{after['evaluation/reward']:.3f} at step {after['step']}"
            )
        self.show_report()
        self.progress.message(f"results: {self.directory.path} (config.yaml, metrics.jsonl, checkpoints/)")

    def show_report(self) -> None:
        if self.config.tracking.report:
            write_report_of_run(self.directory.path, self.progress.message)


def outcomes(groups: Sequence[Group]) -> list[Outcome]:
    """Rewarded responses as drafters learn from them."""
    return [
        Outcome(group.prompt_ids, completion.response_ids, float(reward))
        for group in groups
        for completion, reward in zip(group.completions, group.reward, strict=True)
    ]
