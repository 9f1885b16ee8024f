"""The rollout workers that a config asks for, started for a run, an evaluation or a server."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax import processes
from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.desired_workers import DesiredWorkersFile
from rljax.cluster.shared_decoder import SharedDecoder, in_first
from rljax.config import ExperimentConfig


@contextlib.contextmanager
def cluster_of(
    config: ExperimentConfig, say: Callable[[str], None], directory: Path | None = None
) -> Iterator[ClusterDecoder | SharedDecoder | None]:
    """Context of the rollout workers that a config asks for, whose processes run and fit; None for none.

    Args:
      config: the experiment.
      say: shows a line to the user.
      directory: whose file `workers` says how many are desired while it goes on.
    """
    if not config.cluster.workers:
        yield None
        return
    workers = started_workers(config, say, directory)
    if processes.several():
        workers = in_first(workers)
    with workers as cluster:
        yield cluster


@contextlib.contextmanager
def started_workers(
    config: ExperimentConfig, say: Callable[[str], None], directory: Path | None
) -> Iterator[ClusterDecoder]:
    """Context of workers whose processes run; the arguments are those of `cluster_of`."""
    from rljax.cluster.ray_fabric import connect  # needs the extra of the workers

    fabric = connect(config.cluster, say)
    desired = None if directory is None else DesiredWorkersFile(directory, say)
    versions = 2 + config.rollout.oldest_lag
    with contextlib.closing(ClusterDecoder(fabric, config.cluster, say, versions, desired)) as cluster:
        cluster.start_workers()
        yield cluster
