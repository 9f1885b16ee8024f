"""What simulations are worth on this machine: `python scripts/bench_simulation.py [key=value ...]`.

Real runs of a config, SmolLM2's by default, with one, two and three rollout workers on Ray. The simulator
predicts seconds of a step and each worker's idle share of the last two from what the first one measured, and
from the lengths of the responses (`rljax.simulation.calibration`). The workers share this machine's cores,
which is simulated, too. The runs need a quiet machine: what other processes take is not.
"""

import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from cluster_benchmarks.runs import experiment
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.errors import UserError
from rljax.simulation.calibration import Compared, RecordedRun, compared, read_run, seconds_of
from workloads import REAL_CONFIG

_WORKERS = (2, 3)
_STEPS = 10  # the first is warm-up


def recorded(file: str, keys: Sequence[str], workers: int) -> RecordedRun:
    """Runs a few steps of a config with so many workers, for which Ray is told to have room."""
    try:
        import ray
    except ImportError as error:
        raise UserError("calibration: needs Ray; pip install 'rljax[cluster]'") from error
    from rljax.training.session import run

    os.environ.setdefault("RAY_worker_niceness", "0")  # as runs have it
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        with experiment(f"training.steps={_STEPS}", *keys, f"cluster.workers={workers}", file=file) as config:
            run(config)
            return read_run(config.run_dir)
    finally:
        ray.shutdown()


def rows_of(workers: int, figures: Sequence[Compared], details: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"{workers} workers/{each.name}",
            each.predicted,
            each.unit,
            "measured",
            each.measured,
            each.ratio,
            {"agrees": each.agrees, **details},
        )
        for each in figures
    ]


def calibration_rows(file: str, keys: Sequence[str]) -> list[Row]:
    cores, rows, load = os.cpu_count() or 1, [], os.getloadavg()[0]
    base = recorded(file, keys, 1)
    seconds = dataclasses.asdict(seconds_of(base))
    details = {"cores": cores, "load_before": load, "seconds_with_one_worker": seconds}
    for workers in _WORKERS:
        rows += rows_of(workers, compared(recorded(file, keys, workers), base, cores), details)
    return rows


def _plan(arguments: Namespace) -> list[Measurement]:
    of_runs = arguments.file, arguments.overrides
    return [Measurement("calibration", "runs with rollout workers", calibration_rows, of_runs)]


BENCHMARK = Benchmark(
    name="simulation",
    description=__doc__,
    plan=_plan,
    packages=("ray",),
    config=REAL_CONFIG,
    disturbance="the runs' own workers are among these; other ones are not predicted",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
