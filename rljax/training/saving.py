"""Saving a run: metrics after every step, checkpoints when they are due."""

import functools
import time
from typing import Any

from rljax import processes
from rljax.assembly.adapter import BASE_DIGEST
from rljax.errors import CheckpointError, RunDirectoryError
from rljax.training.factor_updates import trained_alone
from rljax.training.training_run import TrainingRun


def write_metrics(run: TrainingRun, metrics: dict[str, Any]) -> None:
    """Writes the metrics of the last finished step to metrics.jsonl and to the trackers.

    Raises:
      RunDirectoryError: the line cannot be written, and `checkpoint.on_failure` is "stop". Otherwise the line
        is kept in memory, and written with the next one.
    """
    elapsed = time.perf_counter() - run.start
    line = {"step": run.state.step} | metrics | {"time/elapsed": elapsed}
    try:
        run.directory.append_metrics(line)
    except RunDirectoryError as error:
        if run.config.checkpoint.on_failure == "stop":
            raise
        run.progress.message(f"warning: {error}; for now it goes on, and the line is kept")
    run.trackers.write(line)


def save_if_due(run: TrainingRun, due: bool, final: bool, score: float | None) -> None:
    """Starts a checkpoint if one is due. Also reports the failure of an earlier one, which is written in the
    background.

    Args:
      due: whether to start a checkpoint.
      final: whether this is the last checkpoint of the session; its failure always raises.
      score: held-out reward of the step, if known.

    Raises:
      CheckpointError, RunDirectoryError: a checkpoint cannot be written, and either `checkpoint.on_failure`
        is "stop" or this is the final one.
    """
    save_now = functools.partial(save, run, score)
    for attempt in (run.checkpoints.wait, save_now) if due else (run.checkpoints.check,):
        try:
            attempt()
        except (CheckpointError, RunDirectoryError) as error:
            if run.config.checkpoint.on_failure == "stop" or (final and attempt is save_now):
                raise
            run.progress.message(f"warning: {error}; the run goes on, and the next one is tried as usual")


def save(run: TrainingRun, score: float | None) -> None:
    """Starts a checkpoint of everything that resuming needs.

    Args:
      score: held-out reward of the step, if known; `checkpoint.keep_best` compares it.
    """
    # A run that resumes from the checkpoint would lack them.
    processes.from_first(run.directory.write_metrics_left)
    drafter = run.speculator.state()
    host_state = {"data_position": run.state.data_position, "seed": run.config.seed, "data": run.data_digests}
    if run.curriculum is not None:
        host_state["curriculum"] = run.curriculum.state()
    if run.state.evaluation_due:
        host_state["owes_evaluation"] = True
    if run.learner.reference_digest is not None:
        host_state["reference"] = run.learner.reference_digest
    if run.base_digest is not None:
        host_state[BASE_DIGEST] = run.base_digest
    begun, weights = run.batches.state()
    routing = {} if run.cluster is None else run.cluster.state()
    arrays = {**drafter, **weights, **routing}
    run.checkpoints.save(run.state.step, trained_alone(run.state.trained), host_state | begun, arrays, score)
