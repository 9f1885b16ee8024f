"""Rollouts with and without drafts: `python scripts/bench_rollout.py [--config FILE] [key=value ...]`.

Trains as the config says, with real updates, and repeats the rollout of every step with the same weights and
noise: plainly, and with every drafter. All of them must sample the same tokens and logprobs, or the benchmark
fails. `docs/benchmarks.md` explains the rows. The default config is SmolLM2's, with SRT's drafts.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError
from rollout_benchmarks.counts import algorithm_rows, draft_length_rows, plot, race_rows
from rollout_benchmarks.rollout import first_step_rows, pass_rows, rollout_rows
from rollout_benchmarks.variants import CONFIGURED, PLAIN, VARIANTS
from workloads import REAL_CONFIG


def _plan(arguments: Namespace) -> list[Measurement]:
    config, names = arguments.config, arguments.variants and [PLAIN, *arguments.variants.split(",")]
    for name in names or ():
        if name not in VARIANTS | CONFIGURED:
            known = [*list(VARIANTS)[1:], *CONFIGURED]
            raise UserError(f"--variants: {name!r} is not one; they are {', '.join(known)}")
    overrides = arguments.overrides
    return [
        Measurement("rollout", "tokens per second", rollout_rows, (config, names)),
        Measurement("pass", "cost of verifying", pass_rows, (config, 5)),
        Measurement("races", "tokens a pass", race_rows, (config,), disturbed=False),
        Measurement("draft_lengths", "tokens a pass", draft_length_rows, (config,), disturbed=False),
        Measurement(
            "algorithms", "tokens a pass", algorithm_rows, (arguments.file, overrides), disturbed=False
        ),
        Measurement("first_step", "seconds until it begins", first_step_rows, (config, 3)),
    ]


def _plot(arguments: Namespace) -> None:
    results = arguments.output or Path("benchmarks/results/draft-lengths.json")
    try:
        rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{results}: holds no results ({error})") from error
    plot(rows, arguments.plot)


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
        },
        "--plot": {"type": Path, "metavar": "FILE", "help": "draw the draft lengths that --output holds"},
    },
    instead={"--plot": _plot},
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
