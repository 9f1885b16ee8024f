"""Do the algorithms learn: `python scripts/bench_algorithms.py [--only NAMES] [--seeds N] [key=value ...]`.

Trains the config's policy with every algorithm of `rljax/algorithms/registry.py`, from one warm start a seed
and for as many steps. The runs stay in `run_dir`: started again, it goes on where it was stopped. `--plot
FILE` draws what was written and trains nothing. `docs/benchmarks.md` shows the results.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.algorithms.kl import kl_estimate
from rljax.algorithms.registry import ALGORITHMS, NEED_TEACHER
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig, load_config
from rljax.errors import Interrupted
from rljax.models.transformer import Params
from rljax.progress import Progress
from rljax.reports.figures import COLORS, new_figure, save
from rljax.reports.learning import SMOOTHING
from rljax.reports.runs import RunData, read_run
from rljax.rollout.collector import EVALUATION, WantedGroups
from rljax.run_directory import RunDirectory
from rljax.training.interruption import StopRequest
from rljax.training.learner import completions_of, make_minibatches
from rljax.training.loop import train as train_run
from rljax.training.session import open_checkpoints
from rljax.training.training_run import TrainingRun
from training_benchmarks.curves import learning_row, run_command_line, smoothed

_NAMES = tuple(name for name in ALGORITHMS if name not in NEED_TEACHER)


@dataclasses.dataclass(frozen=True)
class Learned:
    """Results of a finished run.

    Attributes:
      run: metrics of the run.
      kl: KL(policy || start) of a response, in nats, on the held-out problems.
      settings: the algorithm, and where it is not its paper's.
    """

    run: RunData
    kl: float
    settings: str


def train(config: ExperimentConfig) -> Learned:
    """Trains a run, from where an earlier call stopped; returns the results of a finished run at once."""
    directory = RunDirectory(config.run_dir)
    finished = directory.path / "kl_from_start.json"
    with directory.locked(), Progress() as progress, StopRequest(progress.message, first=None) as stop:
        directory.begin(config, allow_changes=False)
        if finished.exists():
            kl = json.loads(finished.read_text(encoding="utf-8"))
            return Learned(read_run(directory.path), kl, _settings(config))
        checkpoints = open_checkpoints(directory, config.checkpoint)
        try:
            training = TrainingRun(config, directory, checkpoints, progress, time.perf_counter(), stop)
            start = jax.tree.map(jnp.copy, training.state.params)
            with training.trackers:
                train_run(training)
            kl = kl_from(start, training)
            finished.write_text(json.dumps(kl), encoding="utf-8")
        except Interrupted as interrupted:
            raise KeyboardInterrupt from interrupted
        finally:
            checkpoints.close()
    return Learned(read_run(directory.path), kl, _settings(config))


def _settings(config: ExperimentConfig) -> str:
    return config.algorithm.describe(config.rollout.max_response_length)


def kl_from(start: Params, training: TrainingRun) -> float:
    """Returns the mean KL(policy || start) of a response to a held-out problem: k3, summed over its
    tokens.
    """
    trainer = training.trainer
    groups, _, _ = training.collector.collect(
        training.engine.load_params(training.state.params),
        WantedGroups("heldout", training.heldout, 1, EVALUATION, 0),
    )
    settings = training.config.training.model_copy(update={"minibatches_per_step": 1})
    (minibatch,) = make_minibatches(groups, settings, (0,), trainer.row_multiple)
    total = 0.0
    for batch, reference in zip(
        minibatch.batches, trainer.score_reference(start, minibatch.batches), strict=True
    ):
        both = (np.where(batch.response_mask, each, 0.0) for each in (batch.rollout_logprobs, reference))
        total += float(np.asarray(kl_estimate(*map(jnp.asarray, both), "k3")).sum())
    return total / len(completions_of(groups))


def row_of(name: str, learned: Sequence[Learned]) -> Row:
    """Returns one algorithm's row over its seeds: mean held-out reward after the run, against before."""
    runs = [result.run for result in learned]
    row = learning_row(f"algorithms/{name}", runs, {})
    details: dict[str, Any] = {
        "settings": learned[0].settings,
        "gain": row.value - row.baseline_value,
        "entropy_at_first": [float(run.column("entropy")[0]) for run in runs],
        "kl_from_start": [result.kl for result in learned],
        "groups_sampled": [int(run.column("rollout/groups_sampled").sum()) for run in runs],
        "accepted_drafts": [int(run.column("speculation/accepted").sum()) for run in runs],
    }
    if runs[0].has("critic/explained_variance"):
        details["explained_variance_at_last"] = [
            float(run.column("critic/explained_variance")[-1]) for run in runs
        ]
    return dataclasses.replace(row, details={**row.details, **details})


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel per algorithm: its reward by step, the others in grey, held-out rewards as dots."""
    figure = new_figure(10, 2.4 * -(-len(rows) // 4))
    axes = figure.subplots(-(-len(rows) // 4), 4, sharex=True, sharey=True, squeeze=False).ravel()
    curves = [smoothed(row["reward_by_step"]) for row in rows]  # [seeds, steps] each
    for number, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        panel, steps = axes[number], SMOOTHING + np.arange(curve.shape[1])
        for other in curves:
            panel.plot(steps[: other.shape[1]], other.mean(0)[: len(steps)], color="0.8", linewidth=0.8)
        panel.fill_between(steps, curve.min(0), curve.max(0), color=COLORS[0], alpha=0.2, linewidth=0)
        panel.plot(steps, curve.mean(0), color=COLORS[0], linewidth=2)
        for step, heldout in ((0, row["before"]), (row["steps"], row["after"])):
            panel.plot([step] * len(heldout), heldout, "o", color=COLORS[1], markersize=4, clip_on=False)
        panel.set_title(row["name"].removeprefix("algorithms/"), fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes[len(rows) :]:
        panel.remove()
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("reward", fontsize=10)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return run_command_line(_benchmark, plot, "algorithm", argv)


def _benchmark(config: str, overrides: Sequence[str], seeds: int) -> Benchmark:
    def rows(name: str) -> list[Row]:
        learned = []
        for seed in range(seeds):
            run_config = load_config(config, [*overrides, f"algorithm.name={name}", f"seed={seed}"])
            directory = f"{run_config.run_dir}/{name}-seed{seed}"
            learned.append(train(run_config.model_copy(update={"run_dir": directory})))
        return [row_of(name, learned)]

    return Benchmark(
        "algorithms",
        __doc__.splitlines()[0],
        [
            Measurement(name, f"{seeds} seeds", lambda name=name: rows(name), disturbed=False)
            for name in _NAMES
        ],
        packages=("numpy", "optax"),
        prepare=lambda sections: load_config(config, overrides) and None,
    )


if __name__ == "__main__":
    sys.exit(main())
