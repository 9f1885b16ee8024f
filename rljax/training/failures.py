"""Failures of rollouts and evaluations: the last finished step is saved before the error ends the run."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rljax.errors import CheckpointError, DrafterError, Interrupted, PolicyError, RunDirectoryError, UserError
from rljax.training import reporting, saving
from rljax.training.training_run import TrainingRun


@contextlib.contextmanager
def during_rollout(run: TrainingRun) -> Iterator[None]:
    """Context of a rollout. If it fails, the step before it is saved, and its problems are asked again when
    the run is resumed. After a DrafterError or a PolicyError nothing is saved, because a broken drafter or
    policy would be part of the checkpoint.
    """
    place = run.batches.place()
    try:
        yield
    except (DrafterError, PolicyError):
        raise
    except UserError:
        run.batches.go_back(place)
        save_after_failure(run)
        raise


@contextlib.contextmanager
def during_evaluation(run: TrainingRun, metrics: dict[str, Any]) -> Iterator[None]:
    """Context of an evaluation. If it fails, the finished step is saved with its `metrics`, and the
    evaluation is repeated when the run is resumed. After a DrafterError or a PolicyError nothing is saved, as
    in `during_rollout`.
    """
    try:
        yield
    except (DrafterError, PolicyError):
        raise
    except UserError:
        run.state.evaluation_due = True
        save_after_failure(run, metrics)
        raise


@contextlib.contextmanager
def reported(run: TrainingRun) -> Iterator[None]:
    """Context of a session's steps. If it ends early after at least one step, the report is written."""
    first = run.state.step
    try:
        yield
    except (UserError, Interrupted):
        if run.state.step > first and run.config.tracking.report:
            with contextlib.suppress(KeyboardInterrupt):  # the first error is the one to raise
                reporting.show_report(run.directory, run.progress)
        raise


def save_after_failure(run: TrainingRun, metrics: dict[str, Any] | None = None) -> None:
    """Saves the last finished step, unless its checkpoint exists. An error in here is only a warning: the
    failure that led here ends the run.

    Args:
      run: its state is that of the last finished step.
      metrics: the step's metrics, if they are not written yet.
    """
    try:
        if metrics is not None:
            saving.write_metrics(run, metrics)
        run.checkpoints.wait()
        if run.state.step > (run.checkpoints.latest_step() or 0):
            saving.save(run, None)
            run.checkpoints.wait()
            run.progress.message(f"step {run.state.step} is saved")
    except (CheckpointError, RunDirectoryError) as error:
        run.progress.message(f"warning: {error}")
