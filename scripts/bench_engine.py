"""Speed of the plain engine and of the update: `python scripts/bench_engine.py [--quick] [--only SECTIONS]`.

Both sides run in one process, in alternation, on the same float32 weights and sequences, and are checked to
compute the same results before anything is timed. `docs/benchmarks.md` explains the rows.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from engine_benchmarks.bandwidth import bandwidth_rows
from engine_benchmarks.blocks import block_rows
from engine_benchmarks.companion import companion_rows
from engine_benchmarks.decode import decode_rows
from engine_benchmarks.policies import POLICIES, import_reference
from engine_benchmarks.pool import pool_rows
from engine_benchmarks.price import price_rows
from engine_benchmarks.rows import row_invariance_rows
from engine_benchmarks.sampling import sampling_rows
from engine_benchmarks.self_draft import self_draft_rows
from engine_benchmarks.startup import first_step, startup_rows
from engine_benchmarks.update import shared_prompt_rows, update_rows
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError


def measurements() -> list[Measurement]:
    """Everything this script measures, in order."""
    tiny, small, large = POLICIES["2M"], POLICIES["25M"], POLICIES["140M"]
    plans = {
        "25M": {1: (128, 7), 8: (128, 5), 64: (128, 3)},
        "140M": {1: (128, 5), 8: (128, 3), 64: (32, 3)},
    }
    return [
        *(
            Measurement("decode", name, lambda name=name, plan=plan: decode_rows(name, POLICIES[name], plan))
            for name, plan in plans.items()
        ),
        Measurement("bandwidth", "140M", lambda: bandwidth_rows("140M", large, steps=64, repeats=7)),
        Measurement("update", "2M", lambda: update_rows("2M", tiny, num_sequences=64, repeats=7)),
        Measurement("update", "25M", lambda: update_rows("25M", small, num_sequences=64, repeats=3)),
        Measurement("update", "2M shared", lambda: shared_prompt_rows("2M", tiny, num_groups=4, repeats=7)),
        Measurement("update", "25M shared", lambda: shared_prompt_rows("25M", small, 4, repeats=3)),
        *(
            Measurement("startup", name, lambda name=name: startup_rows(name, POLICIES[name], repeats=3))
            for name in ("25M", "140M")
        ),
        *(
            Measurement(
                "self_draft",
                name,
                lambda name=name: self_draft_rows(name, POLICIES[name], (1, 8), repeats=5),
            )
            for name in ("25M", "95M")
        ),
        Measurement("companion", "95M", lambda: companion_rows("95M", POLICIES["95M"], 2, (2, 8), repeats=9)),
        Measurement("rows", "bits", row_invariance_rows, disturbed=False),
        Measurement("price", "95M", lambda: price_rows("95M", POLICIES["95M"], repeats=7, num_sequences=8)),
        *(
            Measurement(
                "blocks",
                name,
                lambda name=name: block_rows(name, POLICIES[name], repeats=9),
            )
            for name in ("25M", "95M")
        ),
        Measurement("pool", "25M", lambda: pool_rows("25M", small, (2, 4, 8)), disturbed=False),
        Measurement("sampling", "25M", lambda: sampling_rows("25M", small, 8, 16, repeats=10)),
    ]


def quick_measurements() -> list[Measurement]:
    """The same sections on the small policies, with few rounds."""
    tiny, small = POLICIES["2M"], POLICIES["25M"]
    plan = {1: (32, 3), 8: (32, 3), 64: (32, 2)}
    return [
        Measurement("decode", "25M", lambda: decode_rows("25M", small, plan)),
        Measurement("bandwidth", "25M", lambda: bandwidth_rows("25M", small, steps=32, repeats=3)),
        Measurement("update", "2M", lambda: update_rows("2M", tiny, num_sequences=32, repeats=3)),
        Measurement("update", "2M shared", lambda: shared_prompt_rows("2M", tiny, 2, repeats=3)),
        Measurement("startup", "25M", lambda: startup_rows("25M", small, repeats=1)),
        Measurement("self_draft", "2M", lambda: self_draft_rows("2M", tiny, (2, 8), repeats=3)),
        Measurement("companion", "2M", lambda: companion_rows("2M", tiny, 1, (2, 8), repeats=3)),
        Measurement("rows", "bits", row_invariance_rows, disturbed=False),
        Measurement("price", "2M", lambda: price_rows("2M", tiny, repeats=2, num_sequences=4)),
        Measurement("blocks", "2M", lambda: block_rows("2M", tiny, repeats=2)),
        Measurement("pool", "2M", lambda: pool_rows("2M", tiny, (2, 4)), disturbed=False),
        Measurement("sampling", "2M", lambda: sampling_rows("2M", tiny, 8, 8, repeats=3)),
    ]


def prepare(sections: Sequence[str]) -> None:
    """Raises an error for an impossible comparison, before minutes of measurements."""
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, PyTorch on the CPU: set JAX_PLATFORMS=cpu to compare them"
        )
    if {"decode", "update"} & set(sections):
        import_reference()


BENCHMARK = Benchmark(
    name="engine",
    description=__doc__.splitlines()[0],
    plan=measurements(),
    quick_plan=quick_measurements(),
    quick_help="the small policy, short responses, few rounds",
    packages=("torch", "transformers"),
    prepare=prepare,
    disturbance="threads that wait for each other suffer most, above all PyTorch's",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = BENCHMARK.parser()
    parser.add_argument(
        "--first-step", nargs=2, type=Path, metavar=("CHECKPOINT", "CACHE"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args(argv)
    if arguments.first_step:
        print(json.dumps(first_step(*arguments.first_step)))
        return 0
    return BENCHMARK.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
