"""A policy trained by a teacher on its own responses, against the same one trained by the task's reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.benchmarking import Row
from rljax.reports.runs import RunData
from training_benchmarks.curves import CONFIG, learning_row, train_to_end

# A larger policy than the student, warmed up for longer, and on demonstrations without slips.
_TEACHER = (
    "policy.shape.hidden_size=192",
    "policy.shape.num_layers=4",
    "policy.shape.mlp_size=576",
    "task.args={max_terms: 8, max_number: 3, demonstration_noise: 0}",
    "warm_start.steps=600",
    "training.steps=1",
    "tracking.report=false",
)
_WAYS: Mapping[str, tuple[str, ...]] = {
    "reward": ("algorithm.name=grpo",),
    "teacher": ("algorithm.name=distillation", "algorithm.kl_coefficient=1.0"),
}
"""The overrides of each way to train; the first is the baseline."""


def distillation_rows(steps: int, seeds: int, overrides: Sequence[str] = ()) -> list[Row]:
    """Trains a teacher, and the student both ways; a run that is there goes on, or is only read.

    Args:
      steps: steps of each of the student's runs.
      seeds: runs of each way.
      overrides: keys of the config, for all.
    """
    directory = Path("runs/bench_learning")
    shared = (f"run_dir={directory}", *overrides)
    teacher = train_to_end(CONFIG, [*shared, *_TEACHER], "teacher")
    teachers = f"algorithm.teacher={directory / 'teacher'}"
    found: dict[str, list[RunData]] = {way: [] for way in _WAYS}
    for seed in range(seeds):
        for way, keys in _WAYS.items():
            run = [*shared, f"training.steps={steps}", "tracking.report=false", f"seed={seed}", *keys]
            if way == "teacher":
                run.append(teachers)
            found[way].append(train_to_end(CONFIG, run, f"distillation-{way}-seed{seed}"))
    return rows_of(teacher, found)


def rows_of(teacher: RunData, found: Mapping[str, Sequence[RunData]]) -> list[Row]:
    """Returns the rows of finished runs: held-out rewards of each way, and the KL to the teacher at the end
    against that at the start.
    """
    best = {"teachers_heldout": teacher.evaluations[0]["evaluation/reward"]}
    rows = [learning_row(f"distillation/{way}/held-out", runs, best) for way, runs in found.items()]
    first, last = (
        sum(float(run.column("teacher/kl")[step]) for run in found["teacher"]) / len(found["teacher"])
        for step in (0, -1)
    )
    rows.append(
        Row(
            name="distillation/teacher/KL to the teacher",
            value=last,
            unit="nats/token",
            baseline="first step",
            baseline_value=first,
            ratio=first / last,
            details={"by_step": [run.column("teacher/kl").tolist() for run in found["teacher"]]},
        )
    )
    return rows
