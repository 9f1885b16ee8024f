"""What ways to train have learned: `python scripts/bench_learning.py [--only SECTIONS] [key=value ...]`.

`algorithms`: every algorithm of `rljax/algorithms/registry.py`. `staleness`: responses of the step's own
weights, of those of the step before, and in the order of arrival with bounded lag, which workers decode;
`time`: steps of the first two, with workers. `curriculum`: problems that come back, asked in order and by
each rule. `distillation`: a policy that a larger one teaches, and the same by reward. `lora`: an adapter, and
all weights. `agents`: responses that agents sample through HTTP, and those of the run itself.

The config is SmolLM2's where a section's ways do not change the task or the policy's shape, else
configs/bench_algorithms.yaml. All start from one warm start a seed, or from the published weights. The runs
stay in `run_dir`, which is runs/learning unless the key is set: started again, it goes on where it was
stopped. `rljax report` draws them. docs/benchmarks.md says where results are.
"""

import sys
from argparse import Namespace
from typing import Any

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError, known_names
from training_benchmarks.learning import EXPERIMENTS, learning_rows


def _plan(arguments: Namespace) -> list[Measurement]:
    return [
        Measurement(section, f"{len(experiment.ways)} ways", _rows, (section, arguments), disturbed=False)
        for section, experiment in EXPERIMENTS.items()
    ]


def _rows(section: str, arguments: Namespace) -> list[Any]:
    ways = arguments.ways.split(",") if arguments.ways else None
    for way in ways or ():
        if way not in EXPERIMENTS[section].ways:
            raise UserError(f"--ways: {way!r} is not one; {known_names(way, EXPERIMENTS[section].ways)}")
    for name in ("steps", "seeds"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise UserError(f"--{name}: {number} is not at least 1")
    file = arguments.config or EXPERIMENTS[section].file
    of_runs = file, arguments.overrides, arguments.steps, arguments.seeds
    return learning_rows(section, *of_runs, ways)


BENCHMARK = Benchmark(
    "learning",
    __doc__,
    _plan,
    packages=("numpy", "optax", "ray", "openai"),
    options={
        "--config": {"metavar": "FILE", "help": "of all runs (default: the section's)"},
        "overrides": {"nargs": "*", "metavar": "key=value", "help": "set keys of the config"},
        "--steps": {"type": int, "metavar": "N", "help": "of each run; default: the section's"},
        "--seeds": {"type": int, "metavar": "N", "help": "of each way; default: the section's"},
        "--ways": {"metavar": "NAMES", "help": "of the section, separated by commas (default: all)"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
