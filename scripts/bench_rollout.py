"""Rollouts with and without drafts: `python scripts/bench_rollout.py [--config FILE] [key=value ...]`.

Trains as the config says, with real updates, and repeats the rollout of every step with the same weights and
noise: plainly, and with every drafter. All of them must sample the same tokens and logprobs, or the benchmark
fails. `docs/benchmarks.md` explains the rows. The default config is SmolLM2's, with SRT's drafts.
"""

import sys
from argparse import Namespace

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError
from rollout_benchmarks.costs import first_step_rows, pass_rows
from rollout_benchmarks.races import race_rows
from rollout_benchmarks.rollout import rollout_rows
from rollout_benchmarks.variants import CONFIGURED, PLAIN, VARIANTS
from workloads import REAL_CONFIG


def _plan(arguments: Namespace) -> list[Measurement]:
    config, names = arguments.config, arguments.variants and [PLAIN, *arguments.variants.split(",")]
    for name in names or ():
        if name not in VARIANTS | CONFIGURED:
            known = [*list(VARIANTS)[1:], *CONFIGURED]
            raise UserError(f"--variants: {name!r} is not one; they are {', '.join(known)}")
    return [
        Measurement("rollout", "tokens per second", rollout_rows, (config, names)),
        Measurement("pass", "cost of verifying", pass_rows, (config, 5)),
        Measurement("races", "tokens a pass", race_rows, (config,), disturbed=False),
        Measurement("first_step", "seconds until it begins", first_step_rows, (config, 3)),
    ]


BENCHMARK = Benchmark(
    "rollout",
    __doc__,
    _plan,
    config=REAL_CONFIG,
    settings=("speculation.drafter=srt",),
    options={
        "--variants": {
            "metavar": "NAMES",
            "help": "drafters, separated by commas (default: all but those that need a device of their own,"
            " or policy.shape where it is null)",
        }
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
