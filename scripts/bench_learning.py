"""What a curriculum and a teacher bring: `python scripts/bench_learning.py [--only SECTIONS] [--steps N]`.

`curriculum`: the task of configs/bench_algorithms.yaml with problems that come back, asked in order and by
each rule of `task.curriculum`.
`distillation`: its policy, trained by a larger one on responses of its own, and by the task's reward.

The runs stay in `runs/bench_learning`: started again, it goes on where it was stopped. `docs/tasks.md` and
`docs/algorithms.md` show the results.
"""

import sys
from collections.abc import Sequence

from rljax.benchmark_runs import Benchmark, Measurement
from training_benchmarks.curriculum import curriculum_rows
from training_benchmarks.distillation import distillation_rows

_STEPS, _SEEDS = 40, 2


def _benchmark(steps: int, seeds: int) -> Benchmark:
    what = f"{steps} steps, {seeds} seeds"
    return Benchmark(
        name="learning",
        description=__doc__.splitlines()[0],
        plan=(
            Measurement("curriculum", what, lambda: curriculum_rows(steps, seeds), disturbed=False),
            Measurement("distillation", what, lambda: distillation_rows(steps, seeds), disturbed=False),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(_STEPS, _SEEDS).parser()
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"of each run (default: {_STEPS})")
    parser.add_argument("--seeds", type=int, default=_SEEDS, help=f"runs of each kind (default: {_SEEDS})")
    arguments = parser.parse_args(argv)
    return _benchmark(arguments.steps, arguments.seeds).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
