"""Reporting a run: the live display, the files that reports read, and the report at the end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.errors import RunDirectoryError
from rljax.reports import write_report_of_run
from rljax.requests import DecodeStatistics
from rljax.rollout.collector import Group
from rljax.rollout.summary import summarize_rollout
from rljax.training.training_run import TrainingRun

_FEW = 0.01  # share of responses
_LARGE = 2.0**24


def show_rollout(run: TrainingRun, total: int, tokens: int, finished: int) -> None:
    """Shows sampled tokens, finished responses, of `total`, what still compiles, and what workers do."""
    also = f", {left} shapes compiling" if (left := run.compilation.left) else ""
    also += "" if run.cluster is None else f", {run.cluster.doing}"
    run.progress.update("rollout", f"{tokens:,} tokens, {finished}/{total} done{also}")


def show_update(run: TrainingRun, number: int) -> None:
    """Shows the number of the current update, from 1."""
    run.progress.update("update", f"{number}")


def show_step(run: TrainingRun, metrics: Mapping[str, Any]) -> None:
    """Shows that step `run.state.step` is finished."""
    run.progress.step(
        run.state.step,
        {
            "reward": metrics["reward/mean"],
            "tokens_per_second": metrics["rollout/tokens_per_second"],
            "length": metrics["response_length/mean"],
        },
    )


def show_doubts(run: TrainingRun, metrics: Mapping[str, Any]) -> None:
    """Says after the first step what makes rewards useless: answers that are never found, and numbers between
    which float32 cannot tell.
    """
    for name, share in metrics.items():
        if name.startswith("reward/") and name.endswith("answer_found") and share < _FEW:
            reward = name.removeprefix("reward/").rpartition("/")[0] or run.config.task.name
            how_many = "none" if share == 0 else f"{share:.1%}"
            run.progress.message(
                f"warning: {reward} found an answer in {how_many} of the first step's responses ({name});"
                " compare what it looks for with what the prompts ask for and the samples of the report show"
            )
    if abs(metrics["reward/mean"]) > _LARGE:
        run.progress.message(
            f"warning: rewards are about {metrics['reward/mean']:.3g}, where float32 cannot tell neighbouring"
            " whole numbers apart; lower their weight"
        )


def record_rollout(run: TrainingRun, sampled: Sequence[Group], statistics: DecodeStatistics) -> None:
    """Appends the current step's rollout and decisions of the rollout manager to the files for reports."""
    summary = summarize_rollout(
        sampled,
        statistics.running,
        run.config.rollout.max_response_length,
        run.config.tracking.samples_per_step,
        run.collector.tokenizer,
    )
    keep_for_report(run, run.directory.append_rollout, run.state.step + 1, summary)
    if run.cluster is not None:
        keep_for_report(run, run.directory.append_workers, run.state.step + 1, run.cluster.timeline())
    decisions = run.speculator.decisions.take()
    keep_for_report(run, run.directory.append_decisions, run.state.step + 1, decisions)


def keep_for_report(run: TrainingRun, append: Callable[..., None], step: int, content: Any) -> None:
    """Appends content that only reports read: a full disk is a warning, and the run goes on."""
    try:
        append(step, content)
    except RunDirectoryError as error:
        run.progress.message(f"warning: {error}; for now it goes on, and the report will lack it")


def report(run: TrainingRun) -> None:
    """Shows the held-out reward before and after, writes the report, and says where the files are."""
    if not run.directory.writes:
        return
    lines = run.directory.read_metrics()
    before = next((line for line in lines if "evaluation/reward" in line), None)
    after = next((line for line in reversed(lines) if "evaluation/reward" in line), None)
    if before is not None and after is not None:
        run.progress.message(
            f"held-out reward: {before['evaluation/reward']:.3f} at step {before['step']}, "
            f"{after['evaluation/reward']:.3f} at step {after['step']}"
        )
    show_report(run)
    run.progress.message(f"results: {run.directory.path} (config.yaml, metrics.jsonl, checkpoints/)")


def show_report(run: TrainingRun) -> None:
    """Writes the report, if `tracking.report` is on and this process writes the run's files."""
    if run.config.tracking.report and run.directory.writes:
        write_report_of_run(run.directory.path, run.progress.message)
