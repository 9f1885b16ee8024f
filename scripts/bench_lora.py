"""LoRA against training all weights: `python scripts/bench_lora.py [--only SECTIONS] [--steps N]`.

`memory`: arrays that are held, temporaries of the compiled update, and the peak of a process that updates.
`learning`: configs/bench_algorithms.yaml, both ways from one warm start. The runs stay in `runs/bench_lora`:
started again, it goes on where it was stopped. `docs/lora.md` shows the results.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError
from training_benchmarks.lora_learning import learning_rows
from training_benchmarks.lora_memory import UPDATES, memory_rows, peak_of_updates
from training_benchmarks.policies import POLICIES

_STEPS = 25  # those of the algorithms' curves


def _benchmark(steps: int) -> Benchmark:
    return Benchmark(
        name="lora",
        description=__doc__.splitlines()[0],
        plan=(
            Measurement(
                "memory",
                "100M, 2 x 512 tokens",
                lambda: memory_rows("100M", POLICIES["100M"]),
                disturbed=False,
            ),
            Measurement("learning", f"{steps} steps", lambda: learning_rows(steps), disturbed=False),
        ),
        prepare=_prepare,
    )


def _prepare(sections: Sequence[str]) -> None:
    """Raises an error on an accelerator, for any sections."""
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, the figures are a CPU's: set JAX_PLATFORMS=cpu"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(_STEPS).parser()
    parser.add_argument("--steps", type=int, default=_STEPS, help="of each run that learns (default: 25)")
    parser.add_argument("--updates", nargs=2, metavar=("POLICY", "WHAT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.updates:
        policy, what = arguments.updates
        print(peak_of_updates(POLICIES[policy], UPDATES[what]))
        return 0
    return _benchmark(arguments.steps).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
