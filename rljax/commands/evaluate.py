"""Evaluate a saved policy: `rljax evaluate runs/quickstart evaluation.samples=8`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from drafters.names import check_drafters
from rljax.accelerators import skip_absent
from rljax.assembly.task import check_names
from rljax.errors import exit_status
from rljax.evaluation.settings import evaluation_config
from rljax.hub import pinned
from rljax.run_directory import check_holds_policy


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Sample responses to held-out problems; report rewards, pass@k and maj@k with intervals,"
        " by difficulty. Started again, it goes on where it was; with more evaluation.samples or"
        " evaluation.problems than before it adds those.",
        epilog="Keys that matter most: evaluation.problems, evaluation.samples, evaluation.pass_at,"
        " rollout.temperature, rollout.max_response_length, engine.max_slots, speculation.drafter (changes no"
        " token). `rljax train --help` lists all.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "policy", metavar="DIR", help="a run, a Hugging Face model directory, or org/name[@revision]"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run: which checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="task and sampling, for a Hugging Face directory or in place of a run's",
    )
    parser.add_argument("--split", choices=("heldout", "train"), default="heldout", help="default: heldout")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="for the results (default: RUN/evaluation/step-N; of a Hugging Face directory evaluations/NAME)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="set a key of the config, such as evaluation.samples=8",
    )
    return parser


@exit_status("interrupted; the same command goes on from the responses that had finished")
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_intermixed_args(argv)
    arguments.policy = pinned(arguments.policy)
    config = evaluation_config(arguments.policy, arguments.config, arguments.overrides)
    check_holds_policy(arguments.policy)
    check_names(config.task)
    check_drafters(config.speculation)
    skip_absent()
    # JAX takes seconds to import, so the config is checked first.
    from rich.console import Console

    from rljax.assembly.saved_policy import load_saved_policy
    from rljax.evaluation.evaluator import Evaluator
    from rljax.evaluation.records import default_output
    from rljax.evaluation.table import print_table
    from rljax.progress import Progress

    saved = load_saved_policy(arguments.policy, arguments.step)
    output = arguments.output or default_output(saved.path, saved.step, arguments.split)
    with Progress() as progress:
        results = Evaluator(saved, config, arguments.split, output, progress).run()
    print_table(results, Console())
    print(f"results: {Path(output) / 'results.json'}")
