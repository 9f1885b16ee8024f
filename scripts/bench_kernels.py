"""Speed of the kernels: `python scripts/bench_kernels.py [--op OPS] [--implementation NAMES] [--quick]`.

Every operation of `rljax/kernels` at shapes of real policies: seconds a call, and what share of the copy
bandwidth and matrix rate of the device, measured in the same run, that amounts to. Each row compares one way
to compute with plain JAX (`xla`). On a CPU only `--quick` makes sense: kernels are interpreted there.
"""

import importlib
import sys
from collections.abc import Sequence

import jax

from kernel_benchmarks.case import Case
from kernel_benchmarks.ceilings import copy_bandwidth, matrix_rate
from kernel_benchmarks.timing import Timed, chosen_functions
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, compare

OPS = ("noisy_argmax", "token_logprobs", "tree_attention", "quantized_product", "compaction")


def op_rows(op: str, implementations: Sequence[str], quick: bool) -> list[Row]:
    """Rows of one operation: every case, every function."""
    module = importlib.import_module(f"kernel_benchmarks.{op}")
    bandwidth = copy_bandwidth(64 if quick else 2048)
    rate = matrix_rate(512 if quick else 8192)
    calls, repeats, most_sets = (1, 1, 1) if quick else (32, 15, 16)
    rows = []
    for case in module.cases(quick):
        timed = Timed(case, chosen_functions(case, implementations, quick), most_sets)
        seconds = timed.seconds(calls, repeats)
        for name, refusal in timed.refused.items():
            print(f"{op}, {case.name}: {name} left out: {refusal}")
        rows += [
            _row(op, case, name, seconds, bandwidth, rate)
            for name in timed.functions
            if name != "xla" or len(timed.functions) == 1
        ]
    return rows


def _row(
    op: str, case: Case, name: str, seconds: dict[str, list[float]], bandwidth: float, rate: float
) -> Row:
    side = compare(seconds[name], seconds["xla"])
    bytes_per_second, flops = case.bytes / side.seconds, case.flops / side.seconds
    base = side.baseline_seconds
    return Row(
        f"{op}/{case.name}/{name}",
        side.seconds * 1e6,
        "µs",
        "xla",
        base * 1e6,
        side.ratio,
        {
            "gigabytes_per_second": bytes_per_second / 1e9,
            "bandwidth_share": bytes_per_second / bandwidth,
            "teraflops": flops / 1e12,
            "matrix_share": flops / rate,
            "xla_bandwidth_share": case.bytes / base / bandwidth,
            "xla_matrix_share": case.flops / base / rate,
            "copy_gigabytes_per_second": bandwidth / 1e9,
            "matrix_teraflops": rate / 1e12,
        },
    )


def benchmark(implementations: Sequence[str], ops: Sequence[str] = OPS) -> Benchmark:
    """What this script measures."""

    def plan(quick: bool) -> list[Measurement]:
        what = "tiny" if quick else "real policies"
        return [Measurement(op, what, lambda op=op: op_rows(op, implementations, quick)) for op in ops]

    return Benchmark(
        name="kernels",
        description=__doc__.splitlines()[0],
        plan=plan(False),
        quick_plan=plan(True),
        quick_help="tiny shapes and few repeats: a look at a CPU, where kernels are interpreted",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = benchmark(()).parser()
    parser.add_argument("--op", dest="only", metavar="OPS", help="the same as --only")
    parser.add_argument(
        "--implementation",
        default="",
        metavar="NAMES",
        help="separated by commas; default: all of the device",
    )
    arguments = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and not arguments.quick:
        parser.error("no accelerator here: --quick measures tiny shapes, interpreted")
    return benchmark([name for name in arguments.implementation.split(",") if name]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
