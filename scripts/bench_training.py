"""Padding, memory and checkpoints of training: `python scripts/bench_training.py [--only SECTIONS]`.

What these cost, for the pages of `docs` that say so. `docs/benchmarks.md` says what each row means.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.config import TrainingConfig
from rljax.errors import UserError
from training_benchmarks.checkpoint import checkpoint_rows
from training_benchmarks.loading import loading_rows, peak_of_loading
from training_benchmarks.memory import logits_row, remat_row
from training_benchmarks.padding import padding_rows
from training_benchmarks.policies import POLICIES


def memory_rows() -> list[Row]:
    """Measures memory at the default chunk, and at a small one, where logits dominate."""
    shape, chunk = (4, 768), TrainingConfig().logprob_chunk
    return [
        logits_row("25M", POLICIES["25M"], shape, chunk),
        logits_row("1 layer", POLICIES["1 layer"], shape, 256),
        remat_row("2M", POLICIES["2M"], shape, chunk),
        remat_row("25M", POLICIES["25M"], shape, chunk),
    ]


def measurements() -> list[Measurement]:
    """Everything this script measures, in order; only those of checkpoints are seconds."""
    return [
        Measurement(
            "padding", "256 sequences", lambda: padding_rows((512, 768, 1024, 2048)), disturbed=False
        ),
        Measurement("memory", "4 x 768 tokens", memory_rows, disturbed=False),
        *(
            Measurement(
                "checkpoint", name, lambda name=name: checkpoint_rows(name, POLICIES[name], repeats=5)
            )
            for name in ("2M", "50M")
        ),
        Measurement(
            "loading", "100M", lambda: loading_rows("100M", POLICIES["100M"], repeats=5), disturbed=False
        ),
    ]


def prepare(sections: Sequence[str]) -> None:
    """Raises an error on an accelerator, for any sections."""
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, the figures are a CPU's: set JAX_PLATFORMS=cpu"
        )


BENCHMARK = Benchmark(
    name="training",
    description=__doc__.splitlines()[0],
    plan=measurements(),
    packages=("numpy", "orbax-checkpoint", "tensorstore", "safetensors"),
    prepare=prepare,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = BENCHMARK.parser()
    parser.add_argument("--load", nargs=2, metavar=("CHECKPOINT", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.load:
        checkpoint, dtype = arguments.load
        print(peak_of_loading(Path(checkpoint), dtype))
        return 0
    return BENCHMARK.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
