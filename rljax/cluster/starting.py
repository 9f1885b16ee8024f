"""The rollout workers that a config asks for, started for a run, an evaluation or a server."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax import processes
from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.shared_decoder import SharedDecoder, in_first
from rljax.cluster.wish import WishFile
from rljax.config import ExperimentConfig


@contextlib.contextmanager
def cluster_of(
    config: ExperimentConfig, say: Callable[[str], None], wished: Path | None = None
) -> Iterator[ClusterDecoder | SharedDecoder | None]:
    """Context of the rollout workers that a config asks for, whose processes run and fit; None for none.

    Args:
      config: the experiment.
      say: shows a line to the user.
      wished: directory whose file `workers` says how many are wished for while it goes on.
    """
    if not config.cluster.workers:
        yield None
        return
    workers = started_workers(config, say, wished)
    if processes.several():
        workers = in_first(workers)
    with workers as cluster:
        yield cluster


@contextlib.contextmanager
def started_workers(
    config: ExperimentConfig, say: Callable[[str], None], wished: Path | None
) -> Iterator[ClusterDecoder]:
    """Context of workers whose processes run; the arguments are those of `cluster_of`."""
    from rljax.cluster.ray_fabric import connect  # needs the extra of the workers

    fabric, wish = connect(config.cluster, say), None if wished is None else WishFile(wished, say)
    versions = 2 + config.rollout.oldest_lag
    with contextlib.closing(ClusterDecoder(fabric, config.cluster, say, versions, wish)) as cluster:
        cluster.gather()
        yield cluster
