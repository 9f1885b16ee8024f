"""Counts tokens that drafting changes: `python scripts/count_flips.py [--tokens N] [key=value ...]`.

Plain against drafted decoding at temperature 1, over drafters, managers and bucket mixes, in float32 and in
bfloat16. There should be no flip (`docs/row-invariance.md`). Every mechanism decodes the same requests with
the same noise, in other buckets, slots and batches. A response is compared up to its first difference, since
later tokens have another prefix. The work is divided into parts, one JSON line each, so that the same command
goes on where it was stopped.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rljax.benchmarking import results_console
from rljax.config import ExperimentConfig, load_config
from rljax.durable_files import write_durably
from rljax.errors import UserError, exit_status
from rljax.provenance import command_line, machine_facts, write_figures
from rljax.requests import Completion
from rljax.rollout.collector import Scheduler
from rljax.speculation.pass_times import PassTimes
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.equality import Count, EveryPass, take_turns
from rollout_benchmarks.variants import (
    ALL_SLOTS,
    make_variant,
    open_run,
    step_requests,
    unrewarded,
    with_hidden_layers,
    with_keys,
)

_EAGLE = {"depths": [1, 3], "slices": 2, "learning_rate": 3e-3}
_ALL: dict[str, Any] = {"drafter": "srt", "others": {"quantized": {}, "eagle": _EAGLE}}
MECHANISMS: dict[str, dict[str, Any]] = {
    "prompt lookup": {"drafter": "prompt_lookup"},
    "suffix decoding": {"drafter": "suffix_decoding"},
    "HistoSpec": {"drafter": "histospec"},
    "SRT": {"drafter": "srt"},
    "SRT with run-ahead": {"drafter": "srt", "run_ahead_below": ALL_SLOTS},
    "quantized": {"drafter": "quantized"},
    "small model": {"drafter": "small_model"},
    "EAGLE-3": {"drafter": "eagle", "args": _EAGLE},
    "all, one in turn": _ALL,
    "all, mixed trees": _ALL | {"mix": True},
    "all, default manager": _ALL | {"choice": "expected"},
    "all, bandit": _ALL | {"choice": "bandit"},
    "all, draft ladder": _ALL | {"choice": "ladder"},
}
"""Keys of the section `speculation`. Without `choice` all drafters are asked, and passes of
all sizes are made in turn.
"""
BUCKET_MIXES = {
    "a": ((2, 6, 24, 64), (16, 32, 64, 128), (6, 24)),
    "b": ((3, 17, 64), (24, 33, 66, 96), (17, 64)),
    "c": ((1, 5, 11, 33, 64), (18, 50, 130), (33, 5)),
}
"""Batch buckets, rows of verifying passes, and slots of the drafted side; plain decoding has 64."""


def count_part(
    config: ExperimentConfig, part: Mapping[str, Any], steps: int, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields a line a mechanism: its `Count` over `steps` rollouts of a part, with its number type, bucket
    mix and block of requests. History drafters see prompts again if `task.problems` is below the prompts of
    them.
    """
    batches, rows, slots = BUCKET_MIXES[part["buckets"]]
    passes = {"verify_buckets": rows, "max_drafts": 15, "max_batch": batches[-1]}
    config = with_keys(
        config.model_copy(update={"seed": config.seed + part["block"]}),
        policy={"compute_dtype": part["dtype"]},
        engine={"max_slots": batches[-1], "batch_buckets": batches},
        speculation={"drafter": "srt", "run_ahead_share": 1.0, **passes},
    )
    with open_run(config) as (run, progress):
        progress.stage("count", len(names))
        params = run.engine.load_params(run.state.params)
        scheduler = Scheduler(with_hidden_layers(run.engine, None), batches[-1])
        plain = [scheduler.run(params, step_requests(run, step))[0] for step in range(steps)]
        times: dict[Any, PassTimes] = {}
        for number, name in enumerate(names):
            count = _count(run, name, plain, slots, times)
            fingerprint = None if run.invariance is None else run.invariance.fingerprint
            yield {**part, "mechanism": name, "numerics": fingerprint} | dataclasses.asdict(count)
            progress.step(number + 1, {"tokens_per_second": 0.0})


def _count(
    run: TrainingRun,
    name: str,
    plain: Sequence[Sequence[Completion]],
    slots: Sequence[int],
    times: dict[Any, PassTimes],
) -> Count:
    params, keys = run.engine.load_params(run.state.params), MECHANISMS[name]
    every_pass = None if "choice" in keys else EveryPass()
    speculator = make_variant(run, name, keys, times, make=every_pass and every_pass.make).speculator
    if every_pass is not None:
        take_turns(speculator, every_pass, alone="others" in keys and "mix" not in keys)
    count = Count()
    for step, expected in enumerate(plain):
        requests = step_requests(run, step)
        speculator.idle.plan(step_requests(run, step + 1))
        scheduler = Scheduler(speculator.engine, slots[step % 2], None, speculator, overlap=step % 3 == 2)
        drafted, statistics = scheduler.run(params, requests)
        count.drafted += statistics.drafted
        count.accepted += statistics.accepted
        for number, (one, other) in enumerate(zip(expected, drafted, strict=True)):
            count.compare(one, other, {"step": step, "request": number})
        speculator.learn(unrewarded(requests, drafted))
    return count


class PartsFile:
    """The lines of finished parts, written durably; a count that is started again continues after them.
    Raises a UserError if the file belongs to another processor, JAX version, or workload.
    """

    def __init__(self, path: Path, workload: Mapping[str, Any]) -> None:
        machine = machine_facts()
        self.path, self.header = path, {"machine": machine, "workload": dict(workload)}
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            header, *self.lines = (json.loads(line) for line in path.read_text().splitlines())
            known = {name: header["machine"].get(name) for name in ("cpu", "vectors", "jax")}
            here = {name: machine[name] for name in known}
            if known != here or header["workload"] != self.header["workload"]:
                raise UserError(
                    f"{path}: counted on {known} with other settings or elsewhere; give another --parts"
                )
            self.header = header

    def missing(self, part: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        """Returns the mechanisms that were not counted in a part."""
        done = {line["mechanism"] for line in self.lines if part.items() <= line.items()}
        return [name for name in names if name not in done]

    def append(self, line: dict[str, Any]) -> None:
        """Adds one mechanism's count of one part."""
        self.lines.append(line)
        content = "".join(json.dumps(each) + "\n" for each in (self.header, *self.lines))
        write_durably(self.path, content.encode())


def summary(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sums tokens, drafted and accepted tokens, flips, and differing logprobs by number type and
    mechanism.
    """
    rows = []
    for dtype, mechanism in sorted({(line["dtype"], line["mechanism"]) for line in lines}):
        chosen = [line for line in lines if (line["dtype"], line["mechanism"]) == (dtype, mechanism)]
        counted = "tokens", "drafted", "accepted", "logprobs"
        sums = {name: sum(line[name] for line in chosen) for name in counted}
        flips = [flip for line in chosen for flip in line["flips"]]
        rows.append({"dtype": dtype, "mechanism": mechanism, **sums, "flips": len(flips), "shown": flips[:5]})
    return rows


_CONFIG = "configs/quickstart.yaml"
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
    for option, default, what in (
        ("--tokens", 10_000_000, "tokens to compare in all"),
        ("--steps", 4, "rollouts of a mechanism in one part"),
        ("--dtypes", "float32,bfloat16", "number types, separated by commas"),
        ("--mechanisms", ";".join(MECHANISMS), "separated by semicolons"),
        ("--parts", Path("cache/flips.jsonl"), "what was counted so far"),
        ("--output", Path("benchmarks/results/flips.json"), "the summary"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=f"{what} (default: {default})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    names = arguments.mechanisms.split(";")
    overrides = [*_OVERRIDES, *arguments.overrides]
    for name in names:
        if name not in MECHANISMS:
            raise UserError(f"--mechanisms: {name!r} is not one; they are {'; '.join(MECHANISMS)}")
    config = load_config(_CONFIG, overrides)
    workload = {"config": _CONFIG, "overrides": overrides, "steps": arguments.steps}
    arguments.parts.parent.mkdir(parents=True, exist_ok=True)
    file = PartsFile(arguments.parts, workload)
    for block, mix, dtype in itertools.product(range(1_000_000), BUCKET_MIXES, arguments.dtypes.split(",")):
        if sum(line["tokens"] for line in file.lines) >= arguments.tokens:
            break
        part = {"dtype": dtype, "buckets": mix, "block": block}
        if missing := file.missing(part, names):
            for line in count_part(config, part, arguments.steps, missing):
                file.append(line)
    rows = summary(file.lines)
    numerics = sorted({str(line["numerics"]) for line in file.lines})
    figures = {"workload": workload, "numerics": numerics, "rows": rows}
    write_figures(arguments.output, figures, command_line())
    console = results_console()
    facts = machine_facts()
    where = f"{facts['cpu']} ({facts['vectors']}), {os.cpu_count()} cores, JAX {jax.__version__}"
    tokens = sum(line["tokens"] for line in file.lines)
    console.print(f"{tokens:,} tokens compared on {where}")
    for row in rows:
        console.print(
            f"{row['dtype']:9} {row['mechanism']:22} {row['tokens']:10,} tokens, {row['accepted']:9,} of"
            f" {row['drafted']:9,} drafts right, {row['flips']} flips, {row['logprobs']} other logprobs"
        )
    return int(any(row["flips"] or row["logprobs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
