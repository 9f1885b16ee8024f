"""The console command: `rljax COMMAND ...`, also `python -m rljax COMMAND ...`."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from rljax.errors import exit_status, known_names

# Each is a module of this package.
COMMANDS = {
    "train": "train a policy as a config file says, or resume its run",
    "evaluate": "sample responses to held-out problems; report rewards, pass@k and maj@k",
    "serve": "serve a policy by OpenAI's HTTP interface",
    "generate": "stream a policy's response to a prompt",
    "export": "write a run's policy as a Hugging Face directory",
    "import": "write the policy in a GGUF file as a Hugging Face directory",
    "report": "write the report of one run or several",
    "plan": "print memory, compile time and speed of a run, for devices that need not be here",
    "doctor": "say what this installation can do, and what installs the rest",
}


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="rljax",
        usage="rljax COMMAND ...",
        description="RL post-training of language models in JAX.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items())
        + "\n\n`rljax COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    try:
        version = importlib.metadata.version("rljax")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    parser.add_argument("--version", action="version", version=f"rljax {version}")
    return parser


@exit_status()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        parser = _parser()
        parser.parse_args(arguments)
        parser.print_help()
        return 2
    name, *arguments = arguments
    if name not in COMMANDS:
        print(f"error: rljax {name}: no such command; {known_names(name, COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"rljax.commands.{name}")
    # A training process may have others to end.
    run = getattr(module, "main_of_process", module.main)
    return run(arguments, f"rljax {name}")
