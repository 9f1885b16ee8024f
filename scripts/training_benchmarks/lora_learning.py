"""A run of the algorithms' task with LoRA and with all weights, from the same warm start."""

from collections.abc import Mapping, Sequence

import numpy as np

from rljax.benchmarking import Row
from rljax.reports.runs import RunData
from training_benchmarks.curves import CONFIG, train_to_end

# A rate about ten times that of all weights, as adapters want.
RUNS: Mapping[str, tuple[str, ...]] = {
    "all weights": ("optimizer.learning_rate=1e-4",),
    "LoRA": ("policy.lora={rank: 16, alpha: 32}", "optimizer.learning_rate=1e-3"),
}
"""The overrides of each way to train."""


def learning_rows(steps: int, overrides: Sequence[str] = ()) -> list[Row]:
    """Trains both ways; a run that is there goes on, or is only read.

    Args:
      steps: steps of each run.
      overrides: keys of the config, for both.
    """
    common = ("run_dir=runs/bench_lora", f"training.steps={steps}", "tracking.report=false", *overrides)
    found = {
        what: train_to_end(CONFIG, [*common, *keys], what.replace(" ", "_")) for what, keys in RUNS.items()
    }
    return [row_of(found)]


def row_of(found: Mapping[str, RunData]) -> Row:
    """Returns the row of finished runs: the reward with LoRA, against that of training all weights."""
    whole, adapter = (_row_ends(found[what]) for what in RUNS)
    return Row(
        name="learning/0.8M/LoRA",
        value=adapter[1],
        unit="reward",
        baseline="all weights",
        baseline_value=whole[1],
        ratio=adapter[1] / whole[1],
        details={
            "steps": len(found["LoRA"].steps),
            "before": adapter[0],
            "seconds_of_updates": {
                what: float(np.sum(data.column("time/update"))) for what, data in found.items()
            },
            "mismatch_logprob_abs_max": {
                what: float(data.column("mismatch/logprob_abs_max").max()) for what, data in found.items()
            },
            "heldout": {
                what: [[line["step"], line["evaluation/reward"]] for line in data.evaluations]
                for what, data in found.items()
            },
            "reward_by_step": {what: data.column("reward/mean").tolist() for what, data in found.items()},
        },
    )


def _row_ends(data: RunData) -> tuple[float, float]:
    """Held-out rewards before and after a run."""
    return data.evaluations[0]["evaluation/reward"], data.evaluations[-1]["evaluation/reward"]
