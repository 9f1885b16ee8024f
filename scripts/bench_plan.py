"""Compare plans with runs on this CPU: `python scripts/bench_plan.py [--config FILE] [key=value ...]`.

`passes` times decode steps and verifying passes, `update` the gradients of a micro-batch and its memory,
`run` the memory of a whole run of one step: rollout, update and checkpoint. The policy has random weights.
Figures of the CPU are measured right before (`rljax/planning/hardware.py`).
"""

import functools
import json
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from planning_benchmarks.comparisons import decoding_rows, update_rows
from planning_benchmarks.whole_run import run_rows
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.config import ExperimentConfig, load_config, with_compute_dtype
from rljax.planning.planner import Plan, default_lengths, make_plan
from rljax.planning.topologies import parse_topology

CONFIG = "configs/quickstart.yaml"


def _planned(config: ExperimentConfig) -> Plan:
    plan = make_plan(config, parse_topology("cpu:1"), default_lengths(config, None, None, 0.8))
    flops, bandwidth = plan.hardware.flops[config.policy.compute_dtype], plan.hardware.bandwidth
    print(json.dumps({"GFLOP/s": round(flops / 1e9, 1), "GB/s": round(bandwidth / 1e9, 2)}), flush=True)
    return plan


def _benchmark(path: str, overrides: Sequence[str]) -> Benchmark:
    @functools.cache
    def config() -> ExperimentConfig:
        return with_compute_dtype(load_config(path, list(overrides)), "cpu")

    @functools.cache
    def planned() -> Plan:
        return _planned(config())

    plan = (
        Measurement("passes", path, lambda: decoding_rows(config(), planned())),
        Measurement("update", path, lambda: update_rows(config(), planned())),
        Measurement("run", path, lambda: run_rows(path, overrides, planned()), disturbed=False),
    )
    return Benchmark(
        "plan", __doc__.splitlines()[0], plan, packages=("jax",), prepare=lambda sections: config() and None
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(CONFIG, ()).parser()
    parser.add_argument("--config", default=CONFIG, metavar="FILE", help=f"default: {CONFIG}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    return _benchmark(arguments.config, arguments.overrides).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
