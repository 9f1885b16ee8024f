"""Resuming a run from its newest checkpoint."""

from typing import Any

import numpy as np

from rljax import processes
from rljax.assembly.adapter import BASE_DIGEST, check_base, keeps_base, write_base
from rljax.assembly.checkpoint import ROUTING, SAMPLED_BY, template_of
from rljax.errors import CheckpointError
from rljax.training.factor_updates import base_params, trained_alone
from rljax.training.training_run import TrainingRun


def begin_session(run: TrainingRun, allow_changes: bool = False) -> None:
    """Restores the newest checkpoint, if there is one, and records that this process works on the run.

    Raises:
      CheckpointError: see `resume`.
      RunDirectoryError: a file of the run cannot be written.
    """
    resume(run, allow_changes)
    processes.from_first(lambda: _record(run))
    run.trackers.begin()


def _record(run: TrainingRun) -> None:
    record_session(run)
    run.directory.write_config(run.config, allow_changes=True)  # `session.run` has compared it


def resume(run: TrainingRun, allow_changes: bool = False) -> None:
    """Restores the newest checkpoint, if there is one, and removes later lines from the run's files.

    Raises:
      CheckpointError: the checkpoint is unreadable or not a training run's, or its adapter has another base;
        or the KL penalty's reference or the task's data have changed since, and `allow_changes` is False.
    """
    newest = processes.from_first(run.checkpoints.latest_step)
    if newest is None:
        run.directory.truncate_after(-1)
        if keeps_base(run.config):
            base = base_params(run.state.trained)
            write_base(run.config, run.trainer.config, base, run.tokenizer_directory)
        return
    if run.base_digest is not None:
        saved = run.checkpoints.host_state(newest).get(BASE_DIGEST)
        path = run.checkpoints.directory / str(newest)
        check_base(path, saved, run.base_digest, run.config.policy.path)

    # The state is replaced by its template first: there may be no room for two states.
    template = template_of(trained_alone(run.state.trained))
    base = None if run.base_digest is None else base_params(run.state.trained)
    run.state.trained = None
    run.state.step, run.state.trained, host_state = run.checkpoints.restore(template)
    if base is not None:
        run.state.trained = run.trainer.merged(base, run.state.trained)
    if "data_position" not in host_state:
        path = run.checkpoints.directory / str(run.state.step)
        raise CheckpointError(f"{path}: is no checkpoint of a training run (it has no data_position)")

    # Compare the inputs that only the checkpoint knows.
    changes = _changes(run, host_state)
    if changes and not allow_changes:
        raise CheckpointError(f"{'; '.join(changes)}; --allow-changes goes on all the same")
    for change in changes:
        run.progress.message(f"changed since the last start: {change}")

    # Restore the state on the host.
    run.state.data_position = host_state["data_position"]
    run.state.evaluation_due = host_state.get("owes_evaluation", False)
    if run.curriculum is not None:
        run.curriculum.load_state(host_state.get("curriculum", {}))
    arrays = run.checkpoints.host_arrays(run.state.step)
    weights, routing, drafter_state = _parted(arrays, SAMPLED_BY, ROUTING)
    if run.cluster is not None:
        run.cluster.load_state(routing)
    run.speculator.load_state(drafter_state)
    run.batches.load_state(host_state, weights)  # last: workers are given what was begun, by the lengths
    run.directory.truncate_after(run.state.step)
    seed = host_state.get("seed", run.config.seed)
    before = "" if seed == run.config.seed else f", which was reached with seed {seed}"
    run.progress.message(f"resumed from step {run.state.step}{before}")


def _parted(arrays: dict[str, np.ndarray], *begins: str) -> list[dict[str, np.ndarray]]:
    """Returns the arrays whose names begin with each of `begins`, and the rest."""
    parts = [{name: arrays[name] for name in arrays if name.startswith(begin)} for begin in begins]
    return [*parts, {name: arrays[name] for name in arrays if not name.startswith(begins)}]


def _changes(run: TrainingRun, host_state: dict[str, Any]) -> list[str]:
    """Descriptions of data sets and reference weights that differ from those of the checkpoint."""
    saved_digests = host_state.get("data", {})
    changes = [
        f"{name} holds other data than when the run was at step {run.state.step}"
        for name, digest in run.data_digests.items()
        if saved_digests.get(name, digest) != digest
    ]
    reference = run.learner.reference_digest
    if None not in (reference, host_state.get("reference")) and reference != host_state["reference"]:
        changes.append(
            "the reference of the KL penalty, the teacher or the policy as the run began, has other weights"
            " than before: its path holds something else now, or the warm start is another one"
        )
    return changes


def record_session(run: TrainingRun) -> None:
    """Adds this process to sessions.jsonl, and warns if its numerics differ from the last session's."""
    fingerprint = None if run.invariance is None else run.invariance.fingerprint
    known = [line["numerics"] for line in run.directory.read_sessions() if "numerics" in line]
    if fingerprint is not None and known and fingerprint != known[-1]:
        run.progress.message(
            f"numerics: this machine computes other bits than the last (fingerprint {known[-1]}, now"
            f" {fingerprint}): tokens after step {run.state.step} may be others, nothing else changes"
        )
    run.directory.record_session(run.state.step, fingerprint)
