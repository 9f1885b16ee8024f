"""Train a policy: `rljax train --config quickstart [key=value ...]`."""

import argparse
import contextlib
import sys
import traceback
from collections.abc import Sequence

from drafters.names import check_drafters
from rljax.accelerators import skip_absent
from rljax.assembly.task import check_names
from rljax.config import describe_keys, load_config, to_yaml
from rljax.errors import Interrupted, UserError
from rljax.planning.command import add_arguments, present_topology, print_plan


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a policy as a config file says. Started again, a run resumes.",
        epilog="config keys, as key  type  [default]:\n" + describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the experiment, a YAML file")
    parser.add_argument(
        "--print-config", action="store_true", help="print the config with overrides and defaults, and stop"
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="resume a run also as another experiment; sessions.jsonl notes what changed",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print memory, compile time and expected speed on the devices that are here, and stop",
    )
    add_arguments(parser.add_argument_group("with --plan"))
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set a key of the config, such as training.steps=3"
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser(prog).parse_intermixed_args(argv)
    run_dir = None
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(to_yaml(config), end="")
            return 0
        # JAX takes seconds to import, so what needs none of it is checked and said first.
        check_names(config.task)
        check_drafters(config.speculation)
        if arguments.plan:
            skip_absent()
            print_plan(config, present_topology(), arguments)
            return 0
        run_dir = config.run_dir
        if not config.distributed.is_wanted() or config.distributed.process == 0:
            print(f"run: {run_dir}", flush=True)
        skip_absent()
        from rljax.training.session import run

        run(config, **({"allow_changes": True} if arguments.allow_changes else {}))
    except UserError as error:
        if not getattr(error, "elsewhere", False):  # process 0 has said it
            _say(f"error: {error}")
        return 2
    except Interrupted as interrupted:
        _say(f"{interrupted}; the same command continues {run_dir}")
        return 128 + interrupted.signal
    except KeyboardInterrupt:
        resume = f"; the same command resumes {run_dir} from its last checkpoint" if run_dir else ""
        _say(f"interrupted{resume}")
        return 130
    return 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe does not matter: the exit status tells the same
        print(text, file=sys.stderr)


def main_of_process(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """`main`, and the end of a process that has failed next to others."""
    status = 1
    try:
        status = main(argv, prog)
        return status
    except Exception:
        traceback.print_exc()
        return status
    finally:
        processes = sys.modules.get("rljax.processes")
        if processes is not None:
            processes.leave(status)
