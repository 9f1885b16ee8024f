"""The command line of a benchmark script: it measures a plan section by section, prints and writes results.

A script under `scripts/` states its plan, and adds options of its own to the parser where it has some:

    BENCHMARK = Benchmark("sums", __doc__.splitlines()[0], (Measurement("sum", "1M", sum_rows),))

    if __name__ == "__main__":
        sys.exit(BENCHMARK.run(BENCHMARK.parser().parse_args()))

Results are written after every measurement, in case the run is stopped. What measurements are made of is in
`rljax.benchmarking`.
"""

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from rljax.accelerators import skip_absent
from rljax.benchmarking import Interference, Row, print_table, results_console, write_results
from rljax.errors import UserError
from rljax.provenance import command_line

_MUCH_INTERFERENCE = 0.05


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One call that measures.

    Attributes:
      section: name for `--only`.
      what: for the title of its table.
      run: measures.
      disturbed: whether other processes change its rows, as they do seconds but not bytes; if so, a run
        among many of them warns.
    """

    section: str
    what: str
    run: Callable[[], list[Row]]
    disturbed: bool = True


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A script's measurements, and how they are chosen, run and written.

    Attributes:
      name: the script is bench_NAME.py, its results are benchmarks/results/NAME.json.
      description: for `--help`.
      plan: everything it measures, in order.
      quick_plan: plan of `--quick`; None for no such option.
      quick_help: difference of the quick plan, for `--help`.
      packages: packages to record the versions of; see `machine_facts`.
      prepare: called with the chosen sections before the first measurement; raises a UserError where they
        cannot run.
      disturbance: rows that other processes disturb most, for the warning.
    """

    name: str
    description: str
    plan: Sequence[Measurement]
    quick_plan: Sequence[Measurement] = ()
    quick_help: str = "fewer and smaller measurements"
    packages: Sequence[str] = ()
    prepare: Callable[[Sequence[str]], None] = lambda sections: None
    disturbance: str = ""

    def parser(self) -> argparse.ArgumentParser:
        """The options that every benchmark has."""
        parser = argparse.ArgumentParser(
            prog=f"bench_{self.name}.py", description=self.description, allow_abbrev=False
        )
        parser.set_defaults(quick=False)
        if self.quick_plan:
            parser.add_argument("--quick", action="store_true", help=self.quick_help)
        sections = ",".join(_sections(self.plan))
        parser.add_argument("--only", metavar="SECTIONS", help=f"some of {sections}, separated by commas")
        parser.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help=f"default: {self.default_output(False, _sections(self.plan))}; "
            f"partial {'and quick ' if self.quick_plan else ''}runs write beside it",
        )
        parser.add_argument(
            "--seconds",
            type=float,
            metavar="S",
            help="begin no measurement later than this, but one; default: measure everything",
        )
        return parser

    def default_output(self, quick: bool, only: Sequence[str]) -> Path:
        """Whole runs go to NAME.json, others beside it: they must not replace the figures that are cited."""
        partial = only if set(only) != set(_sections(self._plan(quick))) else ()
        name = "-".join([self.name, *partial, *(["quick"] if quick else [])])
        return Path("benchmarks/results") / f"{name}.json"

    def run(self, arguments: argparse.Namespace) -> int:
        """Does what the arguments of `parser` ask for and returns the exit status; errors are one line."""
        skip_absent()
        try:
            self._measure(arguments.quick, arguments.only, arguments.output, arguments.seconds)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        return 0

    def _plan(self, quick: bool) -> Sequence[Measurement]:
        return self.quick_plan if quick else self.plan

    def _measure(self, quick: bool, only: str | None, output: Path | None, seconds: float | None) -> None:
        plan = self._plan(quick)
        chosen = _chosen_sections(only, _sections(plan))
        self.prepare(chosen)
        output = output or self.default_output(quick, chosen)
        console, rows, begun = results_console(), [], time.perf_counter()
        for measurement in plan:
            if measurement.section not in chosen:
                continue
            start = time.perf_counter()
            if rows and seconds is not None and start - begun > seconds:
                console.print(f"left out after {seconds:g} s: {measurement.section}, {measurement.what}")
                continue
            with Interference() as interference:
                measured = measurement.run()
            taken, share = time.perf_counter() - start, interference.share
            details = {"section": measurement.section, "interference": share}
            measured = [dataclasses.replace(row, details={**details, **row.details}) for row in measured]
            rows += measured
            print_table(measured, f"{measurement.section}, {measurement.what} ({taken:.0f} s)", console)
            if measurement.disturbed and share is not None and share > _MUCH_INTERFERENCE:
                most = f"; {self.disturbance}" if self.disturbance else ""
                console.print(
                    f"[yellow]other processes took {share:.0%} of the cores{most}: "
                    "repeat on a quiet machine[/yellow]"
                )
            if rows:
                write_results(output, rows, command_line(), self.packages)
            jax.clear_caches()  # a process cannot hold the programs of many measurements
            gc.collect()
        if not rows:
            raise UserError("nothing could be measured")
        console.print(
            f"ratios above 1 mean that rljax is better; {len(rows)} rows are in {output}", soft_wrap=True
        )


def _sections(plan: Sequence[Measurement]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(measurement.section for measurement in plan))


def _chosen_sections(text: str | None, sections: Sequence[str]) -> tuple[str, ...]:
    """The sections that `--only` names, in the plan's order; all without it."""
    named = sections if text is None else text.split(",")
    for section in named:
        if section not in sections:
            raise UserError(f"--only: {section!r} is not a section; they are {','.join(sections)}")
    return tuple(section for section in sections if section in named)
