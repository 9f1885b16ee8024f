"""The RL loop: roll out, reward, learn, evaluate. Read it from top to bottom.

A step samples groups of responses from the current policy, rewards them, and updates the policy on them by
GRPO (arXiv 2402.03300) or another algorithm of `rljax/algorithms/registry.py`. The parts of a run
(`training_run.py`) are built in `building.py`, the updates of a step are in `learner.py`. Other files start
and stop a run (`session.py`), resume and save it, handle failures, and report; what takes part in a step
without being a step's part is in `extras.py`.
"""

import contextlib
import functools
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.algorithms.dynamic_sampling import DynamicSampler
from rljax.config import ExperimentConfig
from rljax.errors import Interrupted
from rljax.evaluation.judging import group_metrics
from rljax.evaluation.metrics import PASSED_FROM, part_names, success_part
from rljax.host_memory import give_back
from rljax.requests import DecodeStatistics, accumulate
from rljax.rollout.collector import EVALUATION, Group, Timing, WantedGroups, outcomes
from rljax.rollout.metrics import mean_rewards, rollout_metrics
from rljax.training import failures, reporting, resuming, saving
from rljax.training.batches import Rollout
from rljax.training.compiling import compile_programs
from rljax.training.training_run import TrainingRun


def training_step(run: TrainingRun) -> dict[str, Any]:
    """One RL step, which changes `run.state`. Returns the metrics of the step."""
    start, run.state.skipped_problems = time.perf_counter(), 0
    for extra in run.extras:
        extra.begin_step()
    give_back()

    # ROLL OUT AND REWARD
    with failures.during_rollout(run):
        rollout = roll_out(run)

    # LEARN: advantages, losses, updates
    give_back()
    with contextlib.ExitStack() as stack:
        for extra in run.extras:
            stack.enter_context(extra.during_update())
        update_metrics = learn(run, rollout.groups)
    seconds = time.perf_counter() - start

    # RECORD
    reporting.record_rollout(run, rollout.sampled, rollout.statistics)
    metrics: dict[str, Any] = rollout_metrics(*rollout)
    for extra in run.extras:
        metrics |= extra.metrics(rollout, seconds)
    times = {"rollout": rollout.timing.decode, "reward": rollout.timing.reward, "step": seconds}
    metrics |= {f"time/{name}": value for name, value in times.items()}
    return metrics | update_metrics


def roll_out(run: TrainingRun) -> Rollout:
    """Samples and rewards responses to the next prompts; dynamic sampling may take several rounds."""
    config = run.config
    num_prompts, num_samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    show = functools.partial(reporting.show_rollout, run, num_prompts * num_samples)
    sampled: list[Group] = []
    statistics, timing = DecodeStatistics(), Timing()
    sampler = DynamicSampler(num_prompts, config.algorithm.dynamic_sampling_max_rounds)
    while True:
        # Decode and reward.
        round_ = sampler.rounds
        run.batches.begin(round_)
        for extra in run.extras:
            extra.before_round(round_)
        groups, round_statistics, round_timing = run.batches.finish(show)
        sampled += groups
        accumulate(statistics, round_statistics)
        accumulate(timing, round_timing)

        # Drafters learn from every response, the policy only from the groups that dynamic sampling keeps.
        for extra in run.extras:
            extra.learn(outcomes(groups))
        if not config.algorithm.dynamic_sampling:
            return Rollout(groups, sampled, statistics, timing)
        sampler.offer(groups, *sampling_rewards(config, groups))
        for extra in run.extras:
            extra.after_round(round_, followed=not sampler.full)
        if sampler.full:
            return Rollout(sampler.take(), sampled, statistics, timing)


def sampling_rewards(
    config: ExperimentConfig, groups: Sequence[Group]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns what dynamic sampling decides by, float [P, G], and which responses are right, bool [P, G], or
    None where no part of the reward says so.
    """
    part, success = config.algorithm.dynamic_sampling_part, config.evaluation.success
    total = np.stack([group.reward for group in groups])
    values = total
    if part is not None:
        for group in groups:  # those of a mixture may differ in their parts
            if not np.isnan(group.reward).all():
                success_part(part_names(group.rewards), part, "algorithm.dynamic_sampling_part")
        values = np.where(np.isnan(total), np.nan, np.stack([group.part(part) for group in groups]))
    scored_by = part or success or "correct"
    scored = np.stack([group.part(scored_by) for group in groups])
    known = not np.isnan(scored[~np.isnan(values)]).any()
    return values, scored >= PASSED_FROM if known else None


def learn(run: TrainingRun, groups: Sequence[Group]) -> dict[str, float]:
    """Runs the updates of a step on rewarded groups. Returns their metrics."""
    for extra in run.extras:
        extra.before_update()
    state, show = run.state, functools.partial(reporting.show_update, run.progress)
    sampled_by = run.batches.sampled_by()
    state.trained, metrics = run.learner.learn(state.trained, groups, state.step, show, sampled_by)
    return metrics


def evaluate(run: TrainingRun) -> dict[str, float]:
    """Samples the held-out problems. Returns mean rewards and the metrics of `evaluation`."""
    evaluation = run.config.evaluation
    problems, samples = len(run.heldout), evaluation.samples
    if problems == 0:
        return {}
    run.progress.stage("evaluate", 1)
    for extra in run.extras:
        extra.before_evaluation()
    noise = 0  # the same at every evaluation: differences come from the policy
    wanted = WantedGroups(
        "heldout", run.heldout, samples, EVALUATION, noise, run.evaluation_sampling, run.state.step
    )
    groups, statistics, timing = run.collector.collect(
        run.engine.load_params(run.state.params),
        wanted,
        functools.partial(reporting.show_rollout, run, problems * samples),
    )
    means = mean_rewards(groups)
    means |= group_metrics(groups, run.collector.task, run.collector.tokenizer, evaluation)
    metrics = {f"evaluation/{name}": value for name, value in means.items()}
    run.progress.message(
        f"step {run.state.step}: reward {metrics['evaluation/reward']:.3f} on {problems} held-out problems"
    )
    return metrics | {"evaluation/tokens": statistics.tokens, "time/evaluation": timing.decode}


def advance(run: TrainingRun) -> signal.Signals | None:
    """One step, and the evaluation, metrics and checkpoint due after it. Returns the signal that asked to
    stop, if one came before the state was saved.
    """
    config, state = run.config, run.state
    run.progress.stage("train", config.training.steps, completed=state.step)
    metrics = training_step(run)
    state.step += 1
    reporting.show_step(run.progress, state.step, metrics)
    if state.step == 1:
        reporting.show_doubts(run.progress, config.task.name, metrics)

    # EVALUATE
    last = state.step == config.training.steps
    if last or (config.evaluation.every and state.step % config.evaluation.every == 0):
        with failures.during_evaluation(run, metrics):
            metrics |= evaluate(run)

    # SAVE
    saving.write_metrics(run, metrics)
    score = metrics.get("evaluation/reward")
    due = config.checkpoint.every and state.step % config.checkpoint.every == 0
    due = due or (config.checkpoint.keep_best and score is not None)
    stopped_by = run.stop.agreed()
    final = last or stopped_by is not None
    saving.save_if_due(run, bool(due or final), final, score)
    return stopped_by


def train(run: TrainingRun, allow_changes: bool = False) -> None:
    """Trains up to step `config.training.steps`, from the newest checkpoint if there is one. With
    `allow_changes` also if data or reference weights differ from those of the checkpoint.

    Raises:
      UserError: a rollout, an evaluation, an update or a disk failed.
      Interrupted: a signal asked to stop; the last step is saved.
    """
    # START: at step 0, or where an earlier session ended.
    resuming.begin_session(run, allow_changes)
    compile_programs(run)
    if run.state.step == 0:
        saving.write_metrics(run, evaluate(run))
    elif run.state.evaluation_due:
        run.directory.extend_metrics({"step": run.state.step} | evaluate(run))
        run.state.evaluation_due = False

    # STEP BY STEP
    with failures.reported(run), run.stop.finish_first("this step"):
        while run.state.step < run.config.training.steps:
            stopped_by = advance(run)
            if stopped_by is not None and run.state.step < run.config.training.steps:
                run.checkpoints.wait()
                raise Interrupted(f"stopped at step {run.state.step}, which is saved", stopped_by)
        run.checkpoints.wait()
    reporting.report(run.directory, run.progress, run.config.tracking.report)
