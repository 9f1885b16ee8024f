"""Speed of the plain engine and of the update: `python scripts/bench_engine.py [--quick] [--only SECTIONS]`.

Both sides run in one process, in alternation, on the same float32 weights and sequences, and are checked to
compute the same thing before anything is timed. `docs/benchmarks.md` says what each row means.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from engine_benchmarks.bandwidth import bandwidth_rows
from engine_benchmarks.decode import decode_rows
from engine_benchmarks.policies import POLICIES, import_reference
from engine_benchmarks.startup import first_step, startup_rows
from engine_benchmarks.update import update_rows
from rljax.benchmarking import Interference, Row, print_table, results_console, write_results
from rljax.errors import UserError
from rljax.provenance import command_line

_MUCH_INTERFERENCE = 0.05
_PACKAGES = ("torch", "transformers")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One call of a section's function.

    Attributes:
      section: what `--only` names.
      what: for the line printed while it runs.
      run: measures.
    """

    section: str
    what: str
    run: Callable[[], list[Row]]


SECTIONS = ("decode", "bandwidth", "update", "startup")


def measurements(quick: bool) -> list[Measurement]:
    """Everything this script measures, in order; `quick` keeps to the small policy and few rounds."""
    tiny, small, large = POLICIES["2M"], POLICIES["25M"], POLICIES["140M"]
    if quick:
        plan = {1: (32, 3), 8: (32, 3), 64: (32, 2)}
        return [
            Measurement("decode", "25M", lambda: decode_rows("25M", small, plan)),
            Measurement("bandwidth", "25M", lambda: bandwidth_rows("25M", small, steps=32, repeats=3)),
            Measurement("update", "2M", lambda: update_rows("2M", tiny, num_sequences=32, repeats=3)),
            Measurement("startup", "25M", lambda: startup_rows("25M", small, repeats=1)),
        ]
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
        *(
            Measurement("startup", name, lambda name=name: startup_rows(name, POLICIES[name], repeats=3))
            for name in ("25M", "140M")
        ),
    ]


def default_output(quick: bool, only: Sequence[str]) -> Path:
    """Whole runs go to engine.json, others beside it: they must not replace the figures that are cited."""
    name = "-".join(["engine", *(only if set(only) != set(SECTIONS) else ()), *(["quick"] if quick else [])])
    return Path("benchmarks/results") / f"{name}.json"


def _parse_sections(text: str | None) -> tuple[str, ...]:
    if text is None:
        return SECTIONS
    named = text.split(",")
    for section in named:
        if section not in SECTIONS:
            raise UserError(f"--only: {section!r} is not a section; they are {','.join(SECTIONS)}")
    return tuple(section for section in SECTIONS if section in named)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_engine.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="the small policy, short responses, few rounds")
    parser.add_argument(
        "--only", metavar="SECTIONS", help=f"some of {','.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: benchmarks/results/engine.json; partial and quick runs write beside it",
    )
    parser.add_argument(
        "--first-step", nargs=2, type=Path, metavar=("CHECKPOINT", "CACHE"), help=argparse.SUPPRESS
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes what is there after every measurement, in case the run is stopped."""
    only = _parse_sections(arguments.only)
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, PyTorch on the CPU: set JAX_PLATFORMS=cpu to compare them"
        )
    if {"decode", "update"} & set(only):
        import_reference()  # before minutes of other measurements
    output = arguments.output or default_output(arguments.quick, only)
    console, rows = results_console(), []
    chosen = [measurement for measurement in measurements(arguments.quick) if measurement.section in only]
    for measurement in chosen:
        start = time.perf_counter()
        with Interference() as interference:
            measured = measurement.run()
        taken = time.perf_counter() - start
        details = {"section": measurement.section, "interference": interference.share}
        measured = [dataclasses.replace(row, details={**details, **row.details}) for row in measured]
        rows += measured
        print_table(measured, f"{measurement.section}, {measurement.what} ({taken:.0f} s)", console)
        if interference.share is not None and interference.share > _MUCH_INTERFERENCE:
            console.print(
                f"[yellow]other processes took {interference.share:.0%} of the cores; threads that "
                "wait for each other suffer most, above all PyTorch's: repeat on a quiet machine[/yellow]"
            )
        write_results(output, rows, command_line(), _PACKAGES)
    console.print(
        f"ratios above 1 mean that rljax is better; {len(rows)} rows are in {output}", soft_wrap=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.first_step:
        print(json.dumps(first_step(*arguments.first_step)))
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
