"""A run of the quickstart's task with LoRA and with all weights, from the same warm start."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljax.benchmarking import Row
from rljax.config import load_config
from rljax.reports.runs import RunData, read_run
from rljax.training.session import run

_CONFIG = "configs/bench_algorithms.yaml"
# A rate about ten times that of all weights, as adapters want.
_RUNS = {
    "all weights": ("optimizer.learning_rate=1e-4",),
    "LoRA": ("policy.lora={rank: 16, alpha: 32}", "optimizer.learning_rate=1e-3"),
}


def learning_rows(steps: int, overrides: Sequence[str] = ()) -> list[Row]:
    """Trains both ways; a run that is there goes on, or is only read.

    Args:
      steps: steps of each run.
      overrides: keys of the config, for both.
    """
    found = {}
    for what, keys in _RUNS.items():
        directory = f"runs/bench_lora/{what.replace(' ', '_')}"
        common = (f"run_dir={directory}", f"training.steps={steps}", "tracking.report=false")
        run(load_config(_CONFIG, [*common, *keys, *overrides]))
        found[what] = read_run(Path(directory))
    before, after = (_row_ends(found[what]) for what in _RUNS)
    return [
        Row(
            name="learning/0.8M/LoRA",
            value=after[1],
            unit="reward",
            baseline="all weights",
            baseline_value=before[1],
            ratio=after[1] / before[1],
            details={
                "steps": steps,
                "before": after[0],
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
    ]


def _row_ends(data: RunData) -> tuple[float, float]:
    """Held-out rewards before and after a run."""
    return data.evaluations[0]["evaluation/reward"], data.evaluations[-1]["evaluation/reward"]
