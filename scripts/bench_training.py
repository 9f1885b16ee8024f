"""Memory and checkpoints of training: `python scripts/bench_training.py [--policy NAMES]`.

What these cost SmolLM2, or the policies that are named, for the pages of `docs` that say so.
`docs/benchmarks.md` says what each row means; only those of checkpoints are seconds.
"""

import sys
from argparse import Namespace

from rljax.benchmark_runs import Benchmark, Measurement
from training_benchmarks.checkpoint import checkpoint_rows
from training_benchmarks.memory import loading_rows, lora_rows
from workloads import POLICY_OPTION, policies_of

_CASES = (  # the section, what measures it, and its arguments after the policy
    ("checkpoint", checkpoint_rows, (5,)),
    ("loading", loading_rows, (5,)),
    ("lora", lora_rows, ()),
)


def _plan(arguments: Namespace) -> list[Measurement]:
    names = policies_of(arguments)
    return [
        Measurement(section, name, run, (name, *more), section == "checkpoint")
        for section, run, more in _CASES
        for name in names
    ]


BENCHMARK = Benchmark(
    name="training",
    description=__doc__,
    plan=_plan,
    options=POLICY_OPTION,
    packages=("numpy", "orbax-checkpoint", "tensorstore", "safetensors"),
    on_cpu="the figures are a CPU's",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
