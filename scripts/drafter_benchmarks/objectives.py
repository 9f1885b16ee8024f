"""Compares training objectives of a head after equal numbers of slices, and the cost of a slice (TLT, Tables
7 and 8).
"""

import dataclasses
from collections.abc import Sequence

from drafter_benchmarks.training import by_position, train_head
from drafters.eagle.evaluation import Acceptance
from drafters.eagle.model import HeadConfig, shared_params
from drafters.eagle.objective import HeadTraining
from drafters.eagle.spot_trainer import HeadTrainer
from drafters.eagle.variant import Variant
from rljax.benchmarking import Row, counted_row, timed_row
from rljax.config import ExperimentConfig
from rljax.timing import compare, interleave
from rljax.training.drafter_warm_up import PolicyRollouts, WarmUp, make_trainer, measure
from rollout_benchmarks.variants import collect_step, open_run

_EAGLE = {"hidden_weight": 1.0, "cross_entropy_weight": 0.1}
OBJECTIVES: dict[str, tuple[Variant, HeadTraining]] = {
    "EAGLE": ("eagle", HeadTraining(**_EAGLE)),
    "EAGLE, reverse KL": ("eagle", HeadTraining(**_EAGLE, reverse_kl_weight=0.1)),
    "HASS": ("hass", HeadTraining(steps=3, **_EAGLE)),
    "EAGLE-3": ("eagle3", HeadTraining(steps=7, step_decay=0.8)),
    "EAGLE-3, reverse KL": ("eagle3", HeadTraining(steps=7, step_decay=0.8, reverse_kl_weight=1.0)),
    "EAGLE-3, LK": ("eagle3", HeadTraining(steps=7, step_decay=0.8, lk_weight=1.0)),
}
"""Published losses and steps; the others add theirs with the weight of the cross entropy."""


def objective_rows(
    config: ExperimentConfig, settings: WarmUp, repeats: int, names: Sequence[str] = tuple(OBJECTIVES)
) -> list[Row]:
    """Measures accept lengths on held-out rollouts and seconds per slice, against the first of `names`."""
    with open_run(config) as (run, progress):
        rounds = -(-settings.steps // settings.slices_per_round)
        groups = [collect_step(run, run.collector, step)[0] for step in range(rounds)]
        trainers: dict[str, HeadTrainer] = {}
        worth: dict[str, tuple[Acceptance, Acceptance]] = {}
        progress.stage("bench", len(names))
        for number, name in enumerate(names, 1):
            variant, training = OBJECTIVES[name]
            head = HeadConfig(variant, run.trainer.config)
            rollouts = PolicyRollouts(run, head)
            shared = shared_params(run.state.params, head.policy)
            trainer_settings = dataclasses.replace(settings, variant=variant, training=training)
            trainer = trainers[name] = make_trainer(run, head, trainer_settings)
            heldout = rollouts.heldout(settings.heldout)
            before = measure(run, head, trainer.params, shared, heldout, settings.depth)
            train_head(trainer, settings, shared, lambda step, of=rollouts: of.read(groups[step]))
            after = measure(run, head, trainer.params, shared, heldout, settings.depth)
            worth[name] = before, after
            progress.step(number, {"accept_length": after.accept_length})
        seconds = interleave(
            {name: lambda trainer=trainer: trainer.slice(shared) for name, trainer in trainers.items()},
            repeats,
        )
    rows, first = [], names[0]
    for name in names:
        (before, after), baseline = worth[name], worth[first][1]
        details = {
            "steps_unrolled": OBJECTIVES[name][1].steps,
            "slices": settings.steps,
            "learning_rate": settings.learning_rate,
            "untrained": before.accept_length,
            **by_position(after),
        }
        lengths = after.accept_length, baseline.accept_length
        rows.append(
            counted_row(f"training/{name}/accept length", *lengths, "tokens a pass", first, **details)
        )
        tokens = trainers[name].rows * trainers[name].pack_length
        timing = compare(seconds[name], seconds[first])
        rows.append(timed_row(f"training/{name}/slice", timing, first, tokens=tokens))
    return rows
