"""Counts tokens that drafting changes: `python scripts/count_flips.py [--tokens N] [key=value ...]`.

Plain against drafted decoding, over drafters, managers and bucket mixes, in float32 and in bfloat16, in parts
that resume: the same command goes on where it stopped. There should be no flip (`docs/row-invariance.md`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rljax.benchmarking import results_console
from rljax.config import load_config
from rljax.errors import UserError, exit_status
from rljax.provenance import command_line, write_figures
from rollout_benchmarks.flips import MECHANISMS, PartsFile, count_part, parts, processor_line, summary

# A policy that is cheap to decode, sure of some tokens and unsure of others.
_OVERRIDES = (
    "policy.shape.hidden_size=96", "policy.shape.num_layers=2", "policy.shape.num_heads=3",
    "policy.shape.num_kv_heads=1", "policy.shape.head_dim=32", "policy.shape.mlp_size=192",
    "warm_start.steps=150", "task.problems=64", "rollout.max_prompt_length=96",
    "rollout.max_response_length=160", "engine.cache_buckets=[128,256]",
)  # fmt: skip


@exit_status()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 1 if a token or a logprob differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="configs/quickstart.yaml", help="the workload (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens to compare in all")
    parser.add_argument("--steps", type=int, default=4, help="rollouts of a mechanism in one part")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="number types, separated by commas")
    parser.add_argument("--mechanisms", default=";".join(MECHANISMS), help="separated by semicolons")
    parser.add_argument(
        "--parts", type=Path, default=Path("cache/flips.jsonl"), help="what was counted so far"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/flips.json"), help="the summary"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    names = arguments.mechanisms.split(";")
    overrides = [*_OVERRIDES, *arguments.overrides]
    for name in names:
        if name not in MECHANISMS:
            raise UserError(f"--mechanisms: {name!r} is not one; they are {'; '.join(MECHANISMS)}")
    config = load_config(arguments.config, overrides)
    workload = {"config": arguments.config, "overrides": overrides, "steps": arguments.steps}
    arguments.parts.parent.mkdir(parents=True, exist_ok=True)
    file = PartsFile(arguments.parts, workload)
    for part in parts(arguments.dtypes.split(","), blocks=1_000_000):
        if file.tokens >= arguments.tokens:
            break
        missing = file.missing(part, names)
        if missing:
            for line in count_part(config, part, arguments.steps, missing):
                file.append(line)
    rows = summary(file.lines)
    numerics = sorted({str(line["numerics"]) for line in file.lines})
    figures = {"workload": workload, "numerics": numerics, "rows": rows}
    write_figures(arguments.output, figures, command_line())
    console = results_console()
    console.print(f"{file.tokens:,} tokens compared on {processor_line()}")
    for row in rows:
        console.print(
            f"{row['dtype']:9} {row['mechanism']:22} {row['tokens']:10,} tokens, {row['accepted']:9,} of"
            f" {row['drafted']:9,} drafts right, {row['flips']} flips, {row['logprobs']} other logprobs"
        )
    return int(any(row["flips"] or row["logprobs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
