"""Export a run's policy for Hugging Face's libraries: `rljax export runs/quickstart exported`."""

import argparse
from collections.abc import Sequence

from rljax.accelerators import skip_absent
from rljax.errors import exit_status
from rljax.run_directory import check_holds_policy


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write a run's policy as a Hugging Face directory, with tokenizer and model card.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("output", metavar="DIR", help="where the policy goes")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; bfloat16 is half as large and rounds them (default: float32)",
    )
    parser.add_argument(
        "--adapter", metavar="DIR", help="also write the LoRA adapter alone, in PEFT's format, here"
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    parser.add_argument(
        "--drafter", metavar="DIR", help="also write the EAGLE head that was trained beside the policy, here"
    )
    parser.add_argument(
        "--drafter-engine", choices=("sglang", "vllm"), default="sglang", help="who shall load the head"
    )
    return parser


@exit_status("interrupted; what was there before is as it was")
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_args(argv)
    check_holds_policy(arguments.run)
    skip_absent()
    # JAX takes seconds to import, and --help should be instant.
    from rljax.assembly.saved_policy import load_saved_policy
    from rljax.training.export import check_destination, export_adapter, export_head, export_policy

    check_destination(arguments.output, arguments.force)  # before anything is read
    saved = load_saved_policy(arguments.run, arguments.step)
    if arguments.drafter is not None:  # first: a run without a head exports nothing
        head = export_head(
            saved, arguments.drafter, arguments.dtype, arguments.drafter_engine, arguments.force
        )
        print(f"head of step {saved.step}: {head}")
    if arguments.adapter is not None:
        adapter = export_adapter(saved, arguments.adapter, arguments.dtype, arguments.force)
        print(f"adapter of step {saved.step}: {adapter}")
    policy = export_policy(saved, arguments.output, arguments.dtype, arguments.force)
    print(f"policy of step {saved.step}: {policy}")
