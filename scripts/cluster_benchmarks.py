"""Runs with workers that `bench_cluster.py` measures: a few steps of a config; and what sharing what was
decoded and drafters that are trained in idle time are worth, where workers take turns in this process and
every pass verifies, so that all of it are counts.
"""

import contextlib
import dataclasses
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from drafters import small_model
from rljax.benchmarking import Row, counted_row
from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.fabric import LocalFabric
from rljax.cluster.messages import Load, Weights
from rljax.cluster.worker import RolloutWorker
from rljax.config import ExperimentConfig, load_config
from rljax.models.config import ModelConfig
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.run_directory import RunDirectory
from rljax.speculation.device_proposers import DeviceProposer
from rljax.speculation.draft_length import WorthStarting
from rljax.speculation.managers import expected as expected_manager
from rljax.training import session


@contextlib.contextmanager
def experiment(*overrides: str, file: str = "configs/quickstart.yaml") -> Iterator[ExperimentConfig]:
    """A few steps of a config in a directory of their own."""
    programs = Path(tempfile.gettempdir()) / "rljax-bench-cluster" / "programs"
    keys = ["training.steps=4", "evaluation.problems=0", "tracking.report=false", "engine.compile=before"]
    with tempfile.TemporaryDirectory() as directory:
        places = f"run_dir={directory}/run", f"engine.compilation_cache={programs}"
        yield load_config(file, [*places, *keys, *overrides])


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


# --- all workers' drafters learn what all of them decoded ------------------------------------------------

_SHARING = (
    "task.problems=32", "warm_start.steps=150", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4",
    "rollout.max_response_length=128", "engine.max_slots=8", "engine.batch_buckets=[8]",
    "engine.cache_buckets=[256]", "speculation.drafter=srt", "speculation.verify_buckets=[64]",
)  # fmt: skip


class _Alone(ClusterDecoder):
    """Workers learn what they decoded themselves."""

    def finish(self, *arguments: Any) -> Any:
        self.writers = []
        return super().finish(*arguments)

    def _completion(self, key: Any) -> Any:
        self.writers.append(self.coordinator.ledger[key].ended_by)
        return super()._completion(key)

    def learn(self, outcomes: Any) -> None:
        super().learn(list(zip(self.writers, outcomes, strict=True)))

    def _whole(self, load: Load, weights: Weights) -> Load:
        whole, own = super()._whole(load, weights), []
        for reference in whole.outcomes:
            written = pickle.loads(reference)
            own.append(pickle.dumps([outcome for writer, outcome in written if writer == load.worker]))
        return dataclasses.replace(whole, outcomes=own)


def accept_length(workers: int, shares: bool, steps: int) -> float:
    """Tokens a verifying pass yields per response, over the second half of a run's steps."""
    with contextlib.ExitStack() as parts:
        parts.enter_context(mock.patch.object(expected_manager, "best_rows", most_rows))
        if workers:
            kind = ClusterDecoder if shares else _Alone
            parts.enter_context(mock.patch.object(session, "cluster_of", in_turns(kind)))
        lines = step_metrics(*_SHARING, f"training.steps={steps}", f"cluster.workers={workers}")
    half = lines[len(lines) // 2 :]
    return sum(line["speculation/accept_length"] for line in half) / len(half)


def sharing_rows(workers: list[int], steps: int) -> list[Row]:
    """Compares numbers of workers, each with and without sharing, and one process."""
    alone = accept_length(0, True, steps)
    rows = [counted_row("sharing/one process", alone, 1.0, "tokens a pass", "no drafts")]
    for count in workers:
        both = [accept_length(count, shares, steps) for shares in (True, False)]
        rows.append(counted_row(f"sharing/{count} workers", *both, "tokens a pass", "each learns its own"))
    return rows


# --- drafters that workers train in idle time -------------------------------------------------------------

_RUN = (
    "policy.shape={hidden_size: 64, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 64, mlp_size: 64,"
    " tie_embeddings: true, qk_norm: true, max_positions: 256}",
    "warm_start={steps: 60, learning_rate: 1e-2, tokens_per_step: 512}", "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=4", "rollout.max_prompt_length=64", "rollout.max_response_length=64",
    "engine.max_slots=4", "engine.batch_buckets=[4]", "engine.cache_buckets=[128]",
    "engine.decode_steps_per_sync=1", "training.pack_length=256",
    "speculation.verify_buckets=[20]", "speculation.max_drafts=4", "cluster.workers=3",
)  # fmt: skip
_HEAD = (
    "variant: eagle, train_below: 0, rows: 1, pack_length: 256, depths: [4], top_k: 1, learning_rate: 3e-3"
)
_SMALL = ModelConfig("qwen3", 320, 64, 1, 2, 1, 64, 64, tie_embeddings=True, qk_norm=True)


def drafted_run(
    steps: int, drafter: str, arguments: str, *overrides: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """Runs three workers in turns with a drafter on the device, its arguments and keys of the config. Returns
    the metrics of every step and the turns of its rollout.
    """
    turns: list[int] = []

    class Counting(ClusterDecoder):
        def finish(self, *arguments: Any, **options: Any) -> Any:
            begun = self._fabric.turns
            finished = super().finish(*arguments, **options)
            turns.append(self._fabric.turns - begun)
            return finished

    keys = f"speculation.drafter={drafter}", f"speculation.args={{{arguments}}}", f"training.steps={steps}"
    with (
        mock.patch.object(session, "cluster_of", in_turns(Counting)),
        mock.patch.object(expected_manager, "best_rows", most_rows),
        mock.patch.object(WorthStarting, "allows", lambda *_: True),
        mock.patch.object(DeviceProposer, "expected_rate", lambda *_: 1e9),
        mock.patch.object(small_model, "_LENGTHS", (4,)),  # as deep as the head
    ):
        return step_metrics(*_RUN, *keys, *overrides), turns


def spot_rows(steps: int, updates: int) -> list[Row]:
    """Compares a head that workers train, one that the training process trains behind rollouts, and one that
    nobody does, over the second half of the steps, with at most so many updates of the head in each.
    """
    trained = f"{_HEAD}, slices: {updates}, train_share: 1.0"
    return _compared(steps, "spot", "eagle", f"{_HEAD}, train: false", trained, ["prepare"])


def small_model_rows(steps: int, updates: int) -> list[Row]:
    """The same of a small model (TLT, Table 8), of the policy's architecture with random weights; and with
    joiners that train.
    """
    with tempfile.TemporaryDirectory() as path:
        save_model(Path(path), _SMALL, init_params(_SMALL, 0), "float32")
        frozen = f"path: {path}, rows: 2, learning_rate: 3e-3"
        trained = f"{frozen}, slices: {updates}"
        return _compared(steps, "small model", "small_model", frozen, trained, ["prepare", "train"])


def _compared(
    steps: int, section: str, drafter: str, not_trained: str, trained: str, joiners: list[str]
) -> list[Row]:
    """Compares a drafter that is not trained with one that is; in idle time by each kind of joiners."""
    name = "speculation/accept_length"  # tokens that a verifying pass yields per response
    frozen, frozen_turns = drafted_run(steps, drafter, not_trained)
    frozen_lengths = [line[name] for line in frozen]
    runs = {"trained behind rollouts": drafted_run(steps, drafter, trained)}
    for kind in joiners:
        way = "trained in idle time" + ", joiners train" * (kind == "train")
        keys = f"cluster.spot={{idle: 1, save_every: 4, joiners: {kind}}}"
        runs[way] = drafted_run(steps, drafter, trained, keys)
    rows, half = [], slice(steps // 2, None)
    for way, (metrics, turns) in runs.items():
        lengths = [line[name] for line in metrics]
        details: dict[str, Any] = {
            "accept_lengths": lengths,
            "accept_lengths_not_trained": frozen_lengths,
            "turns": turns,
            "turns_not_trained": frozen_turns,
        }
        if "idle" in way:
            for each in ("sessions", "updates", "samples", "joined"):
                details[each] = float(sum(line[f"cluster/spot_{each}"] for line in metrics))
        both = [float(np.mean(each[half])) for each in (lengths, frozen_lengths)]
        rows.append(counted_row(f"{section}/{way}", *both, "tokens a pass", "not trained", **details))
    return rows
