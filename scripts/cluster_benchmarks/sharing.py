"""What it is worth that all workers' drafters learn what all of them decoded."""

import contextlib
import dataclasses
import pickle
from typing import Any

from cluster_benchmarks.runs import in_turns, most_rows, replaced, step_metrics
from rljax.benchmarking import Row
from rljax.cluster.decoder import ClusterDecoder
from rljax.cluster.messages import Delivery, Load, Weights
from rljax.speculation.managers import expected as expected_manager
from rljax.training import session

_SHARING = (
    "task.problems=32",
    "warm_start.steps=150",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_length=128",
    "engine.max_slots=8",
    "engine.batch_buckets=[8]",
    "engine.cache_buckets=[256]",
    "speculation.drafter=srt",
    "speculation.verify_buckets=[64]",
)


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

    def _delivery(self, load: Load, weights: Weights) -> Delivery:
        delivery, name = super()._delivery(load, weights), load.worker
        own = []
        for lesson in delivery.lessons:
            written = pickle.loads(lesson)
            own.append(pickle.dumps([outcome for writer, outcome in written if writer == name]))
        return dataclasses.replace(delivery, lessons=own)


def accept_length(workers: int, shares: bool, steps: int) -> float:
    """Tokens a verifying pass yields per response, over the second half of a run's steps."""
    with contextlib.ExitStack() as parts:
        parts.enter_context(replaced((expected_manager, "best_rows", most_rows)))
        if workers:
            kind = ClusterDecoder if shares else _Alone
            parts.enter_context(replaced((session, "cluster_of", in_turns(kind))))
        lines = step_metrics(*_SHARING, f"training.steps={steps}", f"cluster.workers={workers}")
    half = lines[len(lines) // 2 :]
    return sum(line["speculation/accept_length"] for line in half) / len(half)


def sharing_rows(workers: list[int], steps: int) -> list[Row]:
    """Compares numbers of workers, each with and without sharing, and one process."""
    alone = accept_length(0, True, steps)
    rows = [Row("sharing/one process", alone, "tokens a pass", "no drafts", 1.0, alone)]
    for count in workers:
        shared, own = (accept_length(count, shares, steps) for shares in (True, False))
        name = f"sharing/{count} workers"
        rows.append(Row(name, shared, "tokens a pass", "each learns its own", own, shared / own))
    return rows
