"""A task whose problems come back, asked in order and by each curriculum, from the same warm starts."""

from collections.abc import Mapping, Sequence

import numpy as np

from rljax.benchmarking import Row
from rljax.reports.runs import RunData
from training_benchmarks.curves import CONFIG, learning_row, train_to_end

PROBLEMS = 128
"""Training problems; a step asks 16."""

RULES = ("none", "failures", "uncertain")
"""Values of `task.curriculum`; the first is the baseline."""

# Chains of 2 to 12 terms, as many of each length, and a reward of 0 or 1: some problems are nearly always
# solved, some nearly never. Without a KL penalty, groups that are all right or all wrong have no gradient,
# and are left out of the update.
_KEYS = (
    f"task.problems={PROBLEMS}",
    "task.args={max_terms: 12, max_number: 3, tail_exponent: 0}",
    "task.rewards=[{name: exact, args: {answer_in: marker, marker: '#'}}]",
    "algorithm.kl_coefficient=0",
    "tracking.report=false",
)


def curriculum_rows(steps: int, seeds: int, overrides: Sequence[str] = ()) -> list[Row]:
    """Trains with each rule; a run that is there goes on, or is only read.

    Args:
      steps: steps of each run.
      seeds: runs of each rule.
      overrides: keys of the config, for all.
    """
    found = {
        rule: [
            train_to_end(
                CONFIG,
                [
                    "run_dir=runs/bench_learning",
                    f"training.steps={steps}",
                    *_KEYS,
                    f"task.curriculum={rule}",
                    f"seed={seed}",
                    *overrides,
                ],
                f"curriculum-{rule}-seed{seed}",
            )
            for seed in range(seeds)
        ]
        for rule in RULES
    }
    return rows_of(found)


def rows_of(found: Mapping[str, Sequence[RunData]]) -> list[Row]:
    """Returns the rows of finished runs, by rule one a seed: what was learned with each, and the share of
    sampled tokens that are learned from, against asking in order.
    """
    rows = [
        learning_row(f"curriculum/{rule}/held-out", runs, _passed_over(rule, runs))
        for rule, runs in found.items()
    ]
    taught = {rule: _taught(runs) for rule, runs in found.items()}
    plain = taught[RULES[0]]
    for rule in RULES[1:]:
        value, baseline = float(np.mean(taught[rule])), float(np.mean(plain))
        rows.append(
            Row(
                name=f"curriculum/{rule}/tokens that teach",
                value=value,
                unit="share",
                baseline="problems in order",
                baseline_value=baseline,
                ratio=value / baseline,
                details={"by_seed": taught[rule], "in_order_by_seed": plain},
            )
        )
    return rows


def _taught(runs: Sequence[RunData]) -> list[float]:
    """By seed the share of response tokens with an advantage, from the second epoch, when pass rates are
    known.
    """
    return [float(1.0 - run.column("update/skipped")[_first_epoch(run) :].mean()) for run in runs]


def _first_epoch(run: RunData) -> int:
    """Steps until every problem has been asked."""
    return PROBLEMS // run.keys["rollout.prompts_per_step"]


def _passed_over(rule: str, runs: Sequence[RunData]) -> Mapping[str, list[float]]:
    if rule == RULES[0]:
        return {}
    return {
        "passed_over_a_step": [run.mean("curriculum/passed_over") for run in runs],
        "pass_rate_at_last": [float(run.column("curriculum/pass_rate")[-1]) for run in runs],
    }
