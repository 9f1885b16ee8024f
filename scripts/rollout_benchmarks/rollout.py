"""Tokens per second with and without drafts, on prompts that return or (`task.problems=0`) never do."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.requests import DecodeStatistics
from rljax.rollout.collector import Group
from rljax.training import loop
from rljax.training.compiling import compile_programs
from rollout_benchmarks.variants import (
    Variant,
    check_same,
    check_variants,
    default_variants,
    make_variants,
    open_run,
    roll_out,
)

_BETWEEN = 3  # variants between two plain rollouts, since a machine's speed drifts over minutes


def rollout_rows(config: ExperimentConfig, names: Sequence[str] | None) -> list[Row]:
    """Measures tokens per second of every drafter, by epoch if there are epochs, against plain decoding of
    the same tokens.

    Args:
      names: variants, plain decoding first; None for `default_variants`.
    """
    names = names or default_variants(config)
    check_variants(config, names)
    with open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        plain, *variants = make_variants(run, names)
        baselines: dict[str, list[float]] = {variant.name: [] for variant in variants}  # seconds, by step
        same: dict[str, list[float]] = {variant.name: [] for variant in variants}  # share of the responses
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
                    same[variant.name].append(check_same(expected, timed(variant, step), variant.name))
                check_same(expected, timed(plain, step), plain.name)
                for variant in between:
                    baselines[variant.name].append(sum(plain.seconds[-2:]) / 2)
            start = time.perf_counter()
            loop.learn(run, expected)
            jax.block_until_ready(run.state.trained)
            updates.append(time.perf_counter() - start)
            progress.step(step + 1, {"tokens_per_second": plain.statistics[-1].tokens / plain.seconds[-1]})
    rows = []
    for when, steps in stretches(config).items():
        workload = _workload(plain_statistics[steps], lengths[steps], config.engine.max_slots)
        update = sum(updates[steps])
        for variant in variants:
            baseline = baselines[variant.name][steps]
            workload["compute_dtype"] = run.config.policy.compute_dtype
            workload["same_responses"] = float(np.mean(same[variant.name][steps]))
            rows.append(_row(when, variant, baseline, steps, update, workload))
    return rows


def stretches(config: ExperimentConfig) -> dict[str, slice]:
    """Returns the steps of each row by its name: the steps of an epoch, or all where no problem returns."""
    steps, problems = config.training.steps, config.task.problems
    if not problems:
        return {"fresh prompts": slice(0, steps)}
    per_epoch = max(problems // config.rollout.prompts_per_step, 1)
    firsts = range(0, steps, per_epoch)
    return {f"epoch {number}": slice(first, first + per_epoch) for number, first in enumerate(firsts, 1)}


def row_name(variant: str, total: DecodeStatistics) -> str:
    """Returns a variant's name in a row; a variant that sampled nothing ahead is not called run-ahead."""
    return variant if total.ahead_tokens else variant.replace(" with run-ahead", ", nothing sampled ahead")


def _windows(windows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over steps of the metrics of drafts ahead; of what is wasted at most, the most."""
    if not windows:
        return {}
    means = {name: float(np.mean([each[name] for each in windows])) for name in windows[0]}
    return {
        f"decoupled_{name}": max(each[name] for each in windows) if name == "most_wasted" else mean
        for name, mean in means.items()
    }


def _workload(
    plain: Sequence[DecodeStatistics], lengths: Sequence[Sequence[int]], slots: int
) -> dict[str, Any]:
    """Describes the tail: the share of slots that is busy in plain decoding, and the lengths of responses."""
    passes = sum(each.steps for each in plain)
    all_lengths = np.concatenate(lengths)
    return {
        "busy_slots": float(all_lengths.sum() / (passes * slots)),
        "length_mean": float(all_lengths.mean()),
        "length_p75": float(np.percentile(all_lengths, 75)),
        "length_max": float(all_lengths.max()),
    }


def _row(
    when: str,
    variant: Variant,
    baseline: Sequence[float],
    steps: slice,
    update: float,
    workload: dict[str, Any],
) -> Row:
    seconds, learning = variant.seconds[steps], sum(variant.learning[steps])
    total = variant.total(steps)
    ratios = [b / a for a, b in zip(seconds, baseline, strict=True)]
    return counted_row(
        f"rollout/{when}/{row_name(variant.name, total)}",
        total.tokens / sum(seconds),
        total.tokens / sum(baseline),
        "tokens/s",
        "plain decoding",
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        rounds=len(ratios),
        seconds=sum(seconds),
        baseline_seconds=sum(baseline),
        learn_seconds=learning,
        update_seconds=update,
        step_ratio=(sum(baseline) + update) / (sum(seconds) + learning + update),
        tokens=total.tokens,
        accept_length=total.accept_length,
        acceptance=total.accepted / max(total.drafted, 1),
        verified_per_token=total.rows / total.tokens,
        passes=total.steps,
        verifying_passes=total.verified,
        ahead_tokens=total.ahead_tokens,
        ahead_share=total.ahead_seconds / (total.host_seconds + total.device_seconds),
        ahead_seconds=total.ahead_seconds + total.ahead_pass_seconds,
        ahead_saved_seconds=total.ahead_saved_seconds,
        pass_seconds=total.device_seconds,
        host_share=total.host_seconds / (total.host_seconds + total.device_seconds),
        draft_share=total.draft_seconds / sum(seconds),
        train_share=total.train_seconds / sum(seconds),
        **workload,
        **_windows(variant.windows[steps]),
        idle_share=total.idle_seconds / (total.idle_seconds + total.device_seconds),
    )
