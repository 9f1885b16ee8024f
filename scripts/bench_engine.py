"""Speed of the plain engine and of the update: `python scripts/bench_engine.py [--policy NAMES]`.

The policy is SmolLM2 unless others are named. Both sides run in one process, in alternation, on the same
weights and sequences, and are checked in float32 to compute the same results before anything is timed.
`docs/benchmarks.md` explains the rows.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from engine_benchmarks import steps
from engine_benchmarks.decode import decode_rows
from engine_benchmarks.rows import row_invariance_rows
from engine_benchmarks.update import shared_prompt_rows, update_rows
from rljax.benchmark_runs import Benchmark, Measurement
from workloads import POLICY_OPTION, import_reference, policies_of


def prepare(sections: Sequence[str]) -> None:
    """Raises an error for an impossible comparison, before minutes of measurements."""
    if {"decode", "bfloat16", "update"} & set(sections):
        import_reference()


_CASES = (  # the section, what measures it, and its arguments after the policy
    # By batch: new tokens of each response, and rounds.
    ("decode", decode_rows, ({1: (128, 5), 8: (128, 3), 64: (128, 3)},)),
    ("bfloat16", decode_rows, ({1: (128, 3), 8: (128, 3), 32: (128, 3)}, "bfloat16")),
    ("update", update_rows, (3,)),
    ("update", shared_prompt_rows, (3,)),
    ("self_draft", steps.self_draft_rows, ((1, 8), 5)),
    ("companion", steps.companion_rows, (2, (2, 8), 9)),
    ("price", steps.price_rows, (7, 8)),
    ("blocks", steps.block_rows, (9,)),
    ("loops", steps.loop_rows, (16, 9)),
    ("sampling", steps.sampling_rows, (8, 16, 10)),
)


def _plan(arguments: Namespace) -> list[Measurement]:
    names = policies_of(arguments)
    return [
        Measurement(section, name, run, (name, *given)) for section, run, given in _CASES for name in names
    ] + [Measurement("rows", "bits", row_invariance_rows, (names,), disturbed=False)]


BENCHMARK = Benchmark(
    name="engine",
    description=__doc__,
    plan=_plan,
    options=POLICY_OPTION,
    packages=("torch", "transformers"),
    prepare=prepare,
    disturbance="threads that wait for each other suffer most, above all PyTorch's",
    on_cpu="PyTorch on the CPU",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
