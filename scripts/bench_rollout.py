"""Rollouts with and without drafts: `python scripts/bench_rollout.py [--config FILE] [key=value ...]`.

Trains as the config says, with real updates, and rolls every step out several times with the same weights and
noise: plainly, and with every drafter. All of them must sample the same tokens and logprobs, or the benchmark
fails. `docs/benchmarks.md` says what each row means.
"""

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters.registry import make_drafter
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row
from rljax.config import ExperimentConfig, load_config
from rljax.errors import UserError
from rljax.rollout.collector import TRAINING, Collector, Group
from rljax.rollout.pass_choice import time_passes
from rljax.rollout.records import DecodeStatistics, accumulate
from rljax.rollout.run_ahead import RunAhead
from rljax.rollout.scheduler import Scheduler
from rljax.rollout.speculation import Speculator
from rljax.training.checkpoint import RunCheckpoints
from rljax.training.loop import TrainingRun, outcomes
from rljax.training.progress import Progress
from rljax.training.run_directory import RunDirectory

PLAIN = "plain"
VARIANTS: dict[str, tuple[str, dict[str, Any]] | None] = {
    PLAIN: None,
    "prompt lookup": ("prompt_lookup", {}),
    "suffix decoding": ("suffix_decoding", {}),
    "HistoSpec": ("histospec", {}),
    "SRT": ("srt", {}),
    "SRT ranked by the noise": ("srt", {"noise_ranking": True}),
    "SRT without running rollouts": ("srt", {"live": False}),
    "SRT with run-ahead": ("srt", {}),
}
_RUN_AHEAD = "SRT with run-ahead"
_CONFIG = "configs/bench_long_tail.yaml"


@dataclasses.dataclass
class Variant:
    """One way to roll out.

    Attributes:
      name: for the rows.
      collector: rolls out.
      speculator: None for plain decoding.
      seconds: of decoding, a step.
      statistics: of the rollouts, a step.
    """

    name: str
    collector: Collector
    speculator: Speculator | None
    seconds: list[float]
    statistics: list[DecodeStatistics]


@contextlib.contextmanager
def open_run(config: ExperimentConfig) -> Iterator[tuple[TrainingRun, Progress]]:
    """The config's run, in a directory that is deleted at the end."""
    with tempfile.TemporaryDirectory() as directory, Progress() as progress:
        config = config.model_copy(update={"run_dir": directory})
        checkpoints = RunCheckpoints(Path(directory) / "checkpoints", config.checkpoint.keep)
        try:
            yield (
                TrainingRun(config, RunDirectory(directory), checkpoints, progress, time.perf_counter()),
                progress,
            )
        finally:
            checkpoints.close()


def make_variants(run: TrainingRun, names: Sequence[str]) -> list[Variant]:
    """All ways to roll out, on the run's engine; plain decoding first."""
    config, variants = run.config, []
    for name in names:
        speculator = None
        if VARIANTS[name] is not None:
            drafter, args = VARIANTS[name]
            run_ahead = None
            if name == _RUN_AHEAD:
                run_ahead = RunAhead(config.engine.max_slots, config.speculation.run_ahead_share)
            speculator = Speculator(
                run.engine, make_drafter(drafter, **args), name, config.speculation.max_batch, run_ahead
            )
            speculator.warm_up(run.engine.load_params(run.state.params))
        scheduler = Scheduler(
            run.engine, config.engine.max_slots, run.collector.scheduler.stop_strings, speculator
        )
        collector = Collector(
            run.collector.task,
            run.collector.tokenizer,
            scheduler,
            config.seed,
            config.rollout.max_prompt_length,
            config.rollout.max_response_length,
        )
        variants.append(Variant(name, collector, speculator, [], []))
    return variants


def roll_out(run: TrainingRun, variant: Variant, step: int) -> list[Group]:
    """One step's groups by one variant, which learns from them."""
    wanted, samples = run.config.rollout.prompts_per_step, run.config.rollout.samples_per_prompt
    if variant.speculator is not None and variant.speculator.run_ahead is not None:
        upcoming = range((step + 1) * wanted, (step + 2) * wanted)
        variant.speculator.run_ahead.plan(
            variant.collector.requests("train", upcoming, samples, TRAINING, step + 1)
        )
    groups, statistics, timing = variant.collector.collect(
        run.engine.load_params(run.state.params),
        "train",
        range(step * wanted, (step + 1) * wanted),
        samples,
        TRAINING,
        step,
    )
    variant.seconds.append(timing.decode)
    variant.statistics.append(statistics)
    if variant.speculator is not None:
        variant.speculator.learn(outcomes(groups))
    return groups


def check_same(plain: Sequence[Group], other: Sequence[Group], name: str) -> None:
    """Raises a UserError unless tokens and logprobs are the same bits."""
    for ours, theirs in zip(other, plain, strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            if not np.array_equal(a.response_ids, b.response_ids) or not np.array_equal(
                a.logprobs, b.logprobs
            ):
                raise UserError(f"{name}: sampled other tokens than plain decoding for {ours.problem.id}")


def rollout_rows(config: ExperimentConfig, names: Sequence[str]) -> list[Row]:
    """Tokens per second of every drafter, epoch by epoch, against plain decoding of the same tokens."""
    with open_run(config) as (run, progress):
        run.compile(late_inserts=_RUN_AHEAD in names)
        variants = make_variants(run, names)
        progress.stage("bench", config.training.steps)
        for step in range(config.training.steps):
            by_name: dict[str, list[Group]] = {}
            for variant in reversed(variants) if step % 2 else variants:
                by_name[variant.name] = roll_out(run, variant, step)
                progress.update("bench", f"step {step}: {variant.name} {variant.seconds[-1]:.1f} s")
            for name, groups in by_name.items():
                check_same(by_name[PLAIN], groups, name)
            minibatches, _ = run.minibatches(by_name[PLAIN])
            run.update(minibatches, run.reference_logprobs(minibatches))
            progress.step(
                step + 1, {"tokens_per_second": variants[0].statistics[-1].tokens / variants[0].seconds[-1]}
            )
    per_epoch = max(config.task.problems // config.rollout.prompts_per_step, 1)
    rows = []
    for first in range(0, config.training.steps, per_epoch):
        steps = slice(first, first + per_epoch)
        for variant in variants[1:]:
            rows.append(_row(first // per_epoch + 1, variants[0], variant, steps))
    return rows


def _row(epoch: int, plain: Variant, variant: Variant, steps: slice) -> Row:
    own, baseline = variant.seconds[steps], plain.seconds[steps]
    total = DecodeStatistics()
    for one in variant.statistics[steps]:
        accumulate(total, one)
    ratios = [b / a for a, b in zip(own, baseline, strict=True)]
    return Row(
        name=f"rollout/epoch {epoch}/{variant.name}",
        value=total.tokens / sum(own),
        unit="tokens/s",
        baseline="plain decoding",
        baseline_value=total.tokens / sum(baseline),
        ratio=sum(baseline) / sum(own),
        details={
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "rounds": len(ratios),
            "seconds": sum(own),
            "baseline_seconds": sum(baseline),
            "tokens": total.tokens,
            "accept_length": total.accept_length,
            "acceptance": total.accepted / max(total.drafted, 1),
            "verified_per_token": total.rows / total.tokens,
            "passes": total.steps,
            "verifying_passes": total.verified,
            "ahead_tokens": total.ahead_tokens,
            "ahead_share": total.ahead_seconds / (total.host_seconds + total.device_seconds),
            "host_share": total.host_seconds / (total.host_seconds + total.device_seconds),
        },
    )


def pass_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """What verifying so many tokens costs against a plain step, by batch bucket and cache length."""
    rows = []
    with open_run(config) as (run, _):
        params = run.engine.load_params(run.state.params)
        buckets = run.engine.buckets
        for batch in buckets.batch:
            for length in (buckets.cache[0], buckets.cache[-1]):
                seconds = time_passes(run.engine, params, batch, length, repeats)
                plain = statistics.median(seconds.pop(0))
                for size, own in seconds.items():
                    taken = statistics.median(own)
                    rows.append(
                        Row(
                            name=f"pass/batch {batch}/cache {length}/{size} tokens",
                            value=1e3 * taken,
                            unit="ms",
                            baseline="plain step",
                            baseline_value=1e3 * plain,
                            ratio=plain / taken,
                            details={"rounds": repeats, "tokens_to_break_even": batch * taken / plain},
                        )
                    )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(None, list(VARIANTS)).parser()
    parser.add_argument(
        "--config", default=_CONFIG, metavar="FILE", help=f"the workload (default: {_CONFIG})"
    )
    parser.add_argument(
        "--variants", default=",".join(list(VARIANTS)[1:]), help="drafters, separated by commas"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    names = [PLAIN, *arguments.variants.split(",")]
    try:
        for name in names:
            if name not in VARIANTS:
                raise UserError(f"--variants: {name!r} is not one; they are {', '.join(list(VARIANTS)[1:])}")
        config = load_config(arguments.config, arguments.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _benchmark(config, names).run(arguments)


def _benchmark(config: ExperimentConfig | None, names: Sequence[str]) -> Benchmark:
    return Benchmark(
        "rollout",
        __doc__.splitlines()[0],
        (
            Measurement("rollout", "tokens per second", lambda: rollout_rows(config, names)),
            Measurement("pass", "cost of verifying", lambda: pass_rows(config, repeats=5)),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
