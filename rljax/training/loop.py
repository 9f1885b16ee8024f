"""The RL loop: roll out, reward, learn, evaluate. Read it from top to bottom.

A step samples groups of responses from the current policy, rewards them, and updates the policy on them by
GRPO (arXiv 2402.03300) or another algorithm of `rljax/algorithms/registry.py`. The parts of a run are built
in `training_run.py`, the updates of a step are in `learner.py`. Other files start and stop a run
(`session.py`), resume and save it, handle failures, and report.
"""

import functools
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rljax.algorithms.dynamic_sampling import DynamicSampler
from rljax.errors import Interrupted
from rljax.evaluation.judging import group_metrics, pass_shares
from rljax.evaluation.metrics import PASSED_FROM, part_names, success_part
from rljax.host_memory import give_back
from rljax.requests import DecodeStatistics, accumulate
from rljax.rollout.collector import EVALUATION, TRAINING, Group, Timing, WantedGroups, outcomes
from rljax.rollout.episodes import environment_metrics
from rljax.rollout.metrics import mean_rewards, rollout_metrics, tokens_per_second
from rljax.rollout.sources.tool_turns import tool_metrics
from rljax.training import failures, reporting, resuming, saving
from rljax.training.arrival import arrived_groups
from rljax.training.staleness import begin_rollouts, begin_round, lag_metrics, oldest_lag, sampled_by
from rljax.training.training_run import TrainingRun


def training_step(run: TrainingRun) -> dict[str, Any]:
    """One RL step: `run.state` is replaced by the updated one. Returns the metrics of the step."""
    start, run.passed_over = time.perf_counter(), 0
    give_back()

    # ROLL OUT AND REWARD
    with failures.during_rollout(run):
        in_order_of_arrival = run.config.rollout.max_staleness > 0
        rollout = take_arrived(run) if in_order_of_arrival else roll_out(run)

    # LEARN: advantages, losses, updates, while workers decode what was begun for the next step
    give_back()
    with run.meanwhile():
        update_metrics = learn(run, rollout.groups)
    if run.curriculum is not None:  # it learns pass rates
        success = run.config.evaluation.success
        update_metrics |= run.curriculum.learn(pass_shares(rollout.sampled, success))
        update_metrics["curriculum/passed_over"] = run.passed_over
    end = time.perf_counter()

    # RECORD
    completions = [completion for group in rollout.sampled for completion in group.completions]
    reporting.record_rollout(run, rollout.sampled, rollout.statistics)
    return {
        **rollout_metrics(rollout.groups, rollout.sampled, rollout.statistics, rollout.timing),
        **({} if run.speculator is None else run.speculator.metrics(rollout.statistics)),
        **({} if run.config.tools is None else tool_metrics(rollout.statistics)),
        **(lag_metrics(rollout.groups, run.step) if oldest_lag(run) else {}),
        **decoding_rate(run, rollout.statistics.tokens, end - start),
        **(environment_metrics(completions, rollout.statistics) if run.collector.has_turns else {}),
        **({} if run.agents is None else run.agents.metrics()),
        **update_metrics,
        **run.compilation_metrics,
        **({} if run.cluster is None else run.cluster.metrics()),
        **({} if run.under_way is None else run.under_way.metrics()),
        "time/rollout": rollout.timing.decode,
        "time/reward": rollout.timing.reward,
        "time/step": end - start,
    }


def decoding_rate(run: TrainingRun, tokens: int, seconds: float) -> dict[str, float]:
    """Returns the rate of decoding where workers decode all the time: of the whole step's seconds."""
    if run.cluster is None or not oldest_lag(run):
        return {}
    return {"rollout/tokens_per_second": tokens_per_second(tokens, seconds)}


class Rollout(NamedTuple):
    """Rewarded responses of one step.

    Attributes:
      groups: the responses to learn from, by prompt.
      sampled: all groups sampled; more than `groups` where dynamic sampling dropped some.
      statistics: counts of decoding, over all rounds.
      timing: seconds of decoding and of rewarding, over all rounds.
    """

    groups: list[Group]
    sampled: list[Group]
    statistics: DecodeStatistics
    timing: Timing


def roll_out(run: TrainingRun) -> Rollout:
    """Samples and rewards responses to the next prompts; dynamic sampling may take several rounds."""
    config = run.config
    num_prompts, num_samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    show = functools.partial(reporting.show_rollout, run, num_prompts * num_samples)
    sampled: list[Group] = []
    statistics, timing = DecodeStatistics(), Timing()
    sampler = DynamicSampler(num_prompts, config.algorithm.dynamic_sampling_max_rounds)
    begin_rollouts(run)
    begun = run.begun.pop(run.step)
    while True:
        # Prompts behind this round's, for run-ahead.
        round_ = sampler.rounds
        if run.run_ahead is not None:
            plan_ahead(run, round_)

        # Decode and reward.
        groups, round_statistics, round_timing = run.collector.finish(begun, show)
        sampled += groups
        accumulate(statistics, round_statistics)
        accumulate(timing, round_timing)

        # Drafters learn from every response, the policy only from the groups that dynamic sampling keeps.
        if run.speculator is not None:
            run.speculator.learn(outcomes(groups))
        if run.cluster is not None:
            run.cluster.learn(outcomes(groups))
        if not config.algorithm.dynamic_sampling:
            return Rollout(groups, sampled, statistics, timing)
        sampler.offer(groups, *sampling_rewards(run, groups))
        if run.run_ahead is not None:
            run.run_ahead.count_round(round_, followed=not sampler.full)
        if sampler.full:
            return Rollout(sampler.take(), sampled, statistics, timing)
        begun = begin_round(run, run.step, begun.wanted.version)


def sampling_rewards(run: TrainingRun, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns what dynamic sampling decides by, float [P, G], and which responses are right, bool [P, G], or
    None where no part of the reward says so.
    """
    part, success = run.config.algorithm.dynamic_sampling_part, run.config.evaluation.success
    total = np.stack([group.reward for group in groups])
    values = total
    if part is not None:
        for group in groups:  # those of a mixture may differ in their parts
            if not np.isnan(group.reward).all():
                success_part(part_names(group.rewards), part, "algorithm.dynamic_sampling_part")
        values = np.where(np.isnan(total), np.nan, np.stack([group.part(part) for group in groups]))
    judged_by = part or success or "correct"
    judged = np.stack([group.part(judged_by) for group in groups])
    known = not np.isnan(judged[~np.isnan(values)]).any()
    return values, judged >= PASSED_FROM if known else None


def take_arrived(run: TrainingRun) -> Rollout:
    """Takes and rewards the groups that have ended first, with `rollout.max_staleness`."""
    rollout = run.config.rollout
    total = rollout.prompts_per_step * rollout.samples_per_prompt
    show = functools.partial(reporting.show_rollout, run, total)
    show_arrivals = functools.partial(reporting.show_arrivals, run, rollout.prompts_per_step)
    groups, statistics, timing = arrived_groups(run, show, show_arrivals)
    if run.speculator is not None:
        run.speculator.learn(outcomes(groups))
    if run.cluster is not None:
        run.cluster.learn(outcomes(groups))
    return Rollout(groups, groups, statistics, timing)


def plan_ahead(run: TrainingRun, round_: int) -> None:
    """Plans which prompts the coming rollout may sample ahead, and with which noise: that of a further round
    of this step where dynamic sampling is likely to need one after this round, else that of the next step.
    """
    config = run.config
    rounds = config.algorithm.dynamic_sampling_max_rounds if config.algorithm.dynamic_sampling else 1
    further = round_ + 1 < rounds and run.run_ahead.expects_round(round_)
    step = run.step if further else run.step + 1
    if step < config.training.steps:
        following, _ = run.prompts.next_problems("train", run.data_position, config.rollout.prompts_per_step)
        samples = config.rollout.samples_per_prompt
        wanted = WantedGroups("train", following, samples, TRAINING, step)
        run.run_ahead.plan(run.collector.requests(wanted))


def learn(run: TrainingRun, groups: Sequence[Group]) -> dict[str, float]:
    """Runs the updates of a step on rewarded groups. Returns their metrics."""
    if run.run_ahead is not None:
        run.run_ahead.weights_change()
    show = functools.partial(reporting.show_update, run)
    if not oldest_lag(run):
        run.versions.clear()  # an update needs the memory
    if run.updates is not None:
        run.updates.complete()
        run.updates = None
    run.state, metrics = run.learner.learn(run.state, groups, run.step, show, sampled_by(run))
    return metrics


def evaluate(run: TrainingRun) -> dict[str, float]:
    """Samples the held-out problems. Returns mean rewards and the metrics of `evaluation`."""
    evaluation = run.config.evaluation
    problems, samples = len(run.heldout), evaluation.samples
    if problems == 0:
        return {}
    run.progress.stage("evaluate", 1)
    if run.under_way is not None:
        run.under_way.renew()  # one version for all that workers decode
    noise = 0  # the same at every evaluation: differences come from the policy
    wanted = WantedGroups(
        "heldout", run.heldout, samples, EVALUATION, noise, run.evaluation_sampling, run.step
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
        f"step {run.step}: reward {metrics['evaluation/reward']:.3f} on {problems} held-out problems"
    )
    return metrics | {"evaluation/tokens": statistics.tokens, "time/evaluation": timing.decode}


def advance(run: TrainingRun) -> signal.Signals | None:
    """One step, and the evaluation, metrics and checkpoint due after it. Returns the signal that asked to
    stop, if one came before the state was saved.
    """
    config = run.config
    run.progress.stage("train", config.training.steps, completed=run.step)
    if run.speculator is not None:
        run.speculator.decisions.take()  # discards those of evaluations
    metrics = training_step(run)
    run.step += 1
    reporting.show_step(run, metrics)
    if run.step == 1:
        reporting.show_doubts(run, metrics)

    # EVALUATE
    last = run.step == config.training.steps
    if last or (config.evaluation.every and run.step % config.evaluation.every == 0):
        with failures.during_evaluation(run, metrics):
            metrics |= evaluate(run)

    # SAVE
    saving.write_metrics(run, metrics)
    score = metrics.get("evaluation/reward")
    due = config.checkpoint.every and run.step % config.checkpoint.every == 0
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
    run.compile()
    if run.step == 0:
        saving.write_metrics(run, evaluate(run))
    elif run.owes_evaluation:
        run.directory.extend_metrics({"step": run.step} | evaluate(run))
        run.owes_evaluation = False

    # STEP BY STEP
    with failures.reported(run), run.stop.finish_first("this step"):
        while run.step < run.config.training.steps:
            stopped_by = advance(run)
            if stopped_by is not None and run.step < run.config.training.steps:
                run.checkpoints.wait()
                raise Interrupted(f"stopped at step {run.step}, which is saved", stopped_by)
        run.checkpoints.wait()
    reporting.report(run)
