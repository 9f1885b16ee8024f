"""Training through HTTP: `python scripts/bench_endpoints.py [--only SECTIONS] [--steps N]`.

`agents`: a run whose responses outside agents sample from its server, against one that samples them itself.
`judge`: seconds to judge a step's responses at an endpoint, several at a time and from its cache, against one
by one; the endpoint is a stand-in that only waits.

The runs stay in `runs/bench_endpoints`: started again, it goes on where it was stopped. `docs/agents.md` and
`docs/tasks.md` show the results.
"""

import sys
from collections.abc import Sequence

from rljax.benchmark_runs import Benchmark, Measurement
from training_benchmarks.agent import agent_rows
from training_benchmarks.judge import judge_rows

_STEPS = 25


def _benchmark(steps: int) -> Benchmark:
    return Benchmark(
        name="endpoints",
        description=__doc__.splitlines()[0],
        plan=(
            Measurement("agents", f"{steps} steps", lambda: agent_rows(steps)),
            Measurement("judge", "128 responses", lambda: judge_rows(128)),
        ),
        packages=("openai",),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(_STEPS).parser()
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"of each run (default: {_STEPS})")
    arguments = parser.parse_args(argv)
    return _benchmark(arguments.steps).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
