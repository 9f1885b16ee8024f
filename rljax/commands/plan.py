"""Plan a run: `rljax plan --config quickstart --topology v5e:2x4 [key=value ...]`.

Compiles what the run would compile, for devices that need not be here, and prints memory, compile time and
expected speed. The exit status is 2, with one line, where the run does not fit.
"""

import argparse
from collections.abc import Sequence

from drafters.names import check_drafters
from rljax.assembly.task import check_names
from rljax.config import load_config
from rljax.errors import exit_status
from rljax.planning.command import add_arguments, force_cpu_devices, print_plan


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="the experiment, a YAML file")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help="devices: v5e:2x4, v5p:2x2x2, v6e:2x4, h100:8, h200:8, rtx4080:1 or cpu:1",
    )
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the config")
    return parser


@exit_status()
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_intermixed_args(argv)
    config = load_config(arguments.config, arguments.overrides)
    check_names(config.task)
    check_drafters(config.speculation)
    force_cpu_devices(arguments.topology)
    print_plan(config, arguments.topology, arguments)
