"""Padding, memory and checkpoints of training: `python scripts/bench_training.py [--only SECTIONS]`.

What these cost, for the pages of `docs` that say so. `docs/benchmarks.md` says what each row means.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from rljax.benchmarking import Interference, Row, print_table, results_console, write_results
from rljax.config import TrainingConfig
from rljax.errors import UserError
from rljax.provenance import command_line
from training_benchmarks.checkpoint import checkpoint_rows
from training_benchmarks.loading import loading_rows, peak_of_loading
from training_benchmarks.memory import logits_row, remat_row
from training_benchmarks.padding import padding_rows
from training_benchmarks.policies import POLICIES

_MUCH_INTERFERENCE = 0.05
_PACKAGES = ("numpy", "orbax-checkpoint", "tensorstore", "safetensors")
SECTIONS = ("padding", "memory", "checkpoint", "loading")


def memory_rows() -> list[Row]:
    """At the default chunk, and at a small one where logits are nearly all there is."""
    shape, chunk = (4, 768), TrainingConfig().logprob_chunk
    return [
        logits_row("25M", POLICIES["25M"], shape, chunk),
        logits_row("1 layer", POLICIES["1 layer"], shape, 256),
        remat_row("2M", POLICIES["2M"], shape, chunk),
        remat_row("25M", POLICIES["25M"], shape, chunk),
    ]


def measurements() -> list[tuple[str, str, Callable[[], list[Row]]]]:
    """Everything this script measures, in order: section, what, and the call."""
    return [
        ("padding", "256 sequences", lambda: padding_rows((512, 768, 1024, 2048))),
        ("memory", "4 x 768 tokens", memory_rows),
        *(
            ("checkpoint", name, lambda name=name: checkpoint_rows(name, POLICIES[name], repeats=5))
            for name in ("2M", "50M")
        ),
        ("loading", "100M", lambda: loading_rows("100M", POLICIES["100M"], repeats=5)),
    ]


def default_output(only: Sequence[str]) -> Path:
    """Whole runs go to training.json, others beside it: they must not replace the figures that are cited."""
    name = "-".join(["training", *(only if set(only) != set(SECTIONS) else ())])
    return Path("benchmarks/results") / f"{name}.json"


def _parse_sections(text: str | None) -> tuple[str, ...]:
    named = SECTIONS if text is None else text.split(",")
    for section in named:
        if section not in SECTIONS:
            raise UserError(f"--only: {section!r} is not a section; they are {','.join(SECTIONS)}")
    return tuple(section for section in SECTIONS if section in named)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_training.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--only", metavar="SECTIONS", help=f"some of {','.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: benchmarks/results/training.json; partial runs write beside it",
    )
    parser.add_argument("--load", nargs=2, metavar=("CHECKPOINT", "DTYPE"), help=argparse.SUPPRESS)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes what is there after every measurement, in case the run is stopped."""
    only = _parse_sections(arguments.only)
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, the figures are a CPU's: set JAX_PLATFORMS=cpu"
        )
    output = arguments.output or default_output(only)
    console, rows = results_console(), []
    for section, what, measure in measurements():
        if section not in only:
            continue
        start = time.perf_counter()
        with Interference() as interference:
            measured = measure()
        taken = time.perf_counter() - start
        details = {"section": section, "interference": interference.share}
        measured = [dataclasses.replace(row, details={**details, **row.details}) for row in measured]
        rows += measured
        print_table(measured, f"{section}, {what} ({taken:.0f} s)", console)
        share = interference.share
        if section == "checkpoint" and share is not None and share > _MUCH_INTERFERENCE:  # the only seconds
            console.print(
                f"[yellow]other processes took {share:.0%} of the cores: repeat on a quiet machine[/yellow]"
            )
        write_results(output, rows, command_line(), _PACKAGES)
    console.print(
        f"ratios above 1 mean that rljax is better; {len(rows)} rows are in {output}", soft_wrap=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.load:
        checkpoint, dtype = arguments.load
        print(peak_of_loading(Path(checkpoint), dtype))
        return 0
    try:
        run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
