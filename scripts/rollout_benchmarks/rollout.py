"""Tokens per second with and without drafts, on prompts that return or (`task.problems=0`) never do; and what
a verifying pass costs, and a drafter at the beginning of a run.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from processes import train
from rljax.benchmarking import Row, counted_row, timed_row
from rljax.config import ExperimentConfig, to_yaml
from rljax.errors import UserError
from rljax.requests import DecodeStatistics
from rljax.rollout.collector import Group
from rljax.speculation.warm_up import time_passes
from rljax.timing import compare
from rljax.training import loop
from rljax.training.compiling import compile_programs
from rollout_benchmarks.variants import (
    SPECULATION_OFF,
    Variant,
    check_same,
    check_variants,
    default_variants,
    make_variants,
    open_run,
    roll_out,
    with_keys,
)

_BETWEEN = 3  # variants between two plain rollouts, since a machine's speed drifts over minutes


def rollout_rows(config: ExperimentConfig, names: Sequence[str] | None) -> list[Row]:
    """Measures tokens per second of variants, plain decoding first, by epoch if there are epochs, against
    plain decoding of the same tokens.
    """
    names = names or default_variants(config)
    check_variants(config, names)
    with open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        plain, *variants = make_variants(run, names)
        plain_statistics: list[DecodeStatistics] = []
        lengths: list[list[int]] = []
        updates: list[float] = []  # seconds
        progress.stage("bench", config.training.steps)

        def timed(variant: Variant, step: int) -> list[Group]:
            if variant is plain:  # its order of requests must follow from earlier steps alone
                plain.collector.scheduler.lengths.load_state(known)
            groups = roll_out(run, variant, step)
            progress.update("bench", f"step {step}: {variant.name} {variant.seconds[-1]:.1f} s")
            return groups

        for step in range(config.training.steps):
            known = plain.collector.scheduler.lengths.state()
            expected = timed(plain, step)
            plain_statistics.append(plain.statistics[-1])
            lengths.append([len(each.response_ids) for group in expected for each in group.completions])
            order = variants[::-1] if step % 2 else variants
            for first in range(0, len(order), _BETWEEN):
                between = order[first : first + _BETWEEN]
                for variant in between:
                    variant.same.append(check_same(expected, timed(variant, step), variant.name))
                check_same(expected, timed(plain, step), plain.name)
                for variant in between:
                    variant.baseline.append(sum(plain.seconds[-2:]) / 2)
            start = time.perf_counter()
            loop.learn(run, expected)
            jax.block_until_ready(run.state.trained)
            updates.append(time.perf_counter() - start)
            progress.step(step + 1, {"tokens_per_second": plain.statistics[-1].tokens / plain.seconds[-1]})
    rows, slots = [], config.engine.max_slots
    for when, steps in stretches(config).items():
        passes, sampled = sum(each.steps for each in plain_statistics[steps]), np.concatenate(lengths[steps])
        workload = {
            "busy_slots": float(sampled.sum() / (passes * slots)),  # in plain decoding
            "length_mean": float(sampled.mean()),
            "length_p75": float(np.percentile(sampled, 75)),
            "length_max": float(sampled.max()),
            "compute_dtype": run.config.policy.compute_dtype,
            "update_seconds": sum(updates[steps]),
        }
        for variant in variants:
            workload["same_responses"] = float(np.mean(variant.same[steps]))
            rows.append(_row(when, variant, steps, workload))
    return rows


def stretches(config: ExperimentConfig) -> dict[str, slice]:
    """Returns the steps of each row by its name: the steps of an epoch, or all where no problem returns."""
    steps, problems = config.training.steps, config.task.problems
    if not problems:
        return {"fresh prompts": slice(0, steps)}
    per_epoch = max(problems // config.rollout.prompts_per_step, 1)
    firsts = range(0, steps, per_epoch)
    return {f"epoch {number}": slice(first, first + per_epoch) for number, first in enumerate(firsts, 1)}


def _row(when: str, variant: Variant, steps: slice, workload: dict[str, Any]) -> Row:
    """The row of a variant over some steps."""
    seconds, baseline, update = variant.seconds[steps], variant.baseline[steps], workload["update_seconds"]
    learning, spent, saved = sum(variant.learning[steps]), sum(seconds), sum(baseline)
    total = variant.total(steps)
    ratios = [b / a for a, b in zip(seconds, baseline, strict=True)]
    host, device = total.host_seconds, total.device_seconds
    details = {
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "rounds": len(ratios),
        "seconds": spent,
        "baseline_seconds": saved,
        "learn_seconds": learning,
        "step_ratio": (saved + update) / (spent + learning + update),
        "acceptance": total.accepted / max(total.drafted, 1),
        "verified_per_token": total.rows / total.tokens,
        "passes": total.steps,
        "verifying_passes": total.verified,
        "ahead_share": total.ahead_seconds / (host + device),
        "ahead_seconds": total.ahead_seconds + total.ahead_pass_seconds,
        "pass_seconds": device,
        "host_share": host / (host + device),
        "draft_share": total.draft_seconds / spent,
        "train_share": total.train_seconds / spent,
        "idle_share": total.idle_seconds / (total.idle_seconds + device),
    }
    same = "tokens", "accept_length", "ahead_tokens", "ahead_saved_seconds"
    details |= {name: getattr(total, name) for name in same} | workload
    windows = variant.windows[steps]  # of drafts ahead; of what is wasted at most, the most counts
    for name in windows[0]:
        combine = max if name == "most_wasted" else np.mean
        details[f"decoupled_{name}"] = float(combine([each[name] for each in windows]))
    name, rates = variant.name, [total.tokens / each for each in (spent, saved)]
    if not total.ahead_tokens:
        name = name.replace(" with run-ahead", ", nothing sampled ahead")
    return counted_row(f"rollout/{when}/{name}", *rates, "tokens/s", "plain decoding", **details)


def pass_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """Measures a verifying pass against a plain step, by batch bucket, cache length and number of tokens."""
    rows = []
    with open_run(config) as (run, _):
        params = run.engine.load_params(run.state.params)
        buckets = run.engine.buckets
        for batch in buckets.batch:
            for length in (buckets.cache[0], buckets.cache[-1]):
                seconds = time_passes(run.engine, params, batch, length, repeats)
                plain = seconds.pop(0)
                for size, times in seconds.items():
                    timing, name = compare(times, plain), f"pass/batch {batch}/cache {length}/{size} tokens"
                    even = {"tokens_to_break_even": batch / timing.ratio}
                    rows.append(timed_row(name, timing, "plain step", "ms", 1e3, **even))
    return rows


def first_step_rows(config: ExperimentConfig, repeats: int) -> list[Row]:
    """Measures the seconds of a run until its first step begins, in fresh processes in turns, with the
    config's drafter and without: nothing is compiled yet, then all of it is stored. The warm start is kept,
    so that only programs make a difference.
    """
    drafter = config.speculation.drafter
    if drafter is None:
        raise UserError("speculation.drafter: set one, which is compared with none")
    sides = {
        "drafted": config,
        "plain": with_keys(config, speculation=SPECULATION_OFF | {"run_ahead_below": 0}),
    }
    begins, takes, stored = ({side: [] for side in sides} for _ in range(3))
    with tempfile.TemporaryDirectory() as directory:
        _first_step(sides["plain"], Path(directory) / "warm start")  # leaves its warm start in the cache
        for repeat in range(repeats):
            for side, each in sides.items():
                home = Path(directory) / f"{side} {repeat}"
                begin, step = _first_step(each, home)
                begins[side].append(begin)
                takes[side].append(step)
                stored[side].append(_first_step(each, home)[0])
    later = [a - b for a, b in zip(begins["drafted"], begins["plain"], strict=True)]
    details = {"later": statistics.median(later)}
    for name, of in (("first_step_seconds", takes), ("stored", stored)):
        for prefix, side in zip(("", "baseline_"), sides, strict=True):
            details[prefix + name] = statistics.median(of[side])
    timing = compare(begins["drafted"], begins["plain"])
    return [timed_row(f"first step/begins/{drafter}", timing, "no drafter", **details)]


def _first_step(config: ExperimentConfig, directory: Path) -> tuple[float, float]:
    """Trains one step in a fresh process with the programs that `directory` has; returns the seconds before
    it began, and its own.
    """
    directory.mkdir(exist_ok=True)
    file, run_dir = directory / "config.yaml", Path(tempfile.mkdtemp(dir=directory)) / "run"
    file.write_text(to_yaml(config), encoding="utf-8")
    keys = ["training.steps=1", "evaluation.problems=0", "checkpoint.every=0", "tracking.report=false"]
    (*_, metrics), _ = train(file, run_dir, f"engine.compilation_cache={directory / 'compiled'}", *keys)
    return metrics["time/elapsed"] - metrics["time/step"], metrics["time/step"]
