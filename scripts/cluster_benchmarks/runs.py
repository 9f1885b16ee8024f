"""Runs that sections measure: a few steps of the quickstart, and workers that take turns in this process."""

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
def experiment(*overrides: str) -> Iterator[ExperimentConfig]:
    """A few steps of the quickstart in a directory of their own."""
    shared = Path(tempfile.gettempdir()) / "rljax-bench-cluster"
    with tempfile.TemporaryDirectory() as directory:
        yield load_config(
            "configs/quickstart.yaml",
            [
                f"run_dir={directory}/run",
                "training.steps=4",
                "evaluation.problems=0",
                "tracking.report=false",
                "engine.compile=before",
                f"engine.compilation_cache={shared}/programs",
                f"warm_start.cache_dir={shared}/warm_start",
                *overrides,
            ],
        )


@contextlib.contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Context in which attributes, (owner, name, value) each, have other values."""
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)


def in_turns(kind: type[ClusterDecoder]) -> Callable[..., Any]:
    """Returns what takes the place of `session.cluster_of`: workers that take turns in this process."""

    @contextlib.contextmanager
    def cluster_of(config: ExperimentConfig, say: Any, wished: Any = None) -> Iterator[ClusterDecoder]:
        with contextlib.closing(kind(LocalFabric(RolloutWorker), config.cluster, say)) as cluster:
            cluster.gather()
            yield cluster

    return cluster_of


def most_rows(candidates: Any, buckets: Any, times: Any, batch: int, length: int) -> int:
    """In the place of `selection.best_rows`: every pass verifies, whatever it costs."""
    return [rows for rows, _ in buckets.passes(batch) if rows > len(candidates.current)][-1]


def step_metrics(*overrides: str) -> list[dict[str, Any]]:
    """Runs an experiment, and returns the metrics of its steps."""
    with experiment(*overrides) as config:
        session.run(config)
        return [line for line in RunDirectory(config.run_dir).read_metrics() if "rollout/tokens" in line]
