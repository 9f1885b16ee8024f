"""One process that works on a run: from a config to `loop.train`, under the run's lock and with signals."""

import contextlib
import time
from pathlib import Path

import jax

from drafters.registry import TRAINED_DRAFTERS
from rljax import processes
from rljax.accelerators import start_line
from rljax.assembly.checkpoint import RunCheckpoints
from rljax.assembly.commits import with_commits
from rljax.cluster.starting import cluster_of
from rljax.config import (
    CheckpointConfig,
    ExperimentConfig,
    check_devices,
    check_over_processes,
    check_with_workers,
)
from rljax.config.changes import Change
from rljax.engine.executables import enable_compilation_cache
from rljax.engine.number_type import with_number_type
from rljax.errors import ClusterError, Interrupted
from rljax.progress import Progress, silent_progress
from rljax.run_directory import RunDirectory
from rljax.training.building import make_run
from rljax.training.interruption import StopRequest
from rljax.training.loop import train


def run(config: ExperimentConfig, allow_changes: bool = False) -> None:
    """Trains as `config` says, and resumes `config.run_dir` if it holds a checkpoint.

    Args:
      allow_changes: go on although the config differs from that of the run that is resumed.

    Raises:
      UserError: the user can correct the cause; the message is one line.
      Interrupted: a signal asked to stop; every finished step is saved.
    """
    processes.start(config.distributed)
    check_devices(config.mesh, jax.device_count())
    check_with_workers(config)
    if processes.several():
        check_over_processes(config, jax.device_count(), jax.process_count(), TRAINED_DRAFTERS)
    if config.engine.compilation_cache is not None:
        enable_compilation_cache(config.engine.compilation_cache)
    start = time.perf_counter()
    progress = Progress() if processes.is_first() else silent_progress()
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.ended_by_others())
        directory = _locked_directory(config.run_dir, stack)
        config = processes.copied_from_first(lambda: _resolved(config, directory.recorded_config()))
        stop = stack.enter_context(StopRequest(progress.message, first=None))
        changes: list[Change] = []
        processes.from_first(lambda: changes.extend(directory.begin(config, allow_changes)))
        checkpoints = open_checkpoints(directory, config.checkpoint)
        try:
            with progress:
                progress.message(start_line(config.policy.compute_dtype, config.engine.compilation_cache))
                for change in changes:
                    progress.message(f"changed since the last start: {change}")
                # The innermost context: the others' exits may wait for a process that has ended.
                run_dir = Path(config.run_dir)
                with processes.ended_by_others(), cluster_of(config, progress.message, run_dir) as cluster:
                    training = make_run(config, directory, checkpoints, progress, start, stop, cluster)
                    with training.trackers, contextlib.closing(training), processes.ended_by_others():
                        train(training, allow_changes)
        except ClusterError as error:
            step = checkpoints.latest_step()
            if step is None:
                raise
            raise ClusterError(f"{error}; step {step} is saved, and the run goes on from there") from error
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
    """Returns the checkpoints of a run, with the retention that its config asks for."""
    retention = (config.keep, config.keep_every, config.keep_best)
    return RunCheckpoints(directory.checkpoints_path, *retention)


def _resolved(config: ExperimentConfig, recorded: ExperimentConfig | None) -> ExperimentConfig:
    """Returns the config with what a run keeps when it is resumed: number type and commits of the hub."""
    dtype = None if recorded is None else recorded.policy.compute_dtype
    return with_commits(with_number_type(config, dtype), recorded)


def _locked_directory(path: str, stack: contextlib.ExitStack) -> RunDirectory:
    """Returns the run's files, locked by the process that writes them until `stack` ends."""

    def lock() -> None:
        directories.append(RunDirectory(path))
        stack.enter_context(directories[0].locked())

    directories: list[RunDirectory] = []
    processes.from_first(lock)
    return directories[0] if directories else RunDirectory(path, writes=False)
