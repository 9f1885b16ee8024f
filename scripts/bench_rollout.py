"""Rollouts with and without drafts: `python scripts/bench_rollout.py [--config FILE] [key=value ...]`.

Trains as the config says, with real updates, and repeats the rollout of every step with the same weights and
noise: plainly, and with every drafter. All of them must sample the same tokens and logprobs, or the benchmark
fails. `docs/benchmarks.md` explains the rows.
"""

import sys
from collections.abc import Sequence

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.config import ExperimentConfig, load_config
from rljax.errors import UserError
from rollout_benchmarks.ahead import ahead_rows
from rollout_benchmarks.first_step import first_step_rows
from rollout_benchmarks.lossless import lossless_rows
from rollout_benchmarks.passes import pass_rows
from rollout_benchmarks.races import race_rows
from rollout_benchmarks.rollout import rollout_rows
from rollout_benchmarks.strategies import strategy_rows
from rollout_benchmarks.variants import BESIDE, PLAIN, VARIANTS

_CONFIG = "configs/bench_long_tail.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(None, list(VARIANTS)).parser()
    parser.add_argument(
        "--config", default=_CONFIG, metavar="FILE", help=f"the workload (default: {_CONFIG})"
    )
    parser.add_argument(
        "--variants",
        default=",".join(name for name in VARIANTS if name not in {PLAIN, *BESIDE}),
        help="drafters, separated by commas (default: all but those that need a device of their own)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    names = [PLAIN, *arguments.variants.split(",")]
    try:
        for name in names:
            if name not in VARIANTS:
                raise UserError(f"--variants: {name!r} is not one; they are {', '.join(list(VARIANTS)[1:])}")
        config = load_config(arguments.config, arguments.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _benchmark(config, names).run(arguments)


def _benchmark(config: ExperimentConfig | None, names: Sequence[str]) -> Benchmark:
    return Benchmark(
        "rollout",
        __doc__.splitlines()[0],
        (
            Measurement("rollout", "tokens per second", lambda: rollout_rows(config, names)),
            Measurement("strategies", "each always", lambda: strategy_rows(config, training_steps=4)),
            Measurement("pass", "cost of verifying", lambda: pass_rows(config, repeats=5)),
            Measurement(
                "ahead", "tokens a pass", lambda: ahead_rows(config, (1e-6, 1e-5, 1e-4, 1e-3), steps=4), False
            ),
            Measurement("races", "tokens a pass", lambda: race_rows(config), disturbed=False),
            Measurement("first_step", "seconds until it begins", lambda: first_step_rows(config, repeats=3)),
            Measurement(
                "lossless", "tokens compared", lambda: lossless_rows(config, steps=12), disturbed=False
            ),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
