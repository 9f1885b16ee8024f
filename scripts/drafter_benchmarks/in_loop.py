"""A warmed-up head in whole runs on fresh prompts: trained on beside the policy, or left as it was.

Both runs, and a plain one, train the policy with the same noise and so on the same tokens; every pass
verifies a chain of the head. The warm-up samples the prompts of the first steps, one step a round of it: only
later steps have fresh prompts. Their accept lengths differ by what the head learned in the loop alone.
"""

import tempfile
from pathlib import Path
from typing import Any

from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.errors import UserError
from rljax.training import loop
from rljax.training.compiling import compile_programs
from rljax.training.drafter_warm_up import WarmUp, warm_up
from rollout_benchmarks.variants import open_run, with_keys

_DEPTH = 4


def in_loop_rows(config: ExperimentConfig, settings: WarmUp, steps: int, slices: int) -> list[Row]:
    """Measures accept lengths and seconds of rollouts, step by step.

    Args:
      settings: warm-up of the head.
      steps: RL steps of each run.
      slices: number of training slices of the head behind every rollout.

    Raises:
      UserError: the runs sampled different tokens.
    """
    config = with_keys(
        config,
        training={"steps": steps},
        engine={"compile": "before"},  # while programs are compiled in the background, nothing is verified
    )
    with tempfile.TemporaryDirectory() as directory:
        head = Path(directory) / "head"
        warm_up(config, settings, head)
        lines = {
            name: _run(_with_head(config, settings, head, name, slices))
            for name in ("plain", "frozen", "trained")
        }
    rows = []
    for step, (plain, frozen, trained) in enumerate(zip(*lines.values(), strict=True)):
        if not plain["reward/mean"] == frozen["reward/mean"] == trained["reward/mean"]:
            raise UserError(f"step {step}: the runs differ in reward/mean: they sampled different tokens")
        lengths = trained["speculation/accept_length"], frozen["speculation/accept_length"]
        rows.append(
            counted_row(
                f"in loop/step {step}",
                *lengths,
                "tokens a pass",
                "frozen head",
                reward=plain["reward/mean"],
                tokens=plain["rollout/tokens"],
                seconds={name: lines[name][step]["time/rollout"] for name in lines},
                speculated_share={
                    name: lines[name][step]["speculation/speculated_share"] for name in ("frozen", "trained")
                },
                draft_share=trained["speculation/draft_share"],
                warm_up_slices=settings.steps,
                slices_per_step=slices,
                policy_learning_rate=config.optimizer.learning_rate,
            )
        )
    return rows


def _with_head(
    config: ExperimentConfig, settings: WarmUp, head: Path, name: str, slices: int
) -> ExperimentConfig:
    """Returns the config whose every pass verifies a chain of the head; without drafts for "plain"."""
    off = {"drafter": None, "others": {}, "args": {}, "mix": False, "run_ahead_below": 0}
    update: dict[str, Any] = off
    if name != "plain":
        arguments = {"variant": settings.variant, "path": str(head), "depths": [_DEPTH], "top_k": 1}
        arguments |= {"slices": slices, "train_below": 0, "train": name == "trained"}
        strategy = {"drafter": "eagle", "depth": _DEPTH, "top_k": 1, "nodes": _DEPTH}
        update = off | {
            "drafter": "eagle",
            "args": arguments | {"learning_rate": settings.learning_rate},
            "choice": "fixed",
            "strategies": [strategy],
            "max_drafts": _DEPTH,
            "max_batch": config.engine.max_slots,
        }
    return with_keys(config, speculation=update)


def _run(config: ExperimentConfig) -> list[dict[str, Any]]:
    """Trains as the config says, and returns the metrics of every step."""
    lines = []
    with open_run(config) as (run, progress):
        compile_programs(run)
        progress.stage("bench", config.training.steps)
        while run.state.step < config.training.steps:
            lines.append(loop.training_step(run))
            run.state.step += 1
            progress.step(run.state.step, {"reward": lines[-1]["reward/mean"]})
    return lines
