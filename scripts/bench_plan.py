"""Compare plans with runs on this CPU: `python scripts/bench_plan.py [--config FILE] [key=value ...]`.

`passes` times decode steps and verifying passes, `update` the gradients of a micro-batch and its memory,
`run` the memory of a whole run of one step: rollout, update and checkpoint. The config is SmolLM2's unless
another is named, and weights that are not here are random. Figures of the CPU are measured right before
(`rljax/planning/hardware.py`).

`--break-even FILE` draws what drafts must bring and measures nothing: `--results` names what `--only passes`
and `plan.py --json` wrote.
"""

import functools
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


from planning_benchmarks import decoding_rows, plot, run_rows, update_rows
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.config import ExperimentConfig
from rljax.engine.number_type import with_number_type
from rljax.errors import UserError
from rljax.planning.planner import Plan, default_lengths, make_plan
from rljax.planning.topologies import parse_topology
from workloads import REAL_CONFIG


def _plan(arguments: Namespace) -> list[Measurement]:
    file, overrides = arguments.file, arguments.overrides

    @functools.cache
    def planned() -> tuple[ExperimentConfig, Plan]:
        config = with_number_type(arguments.config)
        plan = make_plan(config, parse_topology("cpu:1"), default_lengths(config, None, None, 0.8))
        flops, bandwidth = plan.hardware.flops[config.policy.compute_dtype], plan.hardware.bandwidth
        print(json.dumps({"GFLOP/s": round(flops / 1e9, 1), "GB/s": round(bandwidth / 1e9, 2)}), flush=True)
        return config, plan

    return [
        Measurement("passes", file, lambda: decoding_rows(*planned())),
        Measurement("update", file, lambda: update_rows(*planned())),
        Measurement("run", file, lambda: run_rows(file, overrides, planned()[1]), disturbed=False),
    ]


def _draw(arguments: Namespace) -> None:
    if not arguments.results:
        raise UserError("--break-even: name what to draw by --results")
    plot(arguments.results, arguments.break_even)


BENCHMARK = Benchmark(
    "plan",
    __doc__,
    _plan,
    packages=("jax",),
    config=REAL_CONFIG,
    options={
        "--break-even": {"type": Path, "metavar": "FILE", "help": "draw, and measure nothing"},
        "--results": {"type": Path, "nargs": "+", "metavar": "JSON", "help": "to draw from, a panel each"},
    },
    instead={"--break-even": _draw},
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
