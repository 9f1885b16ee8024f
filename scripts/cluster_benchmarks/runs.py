"""Runs that sections measure: a few steps of a config, and workers that take turns in this process."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.worker import RolloutWorker
from rljax.config import ExperimentConfig, load_config
from rljax.run_directory import RunDirectory
from rljax.training import session


@contextlib.contextmanager
def experiment(*overrides: str, file: str = "configs/quickstart.yaml") -> Iterator[ExperimentConfig]:
    """A few steps of a config in a directory of their own."""
    shared = Path(tempfile.gettempdir()) / "rljax-bench-cluster"
    with tempfile.TemporaryDirectory() as directory:
        yield load_config(
            file,
            [
                f"run_dir={directory}/run",
                "training.steps=4",
                "evaluation.problems=0",
                "tracking.report=false",
                "engine.compile=before",
                f"engine.compilation_cache={shared}/programs",
                *overrides,
            ],
        )


def in_turns(kind: type[ClusterDecoder]) -> Callable[..., Any]:
    """Returns what takes the place of `session.cluster_of`: workers that take turns in this process."""

    @contextlib.contextmanager
    def cluster_of(config: ExperimentConfig, say: Any, directory: Any = None) -> Iterator[ClusterDecoder]:
        with contextlib.closing(kind(LocalFabric(RolloutWorker), config.cluster, say)) as cluster:
            cluster.start_workers()
            yield cluster

    return cluster_of


def most_rows(candidates: Any, buckets: Any, times: Any, batch: int, length: int) -> int:
    """In the place of `expected.best_rows`: every pass verifies, whatever it costs."""
    return [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)][-1]


def step_metrics(*overrides: str, **experiment_of: str) -> list[dict[str, Any]]:
    """Runs an experiment, and returns the metrics of its steps."""
    with experiment(*overrides, **experiment_of) as config:
        session.run(config)
        return [line for line in RunDirectory(config.run_dir).read_metrics() if "rollout/tokens" in line]
