"""The command line of a simulation."""

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

from rljax.errors import ConfigError, exit_status
from rljax.provenance import command_line, write_figures
from rljax.simulation.calibration import compared, read_run, seconds_of
from rljax.simulation.calibration import table as calibration_table
from rljax.simulation.outcome import as_json, draw_timeline, outcome_of, table
from rljax.simulation.scenario import Scenario, keys_text
from rljax.simulation.sizes import chosen_sizes, sizes_table

_DESCRIPTION = """Simulate a cluster: the coordinator and the routers of runs on a virtual clock.

  python scripts/simulate.py workers=64 order=pipe router=two-tiers --timeline pipe.png
  python scripts/simulate.py workers=64 --compare order=one-off --compare order=pipe,router=ranked
  python scripts/simulate.py --calibrate runs/two runs/three --base runs/one --cores 2
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="simulate.py",
        description=_DESCRIPTION,
        epilog=f"keys:\n{keys_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key; see below")
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="key=value[,key=value]",
        help="also with these keys; may be repeated. Speed-ups are over the first simulation",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write keys, figures, command and machine as JSON"
    )
    parser.add_argument(
        "--sizes",
        metavar="N,N",
        help="instead: by SpecActor's Algorithm 1, which of these numbers of devices should verify, how many"
        " draft, and with which window",
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw when each worker decoded, as PNG")
    parser.add_argument(
        "--figure", metavar="NAME", help="a paper's figure by simulation, or all; see docs/simulation.md"
    )
    parser.add_argument(
        "--calibrate",
        nargs="+",
        metavar="RUN",
        help="predict real runs with workers, from their directories and that of --base, and compare",
    )
    parser.add_argument("--base", metavar="RUN", help="the same experiment with cluster.workers=1")
    parser.add_argument(
        "--cores",
        type=float,
        default=math.inf,
        metavar="N",
        help="cores that all workers of the runs shared; default: each had its own",
    )
    return parser


@exit_status()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.figure is not None:
        from rljax.simulation.figures import run_figures

        run_figures(arguments.figure)
    elif arguments.calibrate is not None:
        _calibrate(arguments)
    elif arguments.sizes is not None:
        _choose_sizes(arguments)
    else:
        _simulate(arguments)


def _calibrate(arguments: argparse.Namespace) -> None:
    if arguments.base is None or arguments.overrides:
        raise ConfigError("--calibrate: takes runs, and --base with the run with one worker; no keys")
    if not arguments.cores > 0:
        raise ConfigError(f"--cores: {arguments.cores:g} should be more than 0")
    base = read_run(arguments.base)
    rows = {path: compared(read_run(path), base, arguments.cores) for path in arguments.calibrate}
    print(calibration_table(rows))
    if arguments.json is not None:
        runs = {
            path: [dataclasses.asdict(each) | {"ratio": each.ratio} for each in figures]
            for path, figures in rows.items()
        }
        content = {"seconds": dataclasses.asdict(seconds_of(base)), "runs": runs}
        write_figures(arguments.json, content, command_line())


def _choose_sizes(arguments: argparse.Namespace) -> None:
    scenario = Scenario().replaced(arguments.overrides)
    if not all(text.isdigit() for text in arguments.sizes.split(",")):
        raise ConfigError(f"--sizes: {arguments.sizes} should be numbers of devices, such as 1,2,4,8")
    found = chosen_sizes(scenario, [int(text) for text in arguments.sizes.split(",")])
    print(sizes_table(found))
    if arguments.json is not None:
        choices = {mode: dataclasses.asdict(choice) for mode, choice in found.items()}
        content = {"scenario": dataclasses.asdict(scenario), "choices": choices}
        write_figures(arguments.json, content, command_line())


def _simulate(arguments: argparse.Namespace) -> None:
    first = Scenario().replaced(arguments.overrides)
    scenarios = {" ".join(arguments.overrides) or "default": first}
    for more in arguments.compare:
        scenarios[more] = first.replaced(more.split(","))
    clusters, outcomes, spent = {}, {}, {}
    for name, scenario in scenarios.items():
        start = time.perf_counter()
        clusters[name] = scenario.run(spans=True)
        spent[name] = time.perf_counter() - start
        responses = scenario.prompts_per_step * scenario.samples
        outcomes[name] = outcome_of(clusters[name], scenario.warm_up, responses)
    print(table(outcomes))
    total = sum(spent.values())
    print(f"{sum(each.events for each in clusters.values()):,} events in {total:.1f} s")
    if arguments.json is not None:
        rows = [
            {
                "name": name,
                "scenario": dataclasses.asdict(scenarios[name]),
                "outcome": as_json(outcomes[name]),
                "steps": [dataclasses.asdict(step) for step in clusters[name].steps],
                "events": clusters[name].events,
                "seconds_to_simulate": spent[name],
            }
            for name in scenarios
        ]
        write_figures(arguments.json, {"rows": rows}, command_line())
    if arguments.timeline is not None:
        last = min(first.steps, first.warm_up + 4)
        draw_timeline(clusters, arguments.timeline, first.warm_up + 1, last)
