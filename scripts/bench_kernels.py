"""Speed of the kernels: `python scripts/bench_kernels.py [--only OPS] [--implementation NAMES] [--quick]`.

Every operation of `rljax/kernels` at shapes of real policies: seconds per call, and the achieved share of the
device's copy bandwidth and matrix rate, measured in the same run. Each row compares one implementation with
plain JAX (`xla`). On a CPU only `--quick` makes sense: TPUs' kernels are interpreted there.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import jax

from kernel_benchmarks.cases import OPS, Case, op_cases
from kernel_benchmarks.ceilings import copy_bandwidth, matrix_rate
from kernel_benchmarks.timing import Timed, chosen_functions
from kernel_benchmarks.tuning import tune
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, timed_row
from rljax.errors import UserError, known_names
from rljax.kernels import tuned
from rljax.timing import compare


def case_rows(op: str, case: Case, implementations: Sequence[str], quick: bool) -> list[Row]:
    """Rows of one shape of an operation, one a function."""
    if not quick and jax.default_backend() == "cpu":
        raise UserError("no accelerator here: --quick measures tiny shapes, interpreted")
    calls, repeats, most_sets = (1, 1, 1) if quick else (32, 15, 16)
    timed = Timed(case, chosen_functions(case, implementations, quick), most_sets)
    seconds = timed.seconds(calls, repeats)
    for name, refusal in timed.refused.items():
        print(f"{op}, {case.name}: {name} left out: {refusal}")
    if "xla" not in seconds:
        return []
    rows, (bandwidth, rate) = [], _ceilings(quick)
    for name in [name for name in seconds if name != "xla"] or ["xla"]:
        side = compare(seconds[name], seconds["xla"])
        bytes_per_second, base = case.bytes / side.seconds, side.baseline_seconds
        details = {"sizes": list(case.sizes), "gigabytes_per_second": bytes_per_second / 1e9}
        if timed.cold:
            details["bandwidth_share"] = bytes_per_second / bandwidth
            details["xla_bandwidth_share"] = case.bytes / base / bandwidth
        details |= {
            "teraflops": case.flops / side.seconds / 1e12,
            "matrix_share": case.flops / side.seconds / rate,
            "xla_matrix_share": case.flops / base / rate,
            "temporary_megabytes": timed.temporary_bytes(name) / 1e6,
            "xla_temporary_megabytes": timed.temporary_bytes("xla") / 1e6,
            "copy_gigabytes_per_second": bandwidth / 1e9,
            "matrix_teraflops": rate / 1e12,
        }
        rows.append(timed_row(f"{op}/{case.name}/{name}", side, "xla", "µs", 1e6, **details))
    return rows


def op_rows(op: str, implementations: Sequence[str], quick: bool, cases: int | None = None) -> list[Row]:
    """Returns the rows of one operation, for its first `cases` cases or for all (colab/kernels.ipynb)."""
    chosen = op_cases(op, quick)[:cases]
    return [row for case in chosen for row in case_rows(op, case, implementations, quick)]


@functools.cache
def _ceilings(quick: bool) -> tuple[float, float]:
    """Returns the device's bytes and floating-point operations per second."""
    return copy_bandwidth(8 if quick else 2048), matrix_rate(128 if quick else 8192)


def _plan(arguments: Namespace) -> list[Measurement]:
    names, quick = [name for name in arguments.implementation.split(",") if name], arguments.quick
    known = {name: None for op in OPS for name in op_cases(op, quick=True)[0].functions}
    for name in names:
        if name not in known:
            raise UserError(f"--implementation: {name!r} is not one; {known_names(name, known)}")
    return [
        Measurement(op, case.name, case_rows, (op, case, names, quick))
        for op in OPS
        for case in op_cases(op, quick)
        if chosen_functions(case, names, quick)
    ]


def _tune(arguments: Namespace) -> None:
    print(*tune(arguments.tune, tuned.TABLE), f"written: {tuned.TABLE}", sep="\n")


BENCHMARK = Benchmark(
    name="kernels",
    description=__doc__,
    plan=_plan,
    options={
        "--quick": {
            "action": "store_true",
            "help": "tiny shapes and few repeats: a look at a CPU, where kernels are interpreted",
        },
        "--implementation": {
            "default": "",
            "metavar": "NAMES",
            "help": "separated by commas, of the operations that have them; default: all of the device",
        },
        "--tune": {
            "nargs": "+",
            "type": Path,
            "metavar": "FILE",
            "help": f"measure nothing: take these results up into {tuned.TABLE.name}, the table of defaults",
        },
    },
    instead={"--tune": _tune},
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
