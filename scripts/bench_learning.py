"""What ways to train have learned: `python scripts/bench_learning.py [--only SECTIONS] [key=value ...]`.

The config is SmolLM2's where a section's ways do not change the task or the policy's shape, else
configs/bench_algorithms.yaml. All start from one warm start a seed, or from the published weights. The runs
stay in `run_dir`, which is runs/learning unless the key is set: started again, it goes on where it was
stopped. `rljax report` draws them. docs/benchmarks.md says where results are.
"""

import dataclasses
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.algorithms.registry import ALGORITHMS, NEED_TEACHER
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig, load_config
from rljax.errors import Interrupted, UserError, known_names
from rljax.reports.runs import RunData, read_run
from rljax.training import session
from workloads import REAL_CONFIG

Found = Mapping[str, Sequence[RunData]]
"""Finished runs, by way one a seed."""


def train_to_end(config: ExperimentConfig) -> RunData:
    """Trains a run, from where an earlier call stopped; returns the results of a finished run at once."""
    path = Path(config.run_dir)
    steps = read_run(path).steps if (path / "metrics.jsonl").exists() else []
    if not steps or steps[-1]["step"] < config.training.steps:
        session.run(config)
    return read_run(path)


# --- rows ------------------------------------------------------------------------------------------------

_DETAILS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "rollout_kl": ("policy/rollout_kl", np.nanmean),
    "lag_mean": ("rollout/lag_mean", np.nanmean),
    "passed_over_a_step": ("curriculum/passed_over", np.nanmean),
    "pass_rate_at_last": ("curriculum/pass_rate", lambda column: column[-1]),
    "explained_variance_at_last": ("critic/explained_variance", lambda column: column[-1]),
    "groups_sampled": ("rollout/groups_sampled", np.nansum),
    "accepted_drafts": ("speculation/accepted", np.nansum),
    "seconds_of_updates": ("time/update", np.nansum),
}
"""Of a row whose runs have the metric: a number a seed, from those of all steps."""


def learning_row(name: str, runs: Sequence[RunData], **details: Any) -> Row:
    """Returns a row of what runs of several seeds have learned: held-out reward after, against before."""
    before, after = ([run.evaluations[i]["evaluation/reward"] for run in runs] for i in (0, -1))
    first, last = ([float(run.column("entropy")[i]) for run in runs] for i in (0, -1))
    shared: dict[str, Any] = {
        "steps": len(runs[0].steps),
        "seeds": len(runs),
        "before": before,
        "after": after,
        "reward_by_step": [run.column("reward/mean").tolist() for run in runs],
        "entropy_at_first": first,
        "entropy_at_last": last,
        "clip_fraction": [
            run.mean("policy/clip_fraction_low") + run.mean("policy/clip_fraction_high") for run in runs
        ],
        "mismatch_logprob_abs_max": max(float(run.column("mismatch/logprob_abs_max").max()) for run in runs),
        "commits": sorted({result["commit"] or "unknown" for run in runs for result in run.sessions}),
    }
    for detail, (metric, of) in _DETAILS.items():
        if runs[0].has(metric):
            shared[detail] = [float(of(run.column(metric))) for run in runs]
    if "lag_mean" in shared:
        shared["lag_max"] = max(float(run.column("rollout/lag_max").max()) for run in runs)
    means = float(np.mean(after)), float(np.mean(before))
    return counted_row(name, *means, "reward", "before RL", **(shared | details))


def heldout_rows(name: str, found: Found, **details: Any) -> list[Row]:
    """Returns a row of each way, of this name with the way's in it."""
    return [learning_row(name.format(way), runs, **details) for way, runs in found.items()]


def time_rows(found: Found) -> list[Row]:
    """The row of the median seconds of a step with staleness, against those without, with as many workers."""
    sides = [runs[0] for runs in (found["1"], found["0"])]
    seconds = {
        name: [float(np.median(run.column(f"time/{name}")[1:])) for run in sides]
        for name in ("step", "rollout", "update")
    }
    shares, steps = [run.mean("cluster/idle_share") for run in sides], len(sides[0].steps)
    details = {"idle_share": shares, "seconds": seconds, "steps": steps}
    name = "staleness/step with 2 workers"
    return [counted_row(name, *seconds["step"], "s", "staleness 0", less=True, **details)]


_PROBLEMS = 128  # of the task in the comparison of curricula


def curriculum_rows(found: Found) -> list[Row]:
    """The rows of what was learned by each rule, and of the share of sampled tokens that are learned from
    (those with an advantage, from the second epoch on, when pass rates are known), against asking in order.
    """
    rows = heldout_rows("curriculum/{}/held-out", found)
    taught = {}
    for rule, runs in found.items():
        epoch = [_PROBLEMS // run.keys["rollout.prompts_per_step"] for run in runs]  # steps
        taught[rule] = [
            float(1.0 - run.column("update/skipped")[first:].mean())
            for run, first in zip(runs, epoch, strict=True)
        ]
    plain = taught.pop("none")
    for rule, shares in taught.items():
        both, name = (float(np.mean(shares)), float(np.mean(plain))), f"curriculum/{rule}/tokens that teach"
        seeds = {"by_seed": shares, "in_order_by_seed": plain}
        rows.append(counted_row(name, *both, "share", "problems in order", **seeds))
    return rows


def distillation_rows(found: Found) -> list[Row]:
    """The rows of the held-out rewards of each way, and of the KL to the teacher at the end against that at
    the start.
    """
    best = {"teachers_heldout": found["the teacher"][0].evaluations[0]["evaluation/reward"]}
    ways = {way: runs for way, runs in found.items() if way != "the teacher"}
    rows = heldout_rows("distillation/{}/held-out", ways, **best)
    by_step = [run.column("teacher/kl").tolist() for run in ways["teacher"]]
    last, first = (sum(kl[step] for kl in by_step) / len(by_step) for step in (-1, 0))
    name = "distillation/teacher/KL to the teacher"
    return [*rows, counted_row(name, last, first, "nats/token", "first step", less=True, by_step=by_step)]


def lora_rows(found: Found) -> list[Row]:
    """The row of the reward with LoRA, against that of training all weights."""
    adapter, whole = (learning_row("", found[way]) for way in ("LoRA", "all weights"))
    details = adapter.details | {
        "baseline_seconds_of_updates": whole.details["seconds_of_updates"],
        "heldout": {
            way: [[line["step"], line["evaluation/reward"]] for line in runs[0].evaluations]
            for way, runs in found.items()
        },
    }
    return [counted_row("lora/0.8M", adapter.value, whole.value, "reward", "all weights", **details)]


def agent_rows(found: Found) -> list[Row]:
    """The rows of tokens a second of rollouts, and of the held-out reward at the end."""
    (plain,), (agents,) = found["in the run"], found["agents"]
    rates = [
        float(np.sum(run.column("rollout/tokens")[1:]) / np.sum(run.column("time/rollout")[1:]))
        for run in (agents, plain)
    ]
    learned, alone = learning_row("", [agents]), learning_row("", [plain])
    counts = {name: agents.mean(f"agents/{name}") for name in ("requests", "sequences")}
    heldout = learned.value, alone.value
    return [
        counted_row("agents/tokens", *rates, "tokens/s", "in the run", **counts),
        counted_row("agents/held-out", *heldout, "reward", "in the run", **learned.details),
    ]


# --- the table -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Ways to train that are compared."""

    ways: Mapping[str, Sequence[str]]  # keys of the config by way
    rows: Callable[[Found], list[Row]]  # of finished runs
    file: str = "configs/bench_algorithms.yaml"
    keys: Sequence[str] = ()  # of the config, for all ways
    seeds: int = 1  # of every way, by default
    steps: int | None = None  # of every run; None for the config's


_EXACT = "task.rewards=[{name: exact, args: {answer_in: marker, marker: '#'}}]"
EXPERIMENTS = {
    "algorithms": Experiment(
        {name: (f"algorithm.name={name}",) for name in ALGORITHMS if name not in NEED_TEACHER},
        functools.partial(heldout_rows, "algorithms/{}"),
        REAL_CONFIG,
        seeds=3,
    ),
    "staleness": Experiment(
        {
            "0": (),
            "1": ("rollout.staleness=1",),
            "at-most-2": ("rollout.max_staleness=2", "cluster.workers=2"),
        },
        functools.partial(heldout_rows, "staleness/{}"),
        REAL_CONFIG,
        seeds=3,
    ),
    "time": Experiment(  # of steps, with and without staleness
        {"0": (), "1": ("rollout.staleness=1",)},
        time_rows,
        REAL_CONFIG,
        ("cluster.workers=2", "evaluation.problems=0"),
    ),
    # Chains of 2 to 12 terms, as many of each length, and a reward of 0 or 1: some problems are nearly always
    # solved, some nearly never. Without a KL penalty, groups that are all right or all wrong have no
    # gradient, and are left out of the update.
    "curriculum": Experiment(
        {rule: (f"task.curriculum={rule}",) for rule in ("none", "failures", "uncertain")},
        curriculum_rows,
        keys=(
            f"task.problems={_PROBLEMS}",
            "task.args={max_terms: 12, max_number: 3, tail_exponent: 0}",
            _EXACT,
            "algorithm.kl_coefficient=0",
        ),
        seeds=2,
        steps=40,
    ),
    # The teacher is larger than the student, warmed up for longer, and on demonstrations without slips.
    "distillation": Experiment(
        {
            "the teacher": (
                *("policy.shape.hidden_size=192", "policy.shape.num_layers=4", "policy.shape.mlp_size=576"),
                "task.args={max_terms: 8, max_number: 3, demonstration_noise: 0}",
                *("warm_start.steps=600", "training.steps=1"),
            ),
            "reward": ("algorithm.name=grpo",),
            "teacher": (
                "algorithm.name=distillation",
                "algorithm.kl_coefficient=1.0",
                "algorithm.teacher={run_dir}/distillation-the-teacher-seed0",
            ),
        },
        distillation_rows,
        seeds=2,
        steps=40,
    ),
    # LoRA's rate is about ten times that of all weights, as adapters want.
    "lora": Experiment(
        {
            "all weights": ("optimizer.learning_rate=1e-4",),
            "LoRA": ("policy.lora={rank: 16, alpha: 32}", "optimizer.learning_rate=1e-3"),
        },
        lora_rows,
        steps=25,
    ),
    "agents": Experiment(
        {"in the run": (), "agents": ("agents={agent: 'training_benchmarks.agent:solve', parallel: 8}",)},
        agent_rows,
        keys=(_EXACT,),  # one reward either way: the answer behind the last marker
        steps=25,
    ),
}


def config_of(section: str, way: str, seed: int, file: str, overrides: Sequence[str]) -> ExperimentConfig:
    """Returns the config of one run: `file` with keys of the experiment and the way, then `overrides`."""
    experiment = EXPERIMENTS[section]
    base = load_config(file, ["run_dir=runs/learning", *overrides]).run_dir
    keys = [*experiment.keys, f"seed={seed}", "tracking.report=false"]
    keys += [] if experiment.steps is None else [f"training.steps={experiment.steps}"]
    keys += [key.replace("{run_dir}", base) for key in experiment.ways[way]]
    config = load_config(file, [*keys, *overrides])
    return config.model_copy(update={"run_dir": f"{base}/{section}-{way.replace(' ', '-')}-seed{seed}"})


# --- the command line --------------------------------------------------------------------------------------


def _plan(arguments: Namespace) -> list[Measurement]:
    return [
        Measurement(section, f"{len(experiment.ways)} ways", _rows, (section, arguments), disturbed=False)
        for section, experiment in EXPERIMENTS.items()
    ]


def _rows(section: str, arguments: Namespace) -> list[Row]:
    """Trains the ways of an experiment, or some of them, from the seeds; returns its rows."""
    experiment = EXPERIMENTS[section]
    ways = arguments.ways.split(",") if arguments.ways else experiment.ways
    for way in ways:
        if way not in experiment.ways:
            raise UserError(f"--ways: {way!r} is not one; {known_names(way, experiment.ways)}")
    if arguments.seeds is not None and arguments.seeds < 1:
        raise UserError(f"--seeds: {arguments.seeds} is not at least 1")
    file, found = arguments.config or experiment.file, {way: [] for way in ways}
    for seed in range(arguments.seeds or experiment.seeds):
        for way, runs in found.items():
            if way == "the teacher" and seed:
                continue
            try:
                runs.append(train_to_end(config_of(section, way, seed, file, arguments.overrides)))
            except Interrupted as interrupted:
                raise KeyboardInterrupt from interrupted
    return experiment.rows(found)


BENCHMARK = Benchmark(
    "learning",
    __doc__,
    _plan,
    packages=("numpy", "optax", "ray", "openai"),
    options={
        "--config": {"metavar": "FILE", "help": "of all runs (default: the section's)"},
        "overrides": {"nargs": "*", "metavar": "key=value", "help": "set keys of the config"},
        "--seeds": {"type": int, "metavar": "N", "help": "of each way; default: the section's"},
        "--ways": {"metavar": "NAMES", "help": "of the section, separated by commas (default: all)"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
