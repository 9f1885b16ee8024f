"""What simulations are worth on this machine: `python scripts/bench_simulation.py`.

Real runs of the quickstart with one, two and three rollout workers on Ray. The simulator predicts seconds of
a step and each worker's idle share of the last two from what the first one measured, and from the lengths of
the responses (`rljax.simulation.calibration`). The workers share this machine's cores, which is simulated,
too. The runs need a quiet machine: what other processes take is not.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_benchmarks.runs import experiment
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.errors import UserError
from rljax.simulation.calibration import Compared, RecordedRun, compared, read_run, seconds_of

_WORKERS = (2, 3)
_STEPS = 10  # the first is warm-up


def recorded(workers: int) -> RecordedRun:
    """Runs a few steps of the quickstart with so many workers, for which Ray is told to have room."""
    try:
        import ray
    except ImportError as error:
        raise UserError("calibration: needs Ray; pip install 'rljax[cluster]'") from error
    from rljax.training.session import run

    os.environ.setdefault("RAY_worker_niceness", "0")  # as runs have it
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        # A warm start that is long enough for long and short responses.
        steps = (f"training.steps={_STEPS}", "warm_start.steps=150")
        with experiment(f"cluster.workers={workers}", *steps) as config:
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


def calibration_rows() -> list[Row]:
    cores, rows, load = os.cpu_count() or 1, [], os.getloadavg()[0]
    base = recorded(1)
    seconds = dataclasses.asdict(seconds_of(base))
    details = {"cores": cores, "load_before": load, "seconds_with_one_worker": seconds}
    for workers in _WORKERS:
        rows += rows_of(workers, compared(recorded(workers), base, cores), details)
    return rows


BENCHMARK = Benchmark(
    name="simulation",
    description=__doc__.splitlines()[0],
    plan=[Measurement("calibration", "the quickstart with rollout workers", calibration_rows)],
    packages=("ray",),
    disturbance="the runs' own workers are among these; other ones are not predicted",
)


if __name__ == "__main__":
    parser = BENCHMARK.parser()
    parser.set_defaults(output=Path("benchmarks/results/simulation-calibration.json"))
    sys.exit(BENCHMARK.run(parser.parse_args()))
