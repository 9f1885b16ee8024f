"""Reporting a run: the live display, the files that reports read, and the report at the end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.errors import RunDirectoryError
from rljax.progress import Progress
from rljax.reports import write_report_of_run
from rljax.requests import DecodeStatistics
from rljax.rollout.collector import Group
from rljax.rollout.summary import summarize_rollout
from rljax.run_directory import RunDirectory
from rljax.training.training_run import TrainingRun

_FEW = 0.01  # share of responses
_LARGE = 2.0**24


def show_rollout(run: TrainingRun, total: int, tokens: int, finished: int) -> None:
    """Shows sampled tokens, finished responses, of `total`, what still compiles, and what workers do."""
    also = f", {left} shapes compiling" if (left := run.compilation.left) else ""
    also += "" if run.cluster is None else f", {run.cluster.doing}"
    run.progress.update("rollout", f"{tokens:,} tokens, {finished}/{total} done{also}")


def show_update(progress: Progress, number: int) -> None:
    """Shows the number of the current update, from 1."""
    progress.update("update", f"{number}")


def show_step(progress: Progress, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows that a step is finished."""
    progress.step(
        step,
        {
            "reward": metrics["reward/mean"],
            "tokens_per_second": metrics["rollout/tokens_per_second"],
            "length": metrics["response_length/mean"],
        },
    )


def show_doubts(progress: Progress, task: str, metrics: Mapping[str, Any]) -> None:
    """Says after the first step what makes rewards useless: answers that are never found, and numbers between
    which float32 cannot tell. `task` is its name.
    """
    for name, share in metrics.items():
        if name.startswith("reward/") and name.endswith("answer_found") and share < _FEW:
            reward = name.removeprefix("reward/").rpartition("/")[0] or task
            how_many = "none" if share == 0 else f"{share:.1%}"
            progress.message(
                f"warning: {reward} found an answer in {how_many} of the first step's responses ({name});"
                " compare what it looks for with what the prompts ask for and the samples of the report show"
            )
    if abs(metrics["reward/mean"]) > _LARGE:
        progress.message(
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
    directory, progress, step = run.directory, run.progress, run.state.step + 1
    keep_for_report(progress, directory.append_rollout, step, summary)
    if run.cluster is not None:
        keep_for_report(progress, directory.append_workers, step, run.cluster.timeline())
    keep_for_report(progress, directory.append_decisions, step, run.speculator.decisions.take())


def keep_for_report(progress: Progress, append: Callable[..., None], step: int, content: Any) -> None:
    """Appends content that only reports read: a full disk is a warning, and the run goes on."""
    try:
        append(step, content)
    except RunDirectoryError as error:
        progress.message(f"warning: {error}; for now it goes on, and the report will lack it")


def report(directory: RunDirectory, progress: Progress, writes_page: bool) -> None:
    """Shows the held-out reward before and after, writes the report where wanted, and says where all is."""
    if not directory.writes:
        return
    lines = directory.read_metrics()
    before = next((line for line in lines if "evaluation/reward" in line), None)
    after = next((line for line in reversed(lines) if "evaluation/reward" in line), None)
    if before is not None and after is not None:
        progress.message(
            f"held-out reward: {before['evaluation/reward']:.3f} at step {before['step']}, "
            f"{after['evaluation/reward']:.3f} at step {after['step']}"
        )
    if writes_page:
        show_report(directory, progress)
    progress.message(f"results: {directory.path} (config.yaml, metrics.jsonl, checkpoints/)")


def show_report(directory: RunDirectory, progress: Progress) -> None:
    """Writes the report, if this process writes the run's files."""
    if directory.writes:
        write_report_of_run(directory.path, progress.message)
