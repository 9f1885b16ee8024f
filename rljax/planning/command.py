"""The command line of a plan, for `rljax plan` and `rljax train --plan`."""

import argparse
import os
import re

from rljax.config import ExperimentConfig
from rljax.errors import ConfigError


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options of a plan."""
    parser.add_argument(
        "--mean", type=int, metavar="TOKENS", help="mean response length [a quarter of the longest]"
    )
    parser.add_argument("--longest", type=int, metavar="TOKENS", help="longest response [the config's]")
    parser.add_argument("--sigma", type=float, default=0.8, help="spread of the log-normal lengths [0.8]")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="probability that a draft is accepted [0.7]"
    )
    parser.add_argument(
        "--depth",
        choices=["auto", "full", "extrapolated"],
        default="auto",
        help="compile all layers, or 2 and 4 and extrapolate; auto extrapolates above 8 layers",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the plan, its command and machine, as JSON"
    )


def force_cpu_devices(topology: str) -> None:
    """Makes this process have the CPU devices of a topology such as cpu:8. Call it before JAX is imported."""
    match = re.fullmatch(r"cpu:([1-9][0-9]*)", topology)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if match and match[1] != "1":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={match[1]}".strip()


def present_topology() -> str:
    """Returns the name of the devices of this process.

    Raises:
      ConfigError: there are no figures of them.
    """
    import jax

    from rljax.planning.hardware import known_hardware
    from rljax.planning.topologies import parse_topology

    count, kind = jax.device_count(), jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return f"cpu:{count}"
    names = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
    family = names.get(kind) or next((name for name in ("h200", "h100") if name.upper() in kind), None)
    if family is None:
        known = ", ".join(known_hardware())
        raise ConfigError(f"plan: there are no figures of {kind}; rljax plan --topology knows {known}")
    shapes = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
    if family == "v5p":
        shapes = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
    name = f"{family}:{shapes.get(count, count)}" if family.startswith("v") else f"{family}:{count}"
    return parse_topology(name).name


def print_plan(config: ExperimentConfig, topology: str, arguments: argparse.Namespace) -> None:
    """Prints the plan of a run, and writes it where `--json` says.

    Raises:
      UserError: the run does not fit the devices, or a file cannot be written.
    """
    import jax

    from rljax.planning.planner import default_lengths, make_plan
    from rljax.planning.table import as_json, as_text
    from rljax.planning.topologies import parse_topology
    from rljax.provenance import command_line, write_figures

    if not 0.0 <= arguments.acceptance <= 1.0:
        raise ConfigError(f"--acceptance: {arguments.acceptance} should be between 0 and 1")
    lengths = default_lengths(config, arguments.mean, arguments.longest, arguments.sigma)
    jax.config.update("jax_enable_compilation_cache", False)  # the time to compile is part of the plan
    full_depth = {"auto": None, "full": True, "extrapolated": False}[arguments.depth]
    plan = make_plan(
        config,
        parse_topology(topology),
        lengths,
        arguments.acceptance,
        full_depth,
        lambda line: print(line, flush=True),
    )
    print(as_text(plan), end="")
    if arguments.json is not None:
        write_figures(arguments.json, as_json(plan), command_line())
