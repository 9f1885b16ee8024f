"""The command line of a benchmark script: it measures a plan section by section, prints and writes results.

A script under `scripts/` states its plan, a table of cases, and options of its own where it has some:

    BENCHMARK = Benchmark("sums", __doc__, (Measurement("sum", "1M", sum_rows, (10**6,)),))

    if __name__ == "__main__":
        sys.exit(BENCHMARK.main())

Results are written after every measurement, in case the run is stopped. What measurements are made of is in
`rljax.benchmarking`.
"""

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rljax.accelerators import skip_absent
from rljax.benchmarking import Interference, Row, print_table, results_console, write_results
from rljax.config import load_config
from rljax.errors import UserError, exit_status
from rljax.provenance import command_line

_MUCH_INTERFERENCE = 0.05
_JOB = (
    "import importlib, json, sys; module, name, *given = sys.argv[1:];"
    "print(json.dumps(getattr(importlib.import_module(module), name)(*given)))"
)


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
    run: Callable[..., list[Row]]
    arguments: Sequence[Any] = ()
    disturbed: bool = True


Plan = Sequence[Measurement]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A script's measurements, and how they are chosen, run and written.

    Attributes:
      name: the script is bench_NAME.py, its results are benchmarks/results/NAME.json.
      description: its first line is for `--help`.
      plan: everything it measures, in order; or what makes it of the parsed arguments, where the script has
        options of its own. The sections must not depend on them.
      packages: packages to record the versions of; see `machine_facts`.
      prepare: called with the chosen sections before the first measurement; raises a UserError where they
        cannot run.
      disturbance: rows that other processes disturb most, for the warning.
      on_cpu: why figures of an accelerator are refused; empty if they are not.
      config: default of `--config`. With it the command line sets keys, and the plan finds the loaded config
        in `arguments.config`, and in `arguments.file` and `arguments.overrides` what it was loaded from.
      settings: keys of the config that are set before those of the command line.
      options: further options by name, as `argparse` takes them; a default gives the type, and its place in
        the help. With one named `--quick` results go to
        NAME-quick.json.
      instead: by option, what is done with the parsed arguments where it is given, in place of measuring.
    """

    name: str
    description: str
    plan: Plan | Callable[[argparse.Namespace], Plan]
    packages: Sequence[str] = ()
    prepare: Callable[[Sequence[str]], None] = lambda sections: None
    disturbance: str = ""
    on_cpu: str = ""
    config: str = ""
    settings: Sequence[str] = ()
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    instead: Mapping[str, Callable[[argparse.Namespace], None]] = dataclasses.field(default_factory=dict)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command line and returns its exit status."""
        return self.run(self.parser().parse_intermixed_args(argv))

    def parser(self) -> argparse.ArgumentParser:
        """The options that every benchmark has, and its own."""
        parser = argparse.ArgumentParser(
            prog=f"bench_{self.name}.py", description=self.description.splitlines()[0], allow_abbrev=False
        )
        parser.set_defaults(file="")
        for name, option in self.options.items():
            if default := option.get("default"):
                option = {"type": type(default), **option, "help": f"{option['help']} (default: {default})"}
            parser.add_argument(name, **option)
        if self.config:
            parser.add_argument(
                "--config", default=self.config, metavar="FILE", help=f"the workload (default: {self.config})"
            )
            after = f", after {' '.join(self.settings)}" if self.settings else ""
            parser.add_argument(
                "overrides", nargs="*", metavar="key=value", help=f"set keys of the config{after}"
            )
        sections = _sections(self.planned(parser.parse_args([])))
        parser.add_argument(
            "--only", metavar="SECTIONS", help=f"some of {','.join(sections)}, separated by commas"
        )
        parser.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help=f"default: {self.default_output(sections, sections)}; partial runs write beside it",
        )
        parser.add_argument(
            "--seconds",
            type=float,
            metavar="S",
            help="begin no measurement later than this, but one; default: measure everything",
        )
        return parser

    def default_output(self, only: Sequence[str], sections: Sequence[str]) -> Path:
        """Whole runs go to NAME.json, others next to it: they must not replace the figures that are cited."""
        partial = only if set(only) != set(sections) else ()
        return Path("benchmarks/results") / f"{'-'.join([self.name, *partial])}.json"

    @exit_status("interrupted")
    def run(self, arguments: argparse.Namespace) -> None:
        """Does what the arguments of `parser` ask for and returns the exit status; errors are one line."""
        for option, act in self.instead.items():
            if getattr(arguments, option.lstrip("-").replace("-", "_")) is not None:
                return act(arguments)
        skip_absent()
        if self.config:
            arguments.file = arguments.config
            arguments.config = load_config(arguments.file, [*self.settings, *arguments.overrides])
        return self._measure(arguments)

    def planned(self, arguments: argparse.Namespace) -> Plan:
        """The measurements that the arguments of `parser` ask for."""
        return self.plan(arguments) if callable(self.plan) else self.plan

    def _measure(self, arguments: argparse.Namespace) -> None:
        plan, seconds = self.planned(arguments), arguments.seconds
        chosen = _chosen_sections(arguments.only, _sections(plan))
        if self.on_cpu and jax.default_backend() != "cpu":
            raise UserError(f"JAX runs on {jax.default_backend()}, {self.on_cpu}: set JAX_PLATFORMS=cpu")
        self.prepare(chosen)
        output = arguments.output or self.default_output(chosen, _sections(plan))
        if arguments.output is None and getattr(arguments, "quick", False):
            output = output.with_name(f"{self.name}-quick.json")
        console, rows, begun = results_console(), [], time.perf_counter()
        for measurement in plan:
            if measurement.section not in chosen:
                continue
            start = time.perf_counter()
            if rows and seconds is not None and start - begun > seconds:
                console.print(f"left out after {seconds:g} s: {measurement.section}, {measurement.what}")
                continue
            with Interference() as interference:
                measured = measurement.run(*measurement.arguments)
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


def in_fresh_process(function: Callable[..., Any], *arguments: str, **environment: str) -> Any:
    """Calls a function of a module below `scripts/` in a process of its own, and returns what it does.

    Args:
      function: takes texts and returns what JSON can hold.
      environment: variables that are changed; an empty one is removed.
    """
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    done = subprocess.run(
        [sys.executable, "-c", _JOB, function.__module__, function.__name__, *arguments],
        env={name: value for name, value in variables.items() if value},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _sections(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(measurement.section for measurement in plan))


def _chosen_sections(text: str | None, sections: Sequence[str]) -> tuple[str, ...]:
    """The sections that `--only` names, in the plan's order; all without it."""
    named = sections if text is None else text.split(",")
    for section in named:
        if section not in sections:
            raise UserError(f"--only: {section!r} is not a section; they are {','.join(sections)}")
    return tuple(section for section in sections if section in named)
